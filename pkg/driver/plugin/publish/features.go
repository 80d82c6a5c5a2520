// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
)

// Features are what a cluster can do with devices: a set of bits.
type Features uint8

const (
	// PartitionableDevices means that the API server stores shared counters.
	PartitionableDevices Features = 1 << iota
	// ConsumableCapacity means that the API server stores what several claims need to share
	// one device.
	ConsumableCapacity
	// Taints means that the API server stores them.
	Taints
	// ShareCounters means that the scheduler remembers the counters that shares have consumed.
	ShareCounters
	// NewTaints means that the API server takes taints that only tell something, and more than four of a device, as from Kubernetes 1.35.
	NewTaints

	// gates are what the API server says by its feature gates, the others follow from its version.
	gates = PartitionableDevices | ConsumableCapacity | Taints
	// AllFeatures are those of Kubernetes 1.36.2 and later by default.
	AllFeatures = gates | ShareCounters | NewTaints
)

// names are in the order of the bits, feature gates first.
var names = []string{gatePartitionable, gateConsumable, gateTaints, "counters of shares", "taints of Kubernetes 1.35"}

// Feature gates without which the API server drops shared counters, what several
// claims need to share one device, and taints.
const (
	gatePartitionable = "DRAPartitionableDevices"
	gateConsumable    = "DRAConsumableCapacity"
	gateTaints        = "DRADeviceTaints"
)

func (f Features) String() string {
	var has []string
	for i, name := range names {
		if f&(1<<i) != 0 {
			has = append(has, name)
		}
	}
	return strings.Join(has, ", ")
}

func (f Features) has(all Features) bool { return f&all == all }

// maxTaints is how many taints of a device the API server takes: 4 in Kubernetes 1.34, 16 since.
func (f Features) maxTaints() int {
	if f.has(NewTaints) {
		return resourceapi.DeviceTaintsMaxLength
	}
	return 4
}

// limited returns the features of a cluster of this version whose API server has these gates. Its scheduler is taken for
// as old as the API server; a version that cannot be read is a new one.
func (f Features) limited(version string) Features {
	faults, _ := device.FaultsOfScheduler(version)
	switch {
	case faults.IgnoresCounters: // before 1.35
		return f&Taints | ShareCounters
	case !f.has(PartitionableDevices):
		// Without counters nothing would keep a share and the whole GPU from being allocated together.
		f &^= ConsumableCapacity
	}
	if !faults.ForgetsShares {
		f |= ShareCounters
	}
	return f | NewTaints
}

// usedBy returns the features without which these slices would be others.
func usedBy(stored ...*resourceapi.ResourceSlice) (used Features) {
	for _, slice := range stored {
		if len(slice.Spec.SharedCounters) > 0 {
			used |= PartitionableDevices
		}
		for _, d := range slice.Spec.Devices {
			if len(d.ConsumesCounters) > 0 {
				used |= PartitionableDevices
			}
			if len(d.Taints) > 0 {
				used |= Taints
			}
			if d.AllowMultipleAllocations != nil {
				used |= ConsumableCapacity
				if len(d.ConsumesCounters) > 0 {
					used |= ShareCounters
				}
			}
		}
	}
	return used
}

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
	// calmAfter is for asking when nothing is missing, and askAfter when something is: feature gates may have been turned on.
	calmAfter, askAfter = time.Hour, 20 * time.Minute
	// confirmAfter is for asking again after an answer that was another one.
	confirmAfter = time.Minute
)

// features are those of the cluster as far as is known. It is for one goroutine. Questions and writes use connections of their own: an
// established one leads to the same server again and again.
type features struct {
	pool   pool
	client rest.Interface

	// known says that now is.
	known bool
	now   Features
	// other is what answers have said instead since a time, if there were any.
	other   Features
	answers int
	since   time.Time
	// suspect means that fields were refused or dropped since an answer was as before.
	suspect bool

	// version is that of the server that was asked last.
	version string
	// next is when to ask again.
	next time.Time
}

// check asks, the first time before anything is published that would be misunderstood without the
// features. What is stored tells what the cluster had.
func (f *features) check(ctx context.Context, stored []*resourceapi.ResourceSlice) error {
	answer, err := f.ask(ctx)
	if err != nil {
		f.schedule()
		return err
	}
	if !f.known {
		f.known, f.now = true, answer|usedBy(stored...)
	}
	f.settle(ctx, answer)
	return nil
}

// due reports whether it is time to ask again.
func (f *features) due() bool { return !time.Now().Before(f.next) }

// settle takes an answer.
func (f *features) settle(ctx context.Context, answer Features) {
	logger := klog.FromContext(ctx)
	switch {
	case answer == f.now:
		f.answers, f.suspect = 0, false
	case f.answers == 0, answer != f.other:
		f.other, f.answers, f.since = answer, 1, time.Now()
		logger.Info("An API server has other features than before; this will count if it lasts", "version", f.version, "features", answer, "before", f.now)
	default:
		f.answers++
		if f.answers >= changeAnswers && time.Since(f.since) >= changeAfter {
			logger.Info("The API servers have other features, publishing accordingly", "version", f.version, "features", answer, "before", f.now)
			f.now, f.answers, f.suspect = answer, 0, false
		}
	}
	f.schedule()
}

// askSoon makes the next question come sooner.
func (f *features) askSoon() {
	f.suspect = true
	if soon := time.Now().Add(confirmAfter / 2); soon.Before(f.next) {
		f.next = soon
	}
}

// schedule sets the time of the next question.
func (f *features) schedule() {
	after := calmAfter
	switch {
	case f.answers > 0 || f.suspect:
		after = confirmAfter
	case f.now != AllFeatures:
		after = askAfter
	}
	f.next = time.Now().Add(wait.Jitter(after/2, 1))
}

// ask returns the features of one server. It tries them out only if that may have
// another result than the last time.
func (f *features) ask(ctx context.Context) (Features, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	version, err := f.serverVersion(ctx)
	if err != nil {
		return 0, err
	}
	found := f.now & gates
	if version != f.version || f.answers > 0 || f.suspect || found != gates {
		if found, err = f.gates(ctx, version); err != nil {
			return 0, fmt.Errorf("could not try out which features the API server has: %w", err)
		}
	}
	f.version = version
	return found.limited(version), nil
}

// Reasons of events.
const (
	reasonLeftOut          = "ClusterLacksFeature"
	reasonSchedulerCrashes = "SchedulerCrashes"
)

// leftOut says why devices are not among those that are wanted, if some are not.
func (f *features) leftOut(some bool) string {
	if !some {
		return ""
	}
	const noticed = "; this is noticed within an hour"
	faults, _ := device.FaultsOfScheduler(f.version)
	switch {
	case faults.IgnoresCounters:
		return fmt.Sprintf("Only whole GPUs are offered, because the scheduler of Kubernetes %s ignores the counters "+
			"that MIG partitions and shares need: upgrade to 1.36.2 or later%s", f.version, noticed)
	case !f.now.has(PartitionableDevices):
		return "Only whole GPUs are offered, because the API server does not store the counters that MIG partitions and shares need: " +
			"turn on the feature gate " + gatePartitionable + " (Kubernetes 1.35; on by default from 1.36) " +
			"in kube-apiserver and kube-scheduler" + noticed
	case !f.now.has(ConsumableCapacity):
		return "No MPS and time-slice shares are offered, because the API server does not store what they need: " +
			"turn on the feature gate " + gateConsumable + " (Kubernetes 1.34; on by default from 1.36) " +
			"in kube-apiserver, kube-scheduler and kubelet" + noticed
	case !f.now.has(ShareCounters):
		return fmt.Sprintf("No MPS and time-slice shares are offered next to other devices of a GPU, because the scheduler of Kubernetes %s "+
			"would also allocate what overlaps them (kubernetes/kubernetes#139034): upgrade to 1.36.2 or later, "+
			"or offer nothing but one kind of shares of a GPU", f.version)
	case !f.now.has(Taints):
		return "Nothing is offered for observation only, and devices that cannot be used may be allocated, because the API server does not store " +
			"taints: turn on the feature gate " + gateTaints + " (on by default from Kubernetes 1.36)" + noticed
	}
	return ""
}

// crashes says that a claim can bring down the scheduler because of what is published, if that draws on counters. The devices stay published: without
// their counters those that claims have would be allocated again.
func (f *features) crashes(drawsOnCounters bool) string {
	faults, _ := device.FaultsOfScheduler(f.version)
	if !faults.CrashesOnAll || !drawsOnCounters {
		return ""
	}
	return fmt.Sprintf("The scheduler of Kubernetes %s crashes, again and again, at a claim for all devices of a class of this node "+
		"(allocationMode: All, kubernetes/kubernetes#138882): upgrade to 1.35.6, 1.36.2 or later. Until then such claims must be refused: "+
		"a helm upgrade of this driver on this version makes the admission policy for that, unless the value requestPolicy.allDevices is Allow",
		f.version)
}

// serverVersion returns the version of the server.
func (f *features) serverVersion(ctx context.Context) (string, error) {
	var found version.Info
	body, err := f.client.Get().AbsPath("/version").SetHeader("Connection", "close").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(body, &found)
	}
	if err != nil {
		return "", fmt.Errorf("ask for the API server's version: %w", err)
	}
	return found.GitVersion, nil
}

// gates returns the features that a server of this version has by its feature gates. It creates a slice
// that needs them, as a dry run that stores nothing. With a gate off its fields come back
// empty. Kubernetes 1.34 wants counter sets and devices in the same slice and refuses one
// whose devices draw on counters of another, so that it is asked for taints only.
//
// A slice of counters is not tried: their field has the gate of the devices' field, and what
// is stored is compared with what was sent.
func (f *features) gates(ctx context.Context, version string) (Features, error) {
	probe := resourceapi.Device{
		Name: "probe", Taints: []resourceapi.DeviceTaint{{Key: f.pool.driverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
	}
	if faults, _ := device.FaultsOfScheduler(version); !faults.IgnoresCounters {
		probe.AllowMultipleAllocations = ptr.To(true)
		probe.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
			CounterSet: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: resource.MustParse("1")}},
		}}
	}
	stored, err := f.write(ctx, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "partage-probe-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   f.pool.driverName,
			NodeName: &f.pool.nodeName,
			Pool:     resourceapi.ResourcePool{Name: f.pool.nodeName, ResourceSliceCount: 2},
			Devices:  []resourceapi.Device{probe},
		},
	}, []string{metav1.DryRunAll})
	if err != nil {
		return 0, fmt.Errorf("dry run: %w", err)
	}
	return usedBy(stored) & gates, nil
}

// write creates a slice, or updates it if it has a UID, on a connection of its own.
func (f *features) write(ctx context.Context, slice *resourceapi.ResourceSlice, dryRun []string) (*resourceapi.ResourceSlice, error) {
	verb, request := "create", f.client.Post().VersionedParams(&metav1.CreateOptions{DryRun: dryRun}, scheme.ParameterCodec)
	if slice.UID != "" {
		verb, request = "update", f.client.Put().Name(slice.Name)
	}
	stored := &resourceapi.ResourceSlice{}
	err := request.Resource(sliceResource.Resource).SetHeader("Connection", "close").Body(slice).Do(ctx).Into(stored)
	if err != nil {
		return nil, fmt.Errorf("%s ResourceSlice %s: %w", verb, cmp.Or(slice.Name, slice.GenerateName), err)
	}
	return stored, nil
}
