// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/policy/xid"
)

// condition is what a taint of the driver says to people.
type condition struct {
	text, title string
	// normal says that it is no fault of the GPU.
	normal bool
}

var conditions = map[device.Reason]condition{
	device.Occupied:           {"occupied", "An instance that was not made for a claim is in the place, or uses an engine that is needed.", true},
	device.ReleasePending:     {"release pending", "What an ended claim had could not be removed yet. The driver keeps trying.", true},
	device.Opened:             {"opened", "A process without a claim has the GPU's device node open. It keeps nobody from using the GPU.", true},
	device.Unresponsive:       {"unresponsive", "The GPU does not answer.", false},
	device.Lost:               {"GPU lost", "The GPU has fallen off the bus, or is not there any more. Drain the node and restart it.", false},
	device.ResetRequired:      {"reset required", "The GPU does nothing until it is reset.", false},
	device.RecoveryRequired:   {"recovery required", "The NVIDIA driver wants something to be done about the GPU.", false},
	device.XID:                {"XID", "The NVIDIA driver has reported an error.", false},
	device.UncorrectedECC:     {"uncorrected ECC error", "Memory had an error that could not be corrected.", false},
	device.RowRemapPending:    {"row remap pending", "Broken memory will be replaced at the next reset.", false},
	device.RowRemapFailed:     {"row remap failed", "Broken memory could not be replaced. Have the GPU replaced.", false},
	device.MemoryUnrepairable: {"memory unrepairable", "Memory is broken for good. Have the GPU replaced.", false},
	device.FabricUnhealthy:    {"fabric unhealthy", "The connection to the NVLink fabric is not in order.", false},
	device.Throttled:          {"throttled", "The GPU is slow because of heat or lack of power.", false},
	device.Unmonitored:        {"unmonitored", "The NVIDIA driver does not report errors of the GPU.", false},
	device.MPSUnhealthy:       {"MPS unhealthy", "MPS accepts no new clients.", false},
	device.MPSUnavailable:     {"MPS unavailable", "The MPS supervisor of the node does not answer.", false},
	device.ForeignClaim:       {"claim of another driver", "A claim of another DRA driver with this driver's name may be using it: the value says which.", false},
	device.Withdrawn:          {"withdrawn", "The sharing policy does not offer it any more, and a claim may still have it.", true},
	device.AdminAccess:        {"admin access", "For claims with admin access only.", true},
	device.Cordoned:           {"cordoned", "An administrator keeps new pods away from it.", false},
	device.Gone:               {"partition gone", "Somebody else removed the partition. Delete the pods of the claim.", false},
}

// describe returns what a taint says, and whether the driver has set it because of a fault. An administrator keeps the GPU for somebody, or
// cordons it: it has none.
func describe(key, value, driver string) (c condition, isFault bool) {
	reason, own := strings.CutPrefix(key, driver+"/")
	c, known := conditions[device.Reason(reason)]
	number, notNumber := strconv.ParseUint(value, 10, 64)
	switch {
	case !own || !known:
		c = condition{text: key, title: "A taint of this name keeps claims away that do not tolerate it."}
	case device.Reason(reason) == device.XID && notNumber == nil:
		x := xid.Lookup(number)
		c.title = fmt.Sprintf("The NVIDIA driver has reported this error: %s. %s.", x.Name, x.Advice)
	}
	if value != "" {
		c.text += " " + value
	}
	return c, own && reason != string(device.Cordoned)
}

// refusals are the texts of the taints that keep claims away.
func refusals(taints []resourceapi.DeviceTaint, driver string) []string {
	var texts []string
	for _, t := range taints {
		if t.Effect != resourceapi.DeviceTaintEffectNone {
			c, _ := describe(t.Key, t.Value, driver)
			texts = append(texts, c.text)
		}
	}
	return texts
}

// healthOf returns a badge for each taint of a GPU's devices that is not normal.
func healthOf(g *fleet.GPU, driver string) []Badge {
	var badges []Badge
	for _, t := range g.Taints() {
		meaning, isFault := describe(t.Key, t.Value, driver)
		if meaning.normal {
			continue
		}
		badge := Badge{Text: meaning.text, Bad: t.Effect != string(resourceapi.DeviceTaintEffectNone) && isFault}
		badge.Title = fmt.Sprintf("%s Taint %s, effect %s", meaning.title, t.Key, t.Effect)
		if t.Devices < t.Of {
			badge.Title += fmt.Sprintf(", on %d of %d devices of this GPU", t.Devices, t.Of)
		}
		badge.Title += "."
		badges = append(badges, badge)
	}
	slices.SortFunc(badges, func(a, b Badge) int {
		if a.Bad == b.Bad {
			return cmp.Compare(a.Text, b.Text)
		}
		return map[bool]int{true: -1, false: 1}[a.Bad]
	})
	return badges
}
