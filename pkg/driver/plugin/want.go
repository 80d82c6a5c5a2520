// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/claimstatus"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// observedState is what is known now, from all sources. It has no history, except for what was last said about devices: without it the
// messages that users read would change all the time.
type observedState struct {
	// node is nil until it was read, and neighbours are what else on it gives out its GPUs.
	node       *corev1.Node
	neighbours neighbours
	// policy is the last valid one, or noPolicy, and policyErr why the present one is not.
	policy    *policy.Policy
	policyErr error

	// gpus were found, and inventory has the devices of them that are to be published. It is nil as long as there are none.
	gpus      *knownGPUs
	inventory *device.Inventory
	// complete says that everything is known which decides about the devices to publish. survey and statements say what claims and others
	// have on the GPUs; they are used once enough says that enough GPUs were observed. health is what package health says.
	complete   bool
	enough     bool
	survey     device.Status
	statements []claim.Statement
	health     []device.Condition

	// live are the claims that have devices, and previous are the states of these devices as they were last published.
	live     []claim.LiveClaim
	previous []claimState
	now      time.Time
}

// wanted is what the cluster, the kubelet and people should be told.
type wanted struct {
	*observedState
	// certain says that enough is known to replace the slices and labels that the API server has.
	certain bool
	// status and inventory are for claims and metrics. Slices are made of the inventory, taints of its status, and labels of the node of the
	// GPUs that are offered.
	status    device.Status
	inventory *device.Inventory
	offered   []*gpu.GPU
	// states are for the status of claims and the kubelet.
	states []claimState
	// events hold now.
	events []events.Statement
}

// want derives everything that is published from what is known. It is a pure function: after a restart the result is the same.
func want(o *observedState) *wanted {
	w := &wanted{observedState: o, events: slices.Concat(nodeStatements(o), policyStatements(o))}
	if o.inventory == nil {
		return w
	}
	status, unknown := o.status()
	w.status = status
	w.certain, w.inventory = o.enough && o.complete, o.inventory.With(w.status)
	w.offered = offeredGPUs(w.inventory)
	w.states = judgeAll(o.live, w.status.Sorted().Conditions, o.previous, o.now)
	if o.gpus.discovered { // before, there may be more GPUs
		w.events = slices.Concat(w.events, gpuStatements(o), profileStatements(o), unknown)
	}
	if o.enough {
		w.events = slices.Concat(w.events, claimStatements(o.statements), conditionStatements(w.status), userStatements(o.live, w.status.Conditions))
	}
	return w
}

// status returns the conditions of the GPUs, and events about cordons of GPUs that do not exist.
func (o *observedState) status() (status device.Status, unknown []events.Statement) {
	cordoned, unknown := cordon(o.node, o.gpus.node)
	foreign := foreignConditions(o.neighbours.claims, o.gpus.node.GPUs)
	return device.Status{
		Static:     o.survey.Static,
		Conditions: join(&o.policy.Health, o.gpus.conditions(), o.survey.Conditions, o.health, foreign, cordoned),
	}, unknown
}

// over returns the event that something does not hold any more, if that is known and worth an event.
func (w *wanted) over(was events.Statement) (e events.Event, is bool) {
	switch key := was.Key.(type) {
	case policyKey:
		return *key.over, !slices.ContainsFunc(w.events, func(s events.Statement) bool { return s.Reason == was.Reason })
	case kubeletKey:
		knows, err := extendedResources(w.node)
		return events.Event{Type: corev1.EventTypeNormal, Reason: reasonExtendedOn, Text: "The kubelet gives pods " + aboutExtended + "."}, knows && err == nil
	case unclaimed.Kind:
		text := sentences(w.neighbours.software[key].Text)
		if key == unclaimed.ContainerRuntime {
			return events.Event{Type: corev1.EventTypeNormal, Reason: reasonNotExposed, Text: text}, true
		}
		return events.Event{Type: corev1.EventTypeNormal, Reason: reasonNeighbourGone, Text: text}, true
	case unlistedKey:
		return events.Event{
			Type: corev1.EventTypeNormal, Reason: recoveryReason(device.Lost), Subjects: was.Subjects,
			Text: "the NVIDIA driver lists it now, or it is not on the PCI bus any more.",
		}, true
	case conditionKey:
		// A GPU that is not there any more has not recovered, and neither has one that does not work for another reason.
		inTrouble := slices.ContainsFunc(w.status.Conditions, func(is device.Condition) bool {
			return is.PCIAddress == key.PCIAddress && (is.Reason == key.Reason || is.Reason.IsFailure())
		})
		return recovery(key.Condition), w.gpus.node.Has(key.PCIAddress) && !inTrouble
	case userKey:
		d := deviceOf(w.live, key)
		inTrouble := d != nil && slices.ContainsFunc(slices.Concat(forUsers(w.status.Conditions, d)), func(c device.Condition) bool {
			return c.Reason == key.reason || c.Reason.IsFailure()
		})
		return events.Event{
			Claim: was.Claim, Type: corev1.EventTypeNormal, Reason: recoveryReason(key.reason), Subjects: was.Subjects,
			Text: sentences(key.reason.Over(), "Processes that have failed must be restarted"),
		}, d != nil && !inTrouble
	}
	return events.Event{}, false
}

// offeredGPUs are those that have devices which are not withdrawn. One that is broken at the moment is among them: its devices are tainted.
func offeredGPUs(inventory *device.Inventory) (gpus []*gpu.GPU) {
	for _, d := range offered(inventory) {
		if len(gpus) == 0 || gpus[len(gpus)-1] != d.GPU {
			gpus = append(gpus, d.GPU)
		}
	}
	return gpus
}

// maxConditionMessage is how long a condition's message may be, in bytes. The API allows 32 KiB.
const maxConditionMessage = 1024

// statusOf is what the status of claims says.
func statusOf(states []claimState) []claimstatus.Claim {
	claims := make([]claimstatus.Claim, 0, len(states))
	for _, s := range states {
		one := claimstatus.Claim{Ref: s.claim}
		for i := range s.devices {
			d := &s.devices[i]
			one.Devices = append(one.Devices, claimstatus.Device{
				Pool: d.Pool, Device: d.Device, ShareID: d.ShareID,
				Ready: d.ready(), Reason: d.reason, Message: tenant.Text(d.message, s.claim.Namespace, s.claim.UID, maxConditionMessage), Data: statusData(&d.LiveDevice),
			})
		}
		claims = append(claims, one)
	}
	return claims
}

// statusData is the driver's own part of a device's status.
func statusData(d *claim.LiveDevice) []byte {
	s := &api.DeviceStatus{
		TypeMeta: metav1.TypeMeta{APIVersion: api.StatusVersion, Kind: api.DeviceStatusKind},
		Type:     string(d.Kind), UUID: d.UUID(), ParentUUID: d.GPU, PCIBusID: d.PCIAddress, TimeSlice: string(d.Interval),
	}
	if p := d.Partition; p != nil {
		s.MIG = &api.MIGStatus{Profile: p.Profile, Placement: api.PlacementStatus{Start: p.Placement.Start, Size: p.Placement.Size}}
		if !p.Gone {
			s.MIG.GPUInstanceID, s.MIG.ComputeInstanceID = ptr.To(p.InstanceID), ptr.To(p.ComputeID)
		}
	}
	if l := d.Limits; l != nil {
		s.Limits = &api.LimitsStatus{MemoryBytes: l.MemoryBytes, SMPercent: l.Percent, Multiprocessors: l.Multiprocessors}
		if all := d.Resources.Multiprocessors; all > 0 {
			s.Limits.EffectiveSMPercent = l.Multiprocessors * 100 / all
		}
	}
	if d.Session != nil {
		s.MPS = &api.MPSStatus{Session: d.Session.ID, ServersLost: d.Session.Losses, ClientPriority: api.ClientPriority(d.Session.Priority)}
	}
	data, err := json.Marshal(s)
	if err != nil {
		return []byte("{}") // not with these types
	}
	return data
}
