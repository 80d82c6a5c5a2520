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
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/doctor"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/policy/xid"
)

// normal are the driver's reasons for taints that are no fault of a GPU.
var normal = sets.New(device.Occupied, device.Opened, device.Withdrawn, device.AdminAccess)

// words makes some of the name of a taint.
var words = strings.NewReplacer("-", " ", "gpu", "GPU", "xid", "XID", "mps", "MPS", "ecc", "ECC")

// describe returns what a taint says to people, in a word or two and in the sentences of doctor, and whether the driver has set it because of
// a fault.
func describe(key, value, driver string) (text, title string, isFault bool) {
	name, own := strings.CutPrefix(key, driver+"/")
	if text = key; own {
		text = words.Replace(name)
	}
	what, remedy, known := doctor.Meaning(name, value)
	number, err := strconv.ParseUint(value, 10, 64)
	switch {
	case !own || !known:
		title = "A taint of this name keeps claims away that do not tolerate it."
	case device.Reason(name) == device.XID && err == nil:
		x := xid.Lookup(number)
		title = fmt.Sprintf("The NVIDIA driver has reported this error: %s. %s.", x.Name, x.Advice)
	default:
		title = fmt.Sprintf("%s%s. %s.", strings.ToUpper(what[:1]), what[1:], remedy)
	}
	return strings.TrimSpace(text + " " + value), title, own && device.Reason(name).IsFault()
}

// refusals are the texts of the taints that keep claims away.
func refusals(taints []resourceapi.DeviceTaint, driver string) []string {
	var texts []string
	for _, t := range taints {
		if t.Effect != resourceapi.DeviceTaintEffectNone {
			text, _, _ := describe(t.Key, t.Value, driver)
			texts = append(texts, text)
		}
	}
	return texts
}

// notesOf returns a badge for each taint of a GPU's devices that is not normal, the bad ones first.
func notesOf(g *fleet.GPU, driver string) []Badge {
	var notes []Badge
	for _, t := range g.Taints() {
		if name, own := strings.CutPrefix(t.Key, driver+"/"); own && normal.Has(device.Reason(name)) {
			continue
		}
		text, title, isFault := describe(t.Key, t.Value, driver)
		title += fmt.Sprintf(" Taint %s, effect %s", t.Key, t.Effect)
		if t.Devices < t.Of {
			title += fmt.Sprintf(", on %d of %d devices of this GPU", t.Devices, t.Of)
		}
		notes = append(notes, Badge{Text: text, Title: title + ".", Bad: isFault && t.Effect != string(resourceapi.DeviceTaintEffectNone)})
	}
	place := map[bool]int{true: 0, false: 1}
	slices.SortFunc(notes, func(a, b Badge) int { return cmp.Or(place[a.Bad]-place[b.Bad], cmp.Compare(a.Text, b.Text)) })
	return notes
}
