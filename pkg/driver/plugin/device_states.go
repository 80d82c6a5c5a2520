// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
)

// messageInterval is how long a message stays at least while nothing changes but its words: each change of a pod's or a
// claim's status is a request.
const messageInterval = 10 * time.Minute

// deviceStates are how the devices of prepared claims are, for the kubelet.
type deviceStates struct {
	// staleAfter is how old a survey may be that says something about a device.
	staleAfter time.Duration

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

func newDeviceStates(pollInterval time.Duration) *deviceStates {
	return &deviceStates{staleAfter: 3*pollInterval + 30*time.Second, changed: make(chan struct{})}
}

// set takes how the devices are now, and when the last survey was.
func (s *deviceStates) set(states []claimState, conditions []device.Condition, surveyedAt time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conditions, s.surveyedAt = conditions, surveyedAt
	if !reflect.DeepEqual(s.states, states) {
		s.states = states
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// userKey identifies an event for the users of a claim about one of its devices.
type userKey struct {
	claim  types.UID
	device string
	reason device.Reason
}

// userStatements say to the users of claims what is wrong with their devices. Observers use nothing.
func userStatements(live []claim.LiveClaim, conditions []device.Condition) (all []events.Statement) {
	for _, l := range live {
		for i := range l.Devices {
			d := &l.Devices[i]
			if d.Admin {
				continue
			}
			for _, c := range slices.Concat(forUsers(conditions, d)) {
				all = append(all, events.Statement{Key: userKey{l.Claim.UID, d.Device, c.Reason}, Event: events.Event{
					Claim: l.Claim, Reason: eventReason(c.Reason), Subjects: []string{d.Device}, Text: usersText(c),
				}})
			}
		}
	}
	return all
}

// deviceOf is the device that an event for users was about, or nil if the claim does not have it any more.
func deviceOf(live []claim.LiveClaim, key userKey) *claim.LiveDevice {
	for _, l := range live {
		for i := range l.Devices {
			if d := &l.Devices[i]; l.Claim.UID == key.claim && d.Device == key.device && !d.Admin {
				return d
			}
		}
	}
	return nil
}

// forUsers are the conditions that concern the users of a device.
func forUsers(conditions []device.Condition, d *claim.LiveDevice) (failed, others []device.Condition) {
	for _, c := range conditions {
		switch {
		case conditionTexts[c.Reason].users == "" || !concerns(c, d):
		case c.Reason.IsFailure():
			failed = append(failed, c)
		default:
			others = append(others, c)
		}
	}
	return failed, others
}

// concerns reports whether a condition holds for a device that a claim has. An observer uses no part of its GPU, so that
// conditions of a part do not concern it.
func concerns(c device.Condition, d *claim.LiveDevice) bool {
	switch {
	case c.PCIAddress != d.PCIAddress:
		return false
	case c.Kind == device.MPS && d.Session == nil, c.Undivided && d.Partition != nil:
		return false
	case c.Where == nil:
		return true
	case c.Exact:
		return d.Partition != nil && d.Partition.Placement == *c.Where
	}
	return d.Partition == nil && !d.Admin || d.Partition != nil && d.Partition.Placement.Overlaps(*c.Where)
}

// unusable says why a claim with these devices cannot be prepared, if it is a GPU, and what helps:
// the scheduler does not change a claim that is allocated.
func (s *deviceStates) unusable(devices []string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conditions {
		if c.Where != nil || c.Kind != "" || c.Undivided || !keepsAway(c) || conditionTexts[c.Reason].users == "" {
			continue
		}
		for _, name := range devices {
			if device.IsOf(c.PCIAddress, name) {
				return "device " + name + " cannot be used now, " + conditionTexts[c.Reason].users +
					"; the scheduler does not change a claim that has a device, so " + anotherDevice
			}
		}
	}
	return ""
}

// judgeAll returns the states of the devices of claims, given the previous ones.
func judgeAll(live []claim.LiveClaim, conditions []device.Condition, previous []claimState, now time.Time) []claimState {
	states := make([]claimState, 0, len(live))
	for _, c := range live {
		one := claimState{claim: c.Claim}
		for _, d := range c.Devices {
			is := judge(&d, conditions)
			is.keepMessage(before(previous, c.Claim.UID, &d), now)
			one.devices = append(one.devices, deviceState{d, is})
		}
		states = append(states, one)
	}
	return states
}

// before returns the previous verdict on a device of a claim, empty if there was none.
func before(previous []claimState, uid types.UID, d *claim.LiveDevice) verdict {
	for _, c := range previous {
		for i := range c.devices {
			if was := &c.devices[i]; c.claim.UID == uid && was.Device == d.Device && ptr.Equal(was.ShareID, d.ShareID) {
				return was.verdict
			}
		}
	}
	return verdict{}
}

// verdict is the health of a device, and why.
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
	reasonReady      = "Ready"
	reasonMPSStopped = "MPSStopped"
)

// judge says how a device is, given the conditions of all GPUs. The first finding is
// the reason, and the message has all.
func judge(d *claim.LiveDevice, conditions []device.Condition) verdict {
	failed, others := forUsers(conditions, d)
	findings := slices.Concat(fromConditions(failed), fromDevice(d), fromConditions(others))
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

// fromConditions are the findings that conditions are for the users of a device.
func fromConditions(conditions []device.Condition) (findings []verdict) {
	for _, c := range conditions {
		text := usersText(c)
		findings = append(findings, verdict{health: healthOf(c), reason: eventReason(c.Reason), message: strings.ToUpper(text[:1]) + text[1:], findings: c.Value})
	}
	return findings
}

// fromDevice are the findings about what the claim has.
func fromDevice(d *claim.LiveDevice) []verdict {
	var findings []verdict
	if d.Partition != nil && d.Partition.Gone {
		findings = append(findings, verdict{
			health: kubeletplugin.HealthStatusUnhealthy, reason: claim.ReasonPartitionGone,
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

const (
	// healthInterval is the time between two reports while nothing changes, and
	// healthTimeout how long the kubelet takes one for true.
	healthInterval = 10 * time.Second
	healthTimeout  = 30 * time.Second
	// maxHealthMessage is how much of a message the kubelet takes, in bytes.
	maxHealthMessage = 1024
)

// watch sends the health of the devices that claims have when it changes, and again and again,
// until ctx ends. A kubelet that connects anew has another watch beside the old one.
func (s *deviceStates) watch(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for {
		report, changed := s.health(time.Now())
		select {
		case <-ctx.Done():
			return nil
		case reports <- report:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-ticker.C:
		}
	}
}

// health returns a report, and a channel that is closed when there is another. The kubelet
// knows devices by name: of the shares of a device the one that is worst counts.
func (s *deviceStates) health(now time.Time) (kubeletplugin.DeviceHealthReport, <-chan struct{}) {
	s.mu.Lock()
	states, surveyedAt, changed := s.states, s.surveyedAt, s.changed
	s.mu.Unlock()
	worst := map[string]kubeletplugin.DeviceHealth{}
	for _, c := range states {
		for _, d := range c.devices {
			one := kubeletplugin.DeviceHealth{
				PoolName: d.Pool, DeviceName: d.Device, Health: d.health, Message: d.message,
				LastUpdated: surveyedAt, HealthCheckTimeout: healthTimeout,
			}
			switch {
			case now.Sub(surveyedAt) > s.staleAfter:
				one.Health = kubeletplugin.HealthStatusUnknown
				one.Message = fmt.Sprintf("The driver has not been able to look at the GPUs of the node since %s.", surveyedAt.UTC().Format(time.RFC3339))
			case d.reason == reasonReady:
				one.Message = ""
			}
			one.Message = tenant.Text(one.Message, "", "", maxHealthMessage) // of all who have the device
			name := d.Pool + "/" + d.Device
			if other, known := worst[name]; !known || severity[one.Health] > severity[other.Health] {
				worst[name] = one
			}
		}
	}
	var report kubeletplugin.DeviceHealthReport
	for _, name := range slices.Sorted(maps.Keys(worst)) {
		report.Devices = append(report.Devices, worst[name])
	}
	return report, changed
}
