// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation_test

import (
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestMemoryRequest: capacity.requests asks for "at least" of every class, as the documentation
// shows first: of whole GPUs and partitions it is a filter, of shares an amount as well.
func TestMemoryRequest(t *testing.T) {
	const timeslice = "timeslice.partage.dev"
	tests := []struct {
		class, memory string
		want          string // a part of the device's name; "" where nothing fits
		consumed      string
	}{
		{mig, "9Gi", "-mig-1g10gb-", ""},
		{mig, "10Gi", "-mig-1g20gb-", ""}, // a 1g.10gb has 9.75 GiB
		{mig, "18Gi", "-mig-1g20gb-", ""},
		{mig, "30Gi", "-mig-3g40gb-", ""},
		{mig, "60Gi", "-mig-7g80gb-", ""},
		{mig, "100Gi", "", ""},
		{whole, "12Gi", "small/gpu-", ""},
		{whole, "18Gi", "big/gpu-", ""},
		{whole, "100Gi", "", ""},
		{mps, "18Gi", "big/gpu-0000-1b-00-0-mps", "18Gi"},
		{mps, "100Gi", "", ""},
		{timeslice, "18Gi", "big/gpu-0000-1b-00-0-timeslice", "18Gi"},
		{timeslice, "100Gi", "", ""},
	}
	for _, test := range tests {
		t.Run(test.class+" "+test.memory, func(t *testing.T) {
			f := fleettest.New(t)
			f.AddNode("small", "t4", 1)
			f.AddNode("big", "h100-80-sxm", 1)
			claim := one(f.Claim("a", "c", fleettest.Share(test.class, test.memory, "")))
			planner := allocation.New(f.Snapshot).Within(patient)
			var got, consumed string
			for _, n := range planner.Cluster.Nodes {
				answer := planner.OnNode(t.Context(), n, claim)
				if answer.Verdict != allocation.Fits {
					continue
				}
				d := answer.Results[0].Devices.Results[0]
				got += n.Name + "/" + d.Device + " "
				if amount, has := d.ConsumedCapacity["memory"]; has {
					consumed = amount.String()
				}
			}
			if test.want == "" && got != "" || !strings.Contains(got, test.want) || consumed != test.consumed {
				t.Errorf("%q, consumes %q of memory; want %q, %q", got, consumed, test.want, test.consumed)
			}
			if test.memory == "18Gi" && strings.Contains(got, "small/") {
				t.Errorf("%s: a T4 does not have that much", got)
			}
		})
	}
}
