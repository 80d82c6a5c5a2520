// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// Features are what a cluster can do with devices.
type Features struct {
	// PartitionableDevices: the API server stores shared counters.
	PartitionableDevices bool
	// ConsumableCapacity: the API server stores what several claims need to share
	// one device.
	ConsumableCapacity bool
	// ShareCounters: the scheduler remembers the counters that shares have consumed.
	ShareCounters bool
	// Taints: the API server stores them.
	Taints bool
	// TaintEffectNone: the API server takes taints that only tell something.
	TaintEffectNone bool
	// ManyTaints: the API server takes more than four taints of a device.
	ManyTaints bool
}

// maxTaints is how many taints of a device the API server takes: 4 in Kubernetes 1.34, 16 since.
func (f Features) maxTaints() int {
	const few = 4
	if f.ManyTaints {
		return resourceapi.DeviceTaintsMaxLength
	}
	return few
}

// AllFeatures are those of Kubernetes 1.36.2 and later by default.
var AllFeatures = Features{
	PartitionableDevices: true, ConsumableCapacity: true, ShareCounters: true, Taints: true, TaintEffectNone: true, ManyTaints: true,
}

// gates reports whether the API server stores everything.
func (f Features) gates() bool { return f.PartitionableDevices && f.ConsumableCapacity && f.Taints }

func (f Features) or(other Features) Features {
	return Features{
		PartitionableDevices: f.PartitionableDevices || other.PartitionableDevices,
		ConsumableCapacity:   f.ConsumableCapacity || other.ConsumableCapacity,
		ShareCounters:        f.ShareCounters || other.ShareCounters,
		Taints:               f.Taints || other.Taints,
		TaintEffectNone:      f.TaintEffectNone || other.TaintEffectNone,
		ManyTaints:           f.ManyTaints || other.ManyTaints,
	}
}

// limited returns the features of a cluster of this version. Its scheduler is taken for
// as old as the API server; a version that cannot be read is a new one.
func (f Features) limited(version string) Features {
	faults, _ := device.FaultsOfScheduler(version)
	f.PartitionableDevices = f.PartitionableDevices && !faults.IgnoresCounters
	f.ConsumableCapacity = f.ConsumableCapacity && !faults.IgnoresCounters
	f.ShareCounters = !faults.ForgetsShares
	// Both came with the version in which schedulers look for counters in other slices, 1.35.
	f.TaintEffectNone, f.ManyTaints = !faults.IgnoresCounters, !faults.IgnoresCounters
	return f
}

// Feature gates without which the API server drops shared counters, what several
// claims need to share one device, and taints.
const (
	gatePartitionable = "DRAPartitionableDevices"
	gateConsumable    = "DRAConsumableCapacity"
	gateTaints        = "DRADeviceTaints"
)

// While a control plane is upgraded its servers differ, and whichever answers is
// one of them. Devices that disappear for that time may be allocated. So another
// answer than the one before counts when, for changeAfter, all answers, at least
// changeAnswers of them, were like it.
const (
	changeAfter   = 10 * time.Minute
	changeAnswers = 3
)

// Times between questions. They vary, so that the plugins of many nodes do not ask
// together.
const (
	// calmAfter is for asking the version when nothing is missing, askAfter when
	// something is, and probeAfter for trying that although the version is the same:
	// feature gates may have been turned on.
	calmAfter, askAfter, probeAfter = time.Hour, 10 * time.Minute, 30 * time.Minute
	// confirmAfter is for asking again after an answer that was another one.
	confirmAfter = time.Minute
	// firstAnswers are asked for, with firstPause in between, where nothing tells
	// whether the first one is typical.
	firstAnswers, firstPause = 3, 5 * time.Second
)

// features are those of the cluster as far as is known. It is for one goroutine.
type features struct {
	prober prober

	// begun says that now is known.
	begun bool
	now   Features
	// other is what answers have said instead since a time, if there were any.
	other   Features
	answers int
	since   time.Time
	// odd means that fields were refused since an answer was as before.
	odd bool

	// version is that of the server that was asked last, probed when one was asked
	// by trying.
	version string
	probed  time.Time
	// next is when to ask again.
	next time.Time
}

// begin finds out which features the cluster has, before anything is published that
// would be misunderstood without them. What is stored tells what it had.
func (f *features) begin(ctx context.Context, stored []*resourceapi.ResourceSlice) error {
	if f.begun {
		return nil
	}
	answer, err := f.ask(ctx)
	if err != nil {
		return err
	}
	for n := 1; n < firstAnswers && len(stored) == 0 && !answer.gates(); n++ {
		if !loop.Pause(ctx, firstPause) {
			return ctx.Err()
		}
		another, err := f.ask(ctx)
		if err != nil {
			return err
		}
		// Whether fields are stored shows when they are written. What a scheduler
		// does never shows.
		answer = Features{
			PartitionableDevices: answer.PartitionableDevices || another.PartitionableDevices,
			ConsumableCapacity:   answer.ConsumableCapacity || another.ConsumableCapacity,
			Taints:               answer.Taints || another.Taints,
			ShareCounters:        answer.ShareCounters && another.ShareCounters,
			TaintEffectNone:      answer.TaintEffectNone && another.TaintEffectNone,
			ManyTaints:           answer.ManyTaints && another.ManyTaints,
		}
	}
	f.begun, f.now = true, answer.or(usedBy(stored))
	f.settle(ctx, answer)
	f.schedule()
	return nil
}

// usedBy returns the features without which these slices would be others.
func usedBy(stored []*resourceapi.ResourceSlice) (used Features) {
	for _, slice := range stored {
		used.PartitionableDevices = used.PartitionableDevices || len(slice.Spec.SharedCounters) > 0
		for _, d := range slice.Spec.Devices {
			used.Taints = used.Taints || len(d.Taints) > 0
			if d.AllowMultipleAllocations != nil {
				used.ConsumableCapacity = true
				used.ShareCounters = used.ShareCounters || len(d.ConsumesCounters) > 0
			}
		}
	}
	return used
}

// check asks again.
func (f *features) check(ctx context.Context) {
	defer f.schedule()
	answer, err := f.ask(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Could not ask the API server which features it has, will retry", "err", err)
		return
	}
	f.settle(ctx, answer)
}

// settle takes an answer, and reports whether it decides.
func (f *features) settle(ctx context.Context, answer Features) (changed bool) {
	switch {
	case answer == f.now:
		f.answers, f.odd = 0, false
		return false
	case f.answers == 0, answer != f.other:
		f.other, f.answers, f.since = answer, 1, time.Now()
		f.hurry()
		klog.FromContext(ctx).Info("An API server has other features than before; this will count if it lasts",
			"version", f.version, "features", answer, "before", f.now)
		return false
	}
	f.answers++
	if f.answers < changeAnswers || time.Since(f.since) < changeAfter {
		return false
	}
	f.now, f.answers = answer, 0
	return true
}

// inDoubt reports whether the last answers contradict what is published.
func (f *features) inDoubt() bool { return f.answers > 0 || f.odd }

// stores notes that the API server has stored a slice as it was sent.
func (f *features) stores(slice *resourceapi.ResourceSlice) {
	used := usedBy([]*resourceapi.ResourceSlice{slice})
	used.ShareCounters = false
	if f.inDoubt() && used.or(f.other) != f.other {
		f.answers = 0
	}
}

// wait returns how long it is until the next check.
func (f *features) wait() time.Duration { return time.Until(f.next) }

// schedule sets the time of the next check.
func (f *features) schedule() {
	after := calmAfter
	switch {
	case f.inDoubt():
		after = confirmAfter
	case f.now != AllFeatures:
		after = askAfter
	}
	f.next = time.Now().Add(wait.Jitter(after/2, 1))
}

// hurry brings the next check forward.
func (f *features) hurry() {
	if soon := time.Now().Add(confirmAfter / 2); soon.Before(f.next) {
		f.next = soon
	}
}

// ask returns the features of one server. It tries them out only if that may have
// another result than the last time.
func (f *features) ask(ctx context.Context) (Features, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	version, err := f.prober.version(ctx)
	if err != nil {
		return Features{}, err
	}
	if f.begun && version == f.version && !f.inDoubt() && (f.now.gates() || time.Since(f.probed) < probeAfter) {
		return f.now.limited(version), nil
	}
	answer, err := f.prober.gates(ctx)
	if err != nil {
		return Features{}, fmt.Errorf("could not try out which features the API server has: %w", err)
	}
	f.version, f.probed = version, time.Now()
	return answer.limited(version), nil
}
