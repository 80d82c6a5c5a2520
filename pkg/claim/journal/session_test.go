// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/sharing"
)

// holder returns a claim with a share of the session "m".
func holder(uid types.UID, percent int, memory int64) *Record {
	return record(uid, share("m", claimtest.PCIA, string(uid), device.MPS, &Sharing{Session: "m", Limits: Limits{Percent: percent, MemoryBytes: memory}}))
}

func TestLargestLimits(t *testing.T) {
	other := record("u9", share("n", claimtest.PCIB, "s", device.MPS, &Sharing{Session: "n"}))
	for name, test := range map[string]struct {
		holders []*Record
		want    Limits
	}{
		"none":                    {nil, Limits{}},
		"another session":         {[]*Record{other}, Limits{}},
		"one":                     {[]*Record{other, holder("u1", 25, 4)}, Limits{25, 4}},
		"of two each the largest": {[]*Record{holder("u1", 25, 8), holder("u2", 50, 4)}, Limits{50, 8}},
		"no limit is the largest": {[]*Record{holder("u1", 0, 8), holder("u2", 50, 0)}, Limits{0, 0}},
		"no limit, then a limit":  {[]*Record{holder("u1", 0, 0), holder("u2", 50, 4), holder("u3", 60, 5)}, Limits{0, 0}},
	} {
		if got := LargestLimits(test.holders, "m"); got != test.want {
			t.Errorf("%s: got %+v, want %+v", name, got, test.want)
		}
	}
}

func TestHighestPriority(t *testing.T) {
	with := func(uid types.UID, p policy.ClientPriority) *Record {
		r := holder(uid, 25, 4)
		r.Devices[0].Sharing.ClientPriority = p
		return r
	}
	const below = policy.PriorityBelowNormal
	elsewhere := record("u9", share("n", claimtest.PCIB, "s", device.MPS, &Sharing{Session: "n", ClientPriority: below}))
	for name, test := range map[string]struct {
		holders []*Record
		want    policy.ClientPriority
	}{
		"none":            {nil, ""},
		"another session": {[]*Record{elsewhere, with("u1", "")}, ""},
		"one":             {[]*Record{with("u1", below)}, below},
		"all":             {[]*Record{elsewhere, with("u1", below), with("u2", below)}, below},
		// MPS must have priorities all the same.
		"different": {[]*Record{with("u1", below), with("u2", "")}, policy.PriorityNormal},
	} {
		desired := (&Session{ID: "m", Shared: true, ClientPriority: "of no account"}).Desired(test.holders)
		if desired.ClientPriority != test.want {
			t.Errorf("%s: got %q, want %q", name, desired.ClientPriority, test.want)
		}
	}
}

func TestDesired(t *testing.T) {
	two := []SessionDevice{{Device: "a", PCIAddress: claimtest.PCIA, UUID: "GPU-a"}, {Device: "b", PCIAddress: claimtest.PCIB, UUID: "GPU-b"}}
	devices := []sharing.Device{{PCIAddress: claimtest.PCIA, UUID: "GPU-a"}, {PCIAddress: claimtest.PCIB, UUID: "GPU-b"}}
	for name, test := range map[string]struct {
		session Session
		holders []*Record
		want    sharing.Session
	}{
		"own": {
			Session{ID: "m", Devices: two, MultiUser: true, Percent: 40, MemoryBytes: map[string]int64{"GPU-a": 3}, ClientPriority: policy.PriorityBelowNormal}, []*Record{holder("u1", 90, 90)},
			sharing.Session{ID: "m", Devices: devices, MultiUser: true, Limits: sharing.Limits{ThreadPercentage: 40, MemoryBytes: map[string]int64{"GPU-a": 3}}, ClientPriority: policy.PriorityBelowNormal},
		},
		"shared": {
			Session{ID: "m", Shared: true, Devices: two, Percent: 1}, []*Record{holder("u1", 25, 4), holder("u2", 50, 3)},
			sharing.Session{ID: "m", Devices: devices, Limits: sharing.Limits{ThreadPercentage: 50, MemoryBytes: map[string]int64{"GPU-a": 4, "GPU-b": 4}}},
		},
		"shared, one without limits": {
			Session{ID: "m", Shared: true, Devices: two}, []*Record{holder("u1", 25, 4), holder("u2", 0, 0)},
			sharing.Session{ID: "m", Devices: devices},
		},
		"of nobody any more": {
			Session{ID: "m", Shared: true, Devices: two}, nil, sharing.Session{ID: "m", Devices: devices},
		},
		"a partition that is not live": {
			Session{ID: "m", Shared: true, Devices: []SessionDevice{{Device: "a0", PCIAddress: claimtest.PCIA}}}, []*Record{holder("u1", 25, 4)},
			sharing.Session{ID: "m", Limits: sharing.Limits{ThreadPercentage: 25, MemoryBytes: map[string]int64{}}},
		},
	} {
		if diff := cmp.Diff(test.want, test.session.Desired(test.holders)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
}

// TestResolve follows the partitions of a session.
func TestResolve(t *testing.T) {
	r := record("u1", slice("a0", claimtest.PCIA, 0), whole("b", claimtest.PCIB))
	s := Session{ID: "m", Devices: []SessionDevice{
		{Device: "a0", PCIAddress: claimtest.PCIA, UUID: "MIG-old", MemoryBytes: 5},
		{Device: "b", PCIAddress: claimtest.PCIB, UUID: "GPU-b", MemoryBytes: 6},
		{Device: "elsewhere", PCIAddress: claimtest.PCIC, UUID: "GPU-c"},
	}}
	s.Resolve(r)
	if s.Devices[0].UUID != "" || s.Devices[1].UUID != "GPU-b" || !cmp.Equal(s.MemoryBytes, map[string]int64{"GPU-b": 6}) {
		t.Errorf("not live: %+v", s)
	}
	r.Devices[0].Partition.Live = &partition.Live{UUID: "MIG-new"}
	s.Resolve(r)
	if s.Devices[0].UUID != "MIG-new" || !cmp.Equal(s.MemoryBytes, map[string]int64{"MIG-new": 5, "GPU-b": 6}) {
		t.Errorf("live: %+v", s)
	}
	if s.Devices[2].UUID != "GPU-c" {
		t.Errorf("a device of another group: %+v", s.Devices[2])
	}
	// What an older version has written of limits stays.
	old := Session{ID: "m", Devices: []SessionDevice{{Device: "b", UUID: "GPU-b"}}, MemoryBytes: map[string]int64{"GPU-b": 7}}
	if old.Resolve(r); !cmp.Equal(old.MemoryBytes, map[string]int64{"GPU-b": 7}) {
		t.Errorf("limits of an older version: %+v", old)
	}
}

func TestHoldSession(t *testing.T) {
	records := []*Record{holder("u1", 1, 1)}
	if !HoldSession(records, "m") || HoldSession(records, "n") || HoldSession(records, "") || HoldSession(nil, "m") {
		t.Error("only the session m is held")
	}
	whole := record("u2", whole("m", claimtest.PCIA))
	if HoldSession([]*Record{whole}, "") {
		t.Error("a device without session is in the one without name")
	}
}
