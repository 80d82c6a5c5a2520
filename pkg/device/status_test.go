// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
)

// ordersAlike tells whether the order of statuses sees no difference between two.
func ordersAlike(a, b Status) bool {
	a, b = a.Sorted(), b.Sorted()
	return slices.EqualFunc(a.Static, b.Static, func(x, y Static) bool { return compareStatic(x, y) == 0 }) &&
		slices.EqualFunc(a.Conditions, b.Conditions, func(x, y Condition) bool { return compareConditions(x, y) == 0 })
}

// What is published does not depend on the order in which things were found.
func TestStatusOrder(t *testing.T) {
	static := Static{PCIAddress: "0000:1b:00.0", ProfileID: 19, Placement: gpu.Placement{Start: 1, Size: 1}, UUID: "MIG-1"}
	condition := func() Condition {
		return Condition{
			PCIAddress: "0000:1b:00.0", Where: &gpu.Placement{Start: 4, Size: 4}, ProfileID: new(uint32(9)),
			Reason: ReleasePending, Message: "in use",
		}
	}
	status := func(change func(s *Static, c *Condition)) Status {
		s, c := static, condition()
		change(&s, &c)
		return Status{Static: []Static{s}, Conditions: []Condition{c}}
	}
	same := status(func(*Static, *Condition) {})
	if !ordersAlike(same, status(func(*Static, *Condition) {})) || !ordersAlike(Status{}, Status{Static: []Static{}, Conditions: []Condition{}}) {
		t.Error("two that say the same differ")
	}
	if ordersAlike(same, Status{}) || ordersAlike(Status{}, same) {
		t.Error("something equals nothing")
	}
	for name, change := range map[string]func(s *Static, c *Condition){
		"GPU of the partition":   func(s *Static, _ *Condition) { s.PCIAddress = "0000:28:00.0" },
		"profile":                func(s *Static, _ *Condition) { s.ProfileID = 20 },
		"start":                  func(s *Static, _ *Condition) { s.Placement.Start = 2 },
		"size":                   func(s *Static, _ *Condition) { s.Placement.Size = 2 },
		"UUID":                   func(s *Static, _ *Condition) { s.UUID = "MIG-2" },
		"gone":                   func(s *Static, _ *Condition) { s.Gone = true },
		"GPU of the condition":   func(_ *Static, c *Condition) { c.PCIAddress = "0000:28:00.0" },
		"nowhere in particular":  func(_ *Static, c *Condition) { c.Where = nil },
		"where":                  func(_ *Static, c *Condition) { c.Where.Size = 2 },
		"instance not known":     func(_ *Static, c *Condition) { c.ProfileID = nil },
		"profile of an instance": func(_ *Static, c *Condition) { *c.ProfileID = 5 },
		"kind":                   func(_ *Static, c *Condition) { c.Kind = MPS },
		"reason":                 func(_ *Static, c *Condition) { c.Reason = Occupied },
		"message":                func(_ *Static, c *Condition) { c.Message = "" },
	} {
		if other := status(change); ordersAlike(same, other) || ordersAlike(other, same) {
			t.Errorf("a change of %s makes no difference", name)
		}
	}
}
