// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// conditionKey identifies a condition, whatever its message. The condition in it has no pointers.
type conditionKey struct {
	device.Condition
	everywhere bool
	where      gpu.Placement
}

func keyOf(c device.Condition) conditionKey {
	key := conditionKey{Condition: c, everywhere: c.Where == nil, where: ptr.Deref(c.Where, gpu.Placement{})}
	key.Message, key.Effect, key.Undivided, key.Over, key.Where, key.ProfileID = "", "", false, false, nil, nil
	return key
}

// join keeps one of several conditions with the same key: the first that also concerns partitions, if any does, or else the first. The
// policy decides about effects that are not decided yet, if it has any for the reason.
func join(reaction *policy.Health, all ...[]device.Condition) (joined []device.Condition) {
	at := map[conditionKey]int{}
	for _, c := range slices.Concat(all...) {
		c.Effect = cmp.Or(c.Effect, reaction.Conditions[string(c.Reason)])
		key := keyOf(c)
		i, found := at[key]
		switch {
		case !found:
			at[key], joined = len(joined), append(joined, c)
		case joined[i].Undivided && !c.Undivided:
			joined[i] = c
		}
	}
	return joined
}

// conditionStatements say what holds of the GPUs of a node. Another effect is another event: people read whether pods are evicted.
func conditionStatements(status device.Status) (all []events.Statement) {
	for _, c := range status.Conditions {
		key := keyOf(c)
		key.Effect = c.EffectInForce()
		all = append(all, events.Statement{Key: key, Event: events.Event{
			Reason: eventReason(c.Reason), Subjects: []string{c.PCIAddress}, Text: adminText(c),
		}})
	}
	return append(all, staticStatements(status.Static)...)
}

// recovery says that a condition is over.
func recovery(was device.Condition) events.Event {
	offered := ""
	if keepsAway(was) {
		offered = "Devices are offered again as soon as no taint keeps pods away" // others may, and one that has come back stays for a time
	}
	return events.Event{
		Type: corev1.EventTypeNormal, Reason: recoveryReason(was.Reason), Subjects: []string{was.PCIAddress},
		Text: sentences(was.Reason.Over(), offered),
	}
}

// reasonStaticPartitions is the reason of an event.
const reasonStaticPartitions = "GPUPartitionsOfOthers"

// staticStatements say which partitions somebody else has made. They are nothing to repair, and may be there on purpose.
func staticStatements(partitions []device.Static) (all []events.Statement) {
	byGPU := map[string][]string{}
	for _, one := range partitions {
		if !one.Gone {
			byGPU[one.PCIAddress] = append(byGPU[one.PCIAddress], one.UUID)
		}
	}
	for address, uuids := range byGPU {
		slices.Sort(uuids)
		text := "partitions that were not made by this driver are offered as they are, and nothing that overlaps them: " + strings.Join(uuids, ", ")
		all = append(all, events.Statement{Key: address + text, Event: events.Event{
			Type: corev1.EventTypeNormal, Reason: reasonStaticPartitions, Subjects: []string{address}, Text: text,
		}})
	}
	return all
}

// claimStatements say what a survey has found of claims.
func claimStatements(found []claim.Statement) (all []events.Statement) {
	for _, s := range found {
		key := s
		key.Text = "" // names processes, which come and go
		one := events.Statement{Key: key, Event: events.Event{Claim: s.Claim, Reason: s.Reason, Text: s.Text}}
		if s.Device != "" {
			one.Subjects = []string{s.Device}
		}
		all = append(all, one)
	}
	return all
}

// abbreviations are words of reasons that are in capitals in the reasons of events.
var abbreviations = map[string]string{"xid": "XID", "ecc": "ECC"}

// eventReason makes GPUResetRequired of reset-required, GPULost of gpu-lost and
// MPSUnhealthy of mps-unhealthy.
func eventReason(reason device.Reason) string {
	var name strings.Builder
	rest, found := strings.CutPrefix(string(reason), "mps-")
	if found {
		name.WriteString("MPS")
	} else {
		name.WriteString("GPU")
		rest = strings.TrimPrefix(rest, "gpu-")
	}
	for word := range strings.SplitSeq(rest, "-") {
		if word != "" {
			name.WriteString(cmp.Or(abbreviations[word], strings.ToUpper(word[:1])+word[1:]))
		}
	}
	return name.String()
}

// conditionText is what people read about a condition, beside its message.
type conditionText struct {
	// admin is what can be done about it, unless the message says so.
	admin string
	// users begins the text for the users of the device, and advice ends it. Without
	// them it does not concern them.
	users, advice string
}

const anotherDevice = "delete the pod, and replace the claim if it was not made from a template, to get another device"

var conditionTexts = map[device.Reason]conditionText{
	device.Lost: {
		admin:  "Pods that use it do not work any more. Drain the node and restart it; if it is lost again, the GPU or its slot may be broken",
		users:  "the GPU is lost",
		advice: "Processes that use it fail. To go on, " + anotherDevice,
	},
	device.ResetRequired: {
		admin:  "Delete the pods that use it, then reset it (nvidia-smi --gpu-reset) or restart the node",
		users:  "the GPU does nothing until an administrator resets it",
		advice: "Processes that use it fail. To go on, " + anotherDevice,
	},
	device.Unresponsive: {
		admin: "If this lasts, see whether the NVIDIA driver is loaded and whether the kernel log has XID errors, " +
			"then reset the GPU or restart the node",
		users:  "the GPU does not answer",
		advice: "Processes that use it may hang. If this lasts, " + anotherDevice,
	},
	device.RecoveryRequired: {
		admin: "Delete the pods that use it, then do what the driver wants; a reset is nvidia-smi --gpu-reset, " +
			"and a restart of the node does it, too",
		users:  "the GPU needs a reset or a restart of its node",
		advice: "Processes that use it may fail. To go on, " + anotherDevice,
	},
	device.XID: {
		users:  "the driver has reported an error of the GPU",
		advice: "Processes that use it may have failed. If they do not work again, " + anotherDevice,
	},
	device.UncorrectedECC: {
		admin:  "If it happens again, contact the vendor of the GPU",
		users:  "the memory of the GPU had an error",
		advice: "Processes that used the memory have failed. If they do not work again, " + anotherDevice,
	},
	device.RowRemapPending: {admin: "Reset the GPU when no pod uses it"},
	device.RowRemapFailed: {
		admin:  "Reset the GPU. If this lasts, have it replaced",
		users:  "the memory of the GPU is broken",
		advice: "Processes that use it may fail. If they do, " + anotherDevice,
	},
	device.MemoryUnrepairable: {
		admin:  "Have the GPU replaced",
		users:  "the memory of the GPU is broken",
		advice: "Processes that use it may fail. If they do, " + anotherDevice,
	},
	device.FabricUnhealthy: {
		admin:  "Look at the NVLink connections (nvidia-smi -q, Fabric) and at the fabric manager",
		users:  "the GPU has no good connection to the NVLink fabric",
		advice: "Processes that use several GPUs may fail or be slow. If they do, " + anotherDevice,
	},
	device.Throttled: {
		admin: "Check the cooling and the power supply of the machine",
		users: "the GPU is slower than it could be",
	},
	device.Unmonitored: {
		admin: "Its errors are noticed only when it does not answer. See the log of the plugin, and the version of the NVIDIA driver",
	},
	device.MPSUnhealthy: {
		admin:  "If this lasts, delete the pods that have the device: MPS starts again when all of its processes have ended",
		users:  "MPS accepts no new processes",
		advice: "Containers that start again fail until the processes that run have ended. If this lasts, delete the pod",
	},
	device.MPSUnavailable: {
		admin:  "No MPS shares are allocated until the MPS supervisor of this node runs: look at its pod",
		users:  "the MPS supervisor of the node does not answer",
		advice: "MPS servers end with it, and containers that use MPS cannot start until it is back",
	},
	device.ForeignClaim: {
		admin: "Its pods run on, and nothing else is offered of the GPU until they have ended. Delete them, so that they are made again with devices of this driver",
	},
	device.Cordoned: {
		admin: "Take it out of the annotation to offer it again",
	},
	device.Opened: {
		admin: "The next claim of the GPU gets it all the same. See what the process wants there; an agent of the node belongs into kubeletPlugin.ignoredNamespaces",
	},
	device.Occupied:       {},
	device.ReleasePending: {},
}

// evictedText: what takes pods with claims away does not see extended resources (kubernetes#141290).
const evictedText = "Pods that use it are evicted; delete those that ask for nvidia.com/gpu"

// adminText is the text of an event about the node.
func adminText(c device.Condition) string {
	evicted := ""
	if c.EffectInForce() == policy.EffectNoExecute {
		evicted = evictedText
	}
	message, advice := withoutAddress(c.Message, c.PCIAddress), conditionTexts[c.Reason].admin
	if c.Over {
		message, advice = device.HeldBack+" for a while; it was: "+message, ""
	}
	return sentences(message, evicted, advice)
}

// keepsAway reports whether a condition keeps devices from being offered.
func keepsAway(c device.Condition) bool { return c.EffectInForce() != policy.EffectNone }

// usersText is the text of events about claims and pods that use a device.
func usersText(c device.Condition) string {
	text, advice := conditionTexts[c.Reason].users, conditionTexts[c.Reason].advice
	if c.Over {
		text, advice = "a fault of the GPU is over, and the GPU is held back for a while", ""
	}
	if c.EffectInForce() == policy.EffectNoExecute {
		advice = evictedText
	}
	return sentences(text+" ("+withoutAddress(c.Message, c.PCIAddress)+")", advice)
}

// sentences ends each with a full stop.
func sentences(all ...string) string {
	var text strings.Builder
	for _, s := range all {
		if s = strings.TrimRight(s, ". "); s == "" {
			continue
		}
		if text.Len() > 0 {
			text.WriteByte(' ')
		}
		text.WriteString(s + ".")
	}
	return text.String()
}

// withoutAddress removes the address of a GPU, which the event has anyway. Each function that
// returned the error may have added it.
func withoutAddress(message, pciAddress string) string {
	name := "GPU " + pciAddress
	return strings.NewReplacer(" of "+name, "", " on "+name, "", name+": ", "", name+" ", "").Replace(message)
}

// recoveryReason makes GPURecovered and MPSRecovered.
func recoveryReason(reason device.Reason) string {
	if strings.HasPrefix(string(reason), "mps-") {
		return "MPSRecovered"
	}
	return "GPURecovered"
}
