// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// ClaimViewer knows what prepared claims have. Its methods may be called concurrently with
// all others, and wait for no GPU.
type ClaimViewer interface {
	Live() ([]claim.LiveClaim, error)
	// Changed returns a channel that is closed when this process next changes anything.
	Changed() <-chan struct{}
}

// messageInterval is how long a message stays at least while nothing changes but its words: each change of a pod's or a
// claim's status is a request.
const messageInterval = 10 * time.Minute

// changesSettle is how long a change is left alone for others to join it: preparing a claim
// alone is several.
const changesSettle = 200 * time.Millisecond

// deviceStates follows the devices of prepared claims, and tells others: the status of
// claims, and the kubelet. It never looks at a GPU, so that one that hangs holds up nothing.
type deviceStates struct {
	claims ClaimViewer
	// tell takes the states of all claims when there is a reason to look at them.
	tell func([]claimState)
	// staleAfter is how old a survey may be that says something about a device.
	staleAfter time.Duration
	look       loop.Trigger
	problem    logchange.Problem

	mu sync.Mutex
	// conditions are in a fixed order. surveyedAt is zero before the first survey.
	conditions []device.Condition
	surveyedAt time.Time
	states     []claimState
	// changed is closed when the states change.
	changed chan struct{}
}

// claimState is the state of the devices of a claim.
type claimState struct {
	claim   claim.Ref
	devices []deviceState
}

// deviceState is a device and how it is.
type deviceState struct {
	claim.LiveDevice
	verdict
}

func newDeviceStates(claims ClaimViewer, tell func([]claimState), pollInterval time.Duration) *deviceStates {
	return &deviceStates{
		claims: claims, tell: tell, staleAfter: 3*pollInterval + 30*time.Second,
		look: loop.NewTrigger(), changed: make(chan struct{}),
	}
}

// set takes the status of the GPUs, and when the last survey was.
func (s *deviceStates) set(status device.Status, surveyedAt time.Time) {
	s.mu.Lock()
	s.conditions, s.surveyedAt = status.Sorted().Conditions, surveyedAt
	s.mu.Unlock()
	s.look.Fire()
}

// run follows the devices until ctx ends.
func (s *deviceStates) run(ctx context.Context) {
	for ctx.Err() == nil {
		changed := s.claims.Changed()
		s.update(ctx)
		select {
		case <-ctx.Done():
		case <-s.look:
		case <-changed:
			loop.Pause(ctx, changesSettle)
		}
	}
}

// update looks at all claims. Before the first survey nothing can be said of them.
func (s *deviceStates) update(ctx context.Context) {
	live, err := s.claims.Live()
	s.problem.Log(ctx, err, "It is not known what claims have, their status stays as it is", "It is known again what claims have")
	s.mu.Lock()
	conditions, known := s.conditions, !s.surveyedAt.IsZero()
	s.mu.Unlock()
	if err != nil || !known {
		return
	}
	states := s.judgeAll(live, conditions, time.Now())
	s.tell(states)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !reflect.DeepEqual(s.states, states) {
		s.states = states
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// judgeAll says how the devices are. It is called by update only, which changes the states.
func (s *deviceStates) judgeAll(live []claim.LiveClaim, conditions []device.Condition, now time.Time) []claimState {
	type key struct {
		claim         types.UID
		device, share string
	}
	keyOf := func(claim types.UID, d *claim.LiveDevice) key {
		return key{claim, d.Device, string(ptr.Deref(d.ShareID, ""))}
	}
	before := map[key]verdict{}
	for _, c := range s.states {
		for i := range c.devices {
			before[keyOf(c.claim.UID, &c.devices[i].LiveDevice)] = c.devices[i].verdict
		}
	}
	states := make([]claimState, 0, len(live))
	for _, c := range live {
		one := claimState{claim: c.Claim}
		for _, d := range c.Devices {
			is := judge(&d, conditions)
			is.keepMessage(before[keyOf(c.Claim.UID, &d)], now)
			one.devices = append(one.devices, deviceState{d, is})
		}
		states = append(states, one)
	}
	return states
}

// verdict says how a device is.
type verdict struct {
	health kubeletplugin.HealthStatus
	// reason and message are for people; the reason is that of events.
	reason, message string
	// findings tell apart what was found: of one finding its value, such as the number of an XID,
	// of all the reasons with these. said is when the message was new.
	findings string
	said     time.Time
}

// keepMessage keeps what is said for a while if nothing but words changes: some say how long something has lasted, and what leaves a
// device healthy may come and go.
func (v *verdict) keepMessage(before verdict, now time.Time) {
	v.said = now
	same := before.health == v.health && (before.findings == v.findings || v.ready())
	if same && (before.message == v.message || now.Sub(before.said) < messageInterval) {
		*v = before
	}
}

// ready reports whether containers can use the device.
func (v verdict) ready() bool { return v.health == kubeletplugin.HealthStatusHealthy }

const (
	reasonReady         = "Ready"
	reasonPartitionGone = claim.ReasonPartitionGone
	reasonMPSStopped    = "MPSStopped"
)

// judge says how a device is, given the conditions of all GPUs. The first finding is
// the reason, and the message has all.
func judge(d *claim.LiveDevice, conditions []device.Condition) verdict {
	isFailure := func(c device.Condition) bool { return slices.Contains(failures, c.Reason) }
	findings := slices.Concat(
		fromConditions(conditions, func(c device.Condition) bool { return isFailure(c) && concerns(c, d) }),
		fromDevice(d),
		fromConditions(conditions, func(c device.Condition) bool { return !isFailure(c) && concerns(c, d) }))
	if len(findings) == 0 {
		return verdict{health: kubeletplugin.HealthStatusHealthy, reason: reasonReady, message: "The device is ready."}
	}
	total := findings[0]
	var texts, reasons []string
	for _, f := range findings {
		texts, reasons = append(texts, f.message), append(reasons, f.reason+f.findings)
		if severity[f.health] > severity[total.health] {
			total.health, total.reason = f.health, f.reason
		}
	}
	total.message, total.findings = strings.Join(texts, " "), strings.Join(reasons, " ")
	return total
}

var severity = map[kubeletplugin.HealthStatus]int{
	kubeletplugin.HealthStatusHealthy: 0, kubeletplugin.HealthStatusUnknown: 1, kubeletplugin.HealthStatusUnhealthy: 2,
}

// healthOf says what a condition means for a device that a claim has. Of a GPU that does not
// answer nothing is known, and neither of MPS while its supervisor does not.
func healthOf(c device.Condition) kubeletplugin.HealthStatus {
	switch {
	case !keepsAway(c):
		return kubeletplugin.HealthStatusHealthy
	case c.Reason == device.Unresponsive, c.Reason == device.MPSUnavailable:
		return kubeletplugin.HealthStatusUnknown
	}
	return kubeletplugin.HealthStatusUnhealthy
}

// fromConditions are the findings that concern the users of a device.
func fromConditions(conditions []device.Condition, which func(device.Condition) bool) []verdict {
	var findings []verdict
	for _, c := range conditions {
		if !which(c) || conditionTexts[c.Reason].users == "" {
			continue
		}
		text := usersText(c)
		findings = append(findings, verdict{
			health: healthOf(c), reason: eventReason(c.Reason), message: strings.ToUpper(text[:1]) + text[1:], findings: c.Value,
		})
	}
	return findings
}

// fromDevice are the findings about what the claim has.
func fromDevice(d *claim.LiveDevice) []verdict {
	var findings []verdict
	if d.Partition != nil && d.Partition.Gone {
		findings = append(findings, verdict{
			health: kubeletplugin.HealthStatusUnhealthy, reason: reasonPartitionGone,
			message: "The partition was removed by somebody else, or by a reset of the GPU. Containers cannot use it any more: delete the pods of the claim.",
		})
	}
	if d.Session != nil && !d.Session.Running {
		findings = append(findings, verdict{
			health: kubeletplugin.HealthStatusUnhealthy, reason: reasonMPSStopped,
			message: "The MPS server of the device is gone and will be started again. Processes that used it have failed.",
		})
	}
	return findings
}
