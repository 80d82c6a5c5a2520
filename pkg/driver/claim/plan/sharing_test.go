// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/claimtest"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// Equal parts of what is left of 80 GiB and 10 GiB by the driver, the MPS server and four
// contexts.
const (
	quarterOfGPU   = (80<<30 - 1024<<20 - 80<<20 - 4*528<<20) / 4
	quarterOfSlice = (10<<30 - 36<<20 - 80<<20 - 4*384<<20) / 4
)

func TestLimits(t *testing.T) {
	for name, test := range map[string]struct {
		device   string
		capacity map[resourceapi.QualifiedName]string
		want     record.Limits
	}{
		"not said":        {mpsA, nil, record.Limits{Percent: 25, MemoryBytes: quarterOfGPU}},
		"of a partition":  {mpsSliceA0, nil, record.Limits{Percent: 25, MemoryBytes: quarterOfSlice}},
		"counted":         {mpsA, map[resourceapi.QualifiedName]string{"memory": "10Gi", "smPercent": "30", "shares": "2"}, record.Limits{Percent: 30, MemoryBytes: 10 << 30}},
		"with the domain": {mpsA, map[resourceapi.QualifiedName]string{driverName + "/memory": "3Gi", driverName + "/smPercent": "1"}, record.Limits{Percent: 1, MemoryBytes: 3 << 30}},
		"of others":       {mpsA, map[resourceapi.QualifiedName]string{"example.com/memory": "3Gi"}, record.Limits{Percent: 25, MemoryBytes: quarterOfGPU}},
		// What was allocated when more was offered, by an earlier version or policy, stays.
		"more than is offered": {mpsA, map[resourceapi.QualifiedName]string{"memory": "81408Mi", "smPercent": "100"}, record.Limits{Percent: 100, MemoryBytes: 81408 << 20}},
		"turns":                {turnsC, map[resourceapi.QualifiedName]string{"memory": "6Gi", "smPercent": "25"}, record.Limits{Percent: 25, MemoryBytes: 6 << 30}},
	} {
		t.Run(name, func(t *testing.T) {
			plan := must.Get(planFor(t, newShare("u1", test.device, test.capacity)))(t)
			expect.Same(t, plan.Devices[0].Sharing.Limits, test.want, "limits")
		})
	}
}

// TestLimitsThatAreNone: no scheduler accounts these, so that something else wrote them. Below 1 MiB or
// one percent MPS has no limit, and a negative one is none either.
func TestLimitsThatAreNone(t *testing.T) {
	const memory, percent = "capacity memory: Invalid value: ", "capacity smPercent: Invalid value: "
	cases := map[string]struct {
		device, capacity, amount string
		// want is the error after the device, or empty.
		want string
	}{
		"nothing":               {mpsA, "memory", "0", memory + `"0": must be at least 1Mi`},
		"less than nothing":     {mpsA, "memory", "-10Gi", memory + `"-10Gi": must be at least 1Mi`},
		"nearly a mebibyte":     {mpsSliceA0, "memory", "1048575", memory + `"1048575": must be at least 1Mi`},
		"with the domain":       {mpsA, driverName + "/memory", "1Ki", "capacity " + driverName + `/memory: Invalid value: "1Ki": must be at least 1Mi`},
		"more than there is":    {mpsA, "memory", "16Ei", memory + `"9223372036854775807": must be less than 8Ei`},
		"vast":                  {mpsA, "memory", "1e30", memory + `"1e30": must be less than 8Ei`},
		"negative percentage":   {mpsA, "smPercent", "-1", percent + `"-1": must be between 1 and 100`},
		"no percentage":         {mpsA, "smPercent", "0", percent + `"0": must be between 1 and 100`},
		"half a percent":        {mpsSliceA0, "smPercent", "500m", percent + `"500m": must be between 1 and 100`},
		"over 100 percent":      {mpsA, "smPercent", "101", percent + `"101": must be between 1 and 100`},
		"a vast percentage":     {mpsA, "smPercent", "1e30", percent + `"1e30": must be between 1 and 100`},
		"turns, less than none": {turnsC, "memory", "-1", memory + `"-1": must be at least 1Mi`},
		"turns, nearly none":    {turnsC, "memory", "1023Ki", memory + `"1023Ki": must be at least 1Mi`},
		"turns, a negative":     {turnsC, "smPercent", "-1", percent + `"-1": must be between 1 and 100`},
		"turns, uncounted":      {turnsC, "memory", "0", ""},
		"one mebibyte":          {mpsA, "memory", "1Mi", ""},
		"one percent":           {mpsA, "smPercent", "1", ""},
	}
	for name, test := range cases {
		claim := newShare("u1", test.device, map[resourceapi.QualifiedName]string{resourceapi.QualifiedName(test.capacity): test.amount})
		_, err := planFor(t, claim)
		switch {
		case test.want == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), "request r0 was allocated a share of device "+test.device+" with "+test.want)):
			t.Errorf("%s:\ngot  %v\nwant %s", name, err, test.want)
		}
		// An observer has no limits.
		if _, err := planFor(t, admin(claim)); err != nil {
			t.Errorf("%s, observed: %v", name, err)
		}
	}
	expect.Same(t, len(cases), 17, "cases")
}

// TestTurnsWithoutLimits: where nothing limits turns, nothing is counted for a claim without a
// request.
func TestTurnsWithoutLimits(t *testing.T) {
	free := must.Get(device.NewInventory(testNode(), device.Terms{Policy: claimtest.Policy()}))(t)
	for amount, taken := range map[string]bool{"0": true, "-1": false} {
		claim := newShare("u1", turnsC, map[resourceapi.QualifiedName]string{"memory": amount, "smPercent": amount})
		if _, err := New(claim, Node{Driver: driverName, Pool: poolName, BootID: "boot-1", Inventory: free}); (err == nil) != taken {
			t.Errorf("%s: %v", amount, err)
		}
	}
}

// What the journal says of sharing before anything is done.
func TestPlanSharing(t *testing.T) {
	quarter := record.Limits{Percent: 25, MemoryBytes: quarterOfGPU}
	inA := record.SessionDevice{Device: wholeA, PCIAddress: pciA, UUID: "GPU-a", MemoryBytes: 10 << 30}
	two := configure(newClaim("u1", wholeA, wholeC, sliceB0), fromClaim, ownMPS, "r0", "r1")
	for name, test := range map[string]struct {
		claim    *resourceapi.ResourceClaim
		want     []*record.Sharing
		sessions []record.Session
	}{
		"none": {claim: newClaim("u1", wholeA, sliceB0), want: []*record.Sharing{nil, nil}},
		"MPS share": {
			claim: newShare("u1", mpsA, nil),
			want:  []*record.Sharing{{UUID: "GPU-a", Session: wholeA, Limits: quarter}},
			sessions: []record.Session{{
				ID: wholeA, Shared: true, MultiUser: true, Devices: []record.SessionDevice{{Device: mpsA, PCIAddress: pciA, UUID: "GPU-a"}},
			}},
		},
		"two of one GPU": {
			claim: newClaim("u1", mpsA, mpsA),
			want:  []*record.Sharing{{UUID: "GPU-a", Session: wholeA, Limits: quarter}, {UUID: "GPU-a", Session: wholeA, Limits: quarter}},
			sessions: []record.Session{{
				ID: wholeA, Shared: true, MultiUser: true, Devices: []record.SessionDevice{{Device: mpsA, PCIAddress: pciA, UUID: "GPU-a"}},
			}},
		},
		"share of a partition": {
			claim: newShare("u1", mpsSliceA0, nil),
			want:  []*record.Sharing{{UUID: "GPU-a", Session: sliceA0, Limits: record.Limits{Percent: 25, MemoryBytes: quarterOfSlice}}},
			sessions: []record.Session{{
				ID: sliceA0, Shared: true, MultiUser: true, Devices: []record.SessionDevice{{Device: mpsSliceA0, PCIAddress: pciA}},
			}},
		},
		"observed": {claim: admin(newClaim("u1", mpsA, turnsC)), want: []*record.Sharing{nil, nil}},
		"GPUs of its own": {
			claim: two,
			want:  []*record.Sharing{{UUID: "GPU-a", Session: wholeA}, nil, {UUID: "GPU-c", Session: wholeA}},
			sessions: []record.Session{{
				ID: wholeA, Percent: 50, Devices: []record.SessionDevice{inA, {Device: wholeC, PCIAddress: pciC, UUID: "GPU-c", MemoryBytes: 5 << 30}},
			}},
		},
		"partitions of its own": {
			claim: configure(newClaim("u1", sliceA0, sliceA4), fromClass, migMPS),
			want:  []*record.Sharing{{UUID: "GPU-a", Session: sliceA0}, {UUID: "GPU-a", Session: sliceA4}},
			sessions: []record.Session{
				{ID: sliceA0, MultiUser: true, Devices: []record.SessionDevice{{Device: sliceA0, PCIAddress: pciA, MemoryBytes: 4 << 30}}},
				{ID: sliceA4, MultiUser: true, Devices: []record.SessionDevice{{Device: sliceA4, PCIAddress: pciA, MemoryBytes: 4 << 30}}},
			},
		},
		"interval": {
			claim: configure(newClaim("u1", wholeA, sliceB0), fromClaim, gpuLong),
			want:  []*record.Sharing{{UUID: "GPU-a", Interval: "Long"}, nil},
		},
		"default interval": {claim: configure(newClaim("u1", wholeA), fromClaim, gpuSlicing), want: []*record.Sharing{nil}},
		"turns": {
			claim: newShare("u1", turnsC, map[resourceapi.QualifiedName]string{"memory": "6Gi", "smPercent": "25"}),
			want:  []*record.Sharing{{UUID: "GPU-c", Limits: record.Limits{Percent: 25, MemoryBytes: 6 << 30}, Interval: "Short", Limited: true}},
		},
		"turns of which nothing was counted": {
			claim: newShare("u1", turnsC, map[resourceapi.QualifiedName]string{"memory": "0", "smPercent": "0"}),
			want:  []*record.Sharing{{UUID: "GPU-c", Interval: "Short"}},
		},
		"turns of which memory was counted": {
			claim: newShare("u1", turnsC, map[resourceapi.QualifiedName]string{"memory": "6Gi", "smPercent": "0"}),
			want:  []*record.Sharing{{UUID: "GPU-c", Limits: record.Limits{MemoryBytes: 6 << 30}, Interval: "Short", Limited: true}},
		},
		"turns on a partition": {
			claim: newShare("u1", turnSliceA0, map[resourceapi.QualifiedName]string{"memory": "1Gi", "smPercent": "25"}),
			want:  []*record.Sharing{{UUID: "GPU-a", Limits: record.Limits{Percent: 25, MemoryBytes: 1 << 30}, Limited: true}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			plan := must.Get(planFor(t, test.claim))(t)
			r := plan
			var got []*record.Sharing
			for i := range r.Devices {
				got = append(got, r.Devices[i].Sharing)
			}
			expect.Same(t, got, test.want, "devices")
			expect.Same(t, r.Sessions, test.sessions, "sessions")
		})
	}
}

// Where the driver limits memory, a share of a GPU has its part for certain, as far as the policy does not overcommit it. A claim
// that was allocated before has none, and a share of a partition neither.
func TestPlanHeld(t *testing.T) {
	node := testNode()
	for i := range node.GPUs {
		node.GPUs[i].MemoryLimits = true
	}
	twice := policy.Builtin()
	twice.Default.TimeSlice.MemoryOvercommit = 2
	amount := func(memory string) map[resourceapi.QualifiedName]string {
		return map[resourceapi.QualifiedName]string{"memory": memory, "smPercent": "0"}
	}
	for name, test := range map[string]struct {
		claim  *resourceapi.ResourceClaim
		policy *policy.Policy
		want   int64
	}{
		"turns":                              {newShare("u1", turnsC, amount("6Gi")), policy.Builtin(), 6 << 30},
		"turns, overcommitted":               {newShare("u1", turnsC, amount("6Gi")), twice, 3 << 30},
		"turns of which nothing was counted": {newShare("u1", turnsC, amount("0")), policy.Builtin(), 0},
		"turns on a partition":               {newShare("u1", turnSliceA0, amount("1Gi")), claimtest.Policy(), 0},
		"MPS share":                          {newShare("u1", mpsA, map[resourceapi.QualifiedName]string{"memory": "2Gi", "smPercent": "25"}), policy.Builtin(), 2 << 30},
		"whole":                              {newClaim("u1", wholeA), policy.Builtin(), 0},
		"observed":                           {admin(newClaim("u1", turnsC)), policy.Builtin(), 0},
	} {
		t.Run(name, func(t *testing.T) {
			inventory := must.Get(device.NewInventory(node, device.Terms{Policy: test.policy}))(t)
			r := must.Get(New(test.claim, Node{Driver: driverName, Pool: poolName, Inventory: inventory}))(t)
			expect.Same(t, r.Devices[0].Shared().GuaranteedBytes, test.want, "guaranteed bytes")
		})
	}
}

// gpuPriority is a configuration with nothing else.
func gpuPriority(priority string) string {
	return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultClientPriority":"` + priority + `"}}}`
}

// The priority of a share is what the claim's configuration, its class's or the policy says,
// in this order. Normal is not written down: it needs nothing.
func TestPlanPriority(t *testing.T) {
	low := policy.Builtin()
	low.Default.MPS.ClientPriority = policy.PriorityBelowNormal
	lowInventory := must.Get(device.NewInventory(testNode(), device.Terms{Policy: low}))(t)
	const below = policy.PriorityBelowNormal
	for name, test := range map[string]struct {
		claim     *resourceapi.ResourceClaim
		inventory *device.Inventory
		share     policy.ClientPriority
		session   policy.ClientPriority // the claim's own
	}{
		"nothing":                  {newClaim("u1", mpsA), nil, "", ""},
		"policy":                   {newClaim("u1", mpsA), lowInventory, below, ""},
		"claim":                    {configure(newClaim("u1", mpsA), fromClaim, gpuPriority("BelowNormal")), nil, below, ""},
		"claim above policy":       {configure(newClaim("u1", mpsA), fromClaim, gpuPriority("Normal")), lowInventory, "", ""},
		"class":                    {configure(newClaim("u1", mpsA), fromClass, gpuPriority("BelowNormal")), nil, below, ""},
		"claim above class":        {configure(configure(newClaim("u1", mpsA), fromClass, gpuPriority("BelowNormal")), fromClaim, gpuPriority("Normal")), nil, "", ""},
		"partition":                {configure(newClaim("u1", mpsSliceA0), fromClaim, strings.ReplaceAll(gpuPriority("BelowNormal"), "GpuConfig", "MigDeviceConfig")), nil, below, ""},
		"another kind, of a class": {configure(newClaim("u1", mpsSliceA0), fromClass, gpuPriority("BelowNormal")), nil, "", ""},
		"limits, of a class":       {configure(newClaim("u1", mpsA), fromClass, ownMPS), nil, "", ""},
		"own":                      {configure(newClaim("u1", wholeA), fromClaim, gpuPriority("BelowNormal")), nil, "", below},
		"own, normal":              {configure(newClaim("u1", wholeA), fromClaim, gpuPriority("Normal")), lowInventory, "", ""},
		"own, of the policy":       {configure(newClaim("u1", wholeA), fromClaim, gpuMPS), lowInventory, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			inventory := test.inventory
			if inventory == nil {
				inventory = testInventory(t)
			}
			plan := must.Get(New(test.claim, Node{Driver: driverName, Pool: poolName, Inventory: inventory}))(t)
			expect.Same(t, plan.Devices[0].Sharing.ClientPriority, test.share, "priority of the share")
			expect.Same(t, plan.Sessions[0].ClientPriority, test.session, "priority of the session")
		})
	}
}

func TestPlanSharingRefuses(t *testing.T) {
	old := testNode()
	old.GPUs[2].ComputeCapability, old.GPUs[2].ProductName = gpu.Version{Major: 6, Minor: 1}, "Tesla P4"
	pascal := must.Get(device.NewInventory(old, device.Terms{}))(t)
	foreign := testInventory(t).With(device.Status{Static: []device.Static{{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}, UUID: "MIG-x"}}})
	anonymous := newClaim("u1", mpsA)
	anonymous.Status.Allocation.Devices.Results[0].ShareID = nil
	limit := func(kind, key string) string {
		return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + kind + `","sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"` + key + `":"4Gi"}}}}`
	}
	for name, test := range map[string]struct {
		claim     *resourceapi.ResourceClaim
		inventory *device.Inventory
		want      []string
	}{
		"no share ID":       {anonymous, nil, []string{"device " + mpsA, "has no ID", "DRAConsumableCapacity"}},
		"Pascal":            {configure(newClaim("u1", wholeC), fromClaim, gpuMPS), pascal, []string{"device " + wholeC, pciC, "Tesla P4", "6.1", "compute capability 7.0"}},
		"somebody else's":   {configure(newClaim("u1", staticA0), fromClaim, migMPS), foreign, []string{"device " + staticA0, "somebody else made"}},
		"index too high":    {configure(newClaim("u1", wholeA, wholeB), fromClaim, limit("GpuConfig", "2")), nil, []string{"device " + wholeA, `"2"`, "0: GPU-a, 1: GPU-b"}},
		"UUID of another":   {configure(newClaim("u1", wholeA), fromClaim, limit("GpuConfig", "GPU-b")), nil, []string{"device " + wholeA, "GPU-b"}},
		"partition by UUID": {configure(newClaim("u1", sliceA0), fromClaim, limit("MigDeviceConfig", "MIG-x")), nil, []string{"device " + sliceA0, "MIG-x"}},
	} {
		t.Run(name, func(t *testing.T) {
			inventory := test.inventory
			if inventory == nil {
				inventory = testInventory(t)
			}
			_, err := New(test.claim, Node{Driver: driverName, Pool: poolName, Inventory: inventory})
			claimtest.WantError(t, err, test.want...)
		})
	}
}
