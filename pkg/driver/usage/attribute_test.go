// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
)

// process is one of the pod whose UID is its PID divided by ten.
func process(pid, instance int, memory uint64) gpu.ProcessUsage {
	return gpu.ProcessUsage{Process: gpu.Process{PID: pid, InstanceID: instance}, MemoryBytes: &memory, Utilization: new(0.1)}
}

var somePods = pods{
	of: func(pid int) string { return map[int]string{1: "a", 2: "b", 3: "c"}[pid/10] },
	// The claim is named after the pods that may use it.
	may: func(h *Holding, uid string) bool {
		return slices.Contains([]string{h.Claim.Name, h.Claim.Namespace}, uid)
	},
}

func holding(kind device.Kind, name string, partition *claim.LivePartition) Holding {
	return Holding{Claim: claim.Ref{Name: name}, Kind: kind, Partition: partition}
}

// TestAttribute: everything that is used is counted for one claim or for none, never twice.
func TestAttribute(t *testing.T) {
	t.Parallel()
	partition := &claim.LivePartition{PartitionID: gpu.PartitionID{InstanceID: 7, UUID: "MIG-7"}}
	gone := &claim.LivePartition{PartitionID: gpu.PartitionID{InstanceID: 7, UUID: "MIG-6"}}
	on7 := []gpu.PartitionUsage{{PartitionID: partition.PartitionID, UsedBytes: 40, Utilization: new(0.7)}}
	measured := func(memory uint64, processes int, utilization *float64) Measured {
		return Measured{MemoryBytes: &memory, Processes: &processes, Utilization: utilization}
	}
	for name, test := range map[string]struct {
		usage        gpu.Usage
		held         []Holding
		want         []Measured
		unattributed uint64
		strangers    []string
	}{
		"nobody": {usage: gpu.Usage{UsedBytes: 9}, want: []Measured{}, unattributed: 9},
		"whole, used by whomever": {
			usage: gpu.Usage{UsedBytes: 100, Utilization: new(0.5), Processes: []gpu.ProcessUsage{process(10, -1, 60), process(99, -1, 30)}},
			held:  []Holding{holding(device.Whole, "a", nil)},
			want:  []Measured{measured(100, 2, new(0.5))},
		},
		"whole, where processes are not told": {
			usage: gpu.Usage{UsedBytes: 100},
			held:  []Holding{holding(device.Whole, "a", nil)},
			want:  []Measured{{MemoryBytes: new(uint64(100))}},
		},
		"partition beside memory of the GPU's own": {
			usage:        gpu.Usage{UsedBytes: 50, Partitions: on7, Processes: []gpu.ProcessUsage{process(10, 7, 30), process(20, 8, 5)}},
			held:         []Holding{holding(device.Partition, "a", partition)},
			want:         []Measured{measured(40, 1, new(0.7))},
			unattributed: 10,
		},
		"partition whose ids another one has": {
			usage:        gpu.Usage{UsedBytes: 50, Partitions: on7, Processes: []gpu.ProcessUsage{process(10, 7, 30)}},
			held:         []Holding{holding(device.Partition, "a", gone)},
			want:         []Measured{{}},
			unattributed: 50,
		},
		"shares with an MPS server and a stranger": {
			usage: gpu.Usage{
				UsedBytes: 100, ProcessUtilization: true,
				Processes: []gpu.ProcessUsage{process(10, -1, 20), process(11, -1, 5), process(20, -1, 30), process(30, -1, 8), process(99, -1, 2)},
			},
			held:         []Holding{holding(device.MPS, "a", nil), holding(device.MPS, "b", nil), holding(device.MPS, "idle", nil)},
			want:         []Measured{measured(25, 2, new(0.2)), measured(30, 1, new(0.1)), measured(0, 0, new(0.0))},
			unattributed: 45,
			strangers:    []string{"c"},
		},
		"a pod with two claims to one device": {
			usage:        gpu.Usage{UsedBytes: 20, Processes: []gpu.ProcessUsage{process(10, -1, 20)}},
			held:         []Holding{holding(device.TimeSlice, "a", nil), {Claim: claim.Ref{Name: "x", Namespace: "a"}, Kind: device.TimeSlice}},
			want:         []Measured{measured(0, 0, nil), measured(0, 0, nil)},
			unattributed: 20,
		},
		"shares of a partition": {
			usage:        gpu.Usage{UsedBytes: 40, ProcessUtilization: true, Partitions: on7, Processes: []gpu.ProcessUsage{process(10, 7, 15), process(20, -1, 5)}},
			held:         []Holding{holding(device.MPS, "a", partition), holding(device.MPS, "b", partition)},
			want:         []Measured{measured(15, 1, nil), measured(0, 0, nil)},
			unattributed: 25,
		},
		"a process whose memory is not told": {
			usage: gpu.Usage{
				UsedBytes: 40,
				Processes: []gpu.ProcessUsage{process(10, -1, 15), {Process: gpu.Process{PID: 11, InstanceID: -1}}, process(12, -1, 1)},
			},
			held:         []Holding{holding(device.TimeSlice, "a", nil)},
			want:         []Measured{{Processes: new(3)}},
			unattributed: 40,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			by, unattributed, strangers := attribute(&test.usage, test.held, somePods)
			expect.Same(t, by, test.want)
			if unattributed != test.unattributed || !slices.Equal(strangers, test.strangers) {
				t.Errorf("nobody's: %d, want %d; strangers %v, want %v", unattributed, test.unattributed, strangers, test.strangers)
			}
		})
	}
}

// TestHoldings: what is an observer's is nobody's, two shares of a device that a claim has are
// one, so that no metric is there twice, and without a limit of one of them there is none.
func TestHoldings(t *testing.T) {
	t.Parallel()
	share := func(name string, limit int64) claim.LiveDevice {
		d := claim.LiveDevice{Device: name, PCIAddress: "A", Kind: device.MPS, GPU: "GPU-1", Resources: gpu.Resources{MemoryBytes: 100}}
		if limit > 0 {
			d.Limits = &claim.LiveLimits{MemoryBytes: limit}
		}
		return d
	}
	held := func(uid types.UID, name string, kind device.Kind, uuid string, limit int64) Holding {
		return Holding{Claim: claim.Ref{UID: uid}, Device: name, PCIAddress: "A", Kind: kind, UUID: uuid, MemoryLimitBytes: limit}
	}
	whole := share("w", 0)
	whole.Kind = device.Whole
	own := whole
	own.Limits = &claim.LiveLimits{MemoryBytes: 40}
	observer := whole
	observer.Kind, observer.Admin = device.Observer, true
	slice := whole
	slice.Kind, slice.Resources.MemoryBytes = device.Partition, 10
	slice.Partition = &claim.LivePartition{PartitionID: gpu.PartitionID{UUID: "MIG-1", InstanceID: 7}, Profile: "1g", Gone: true}
	got := holdingsOf([]claim.LiveClaim{
		{Claim: claim.Ref{UID: "u1"}, Devices: []claim.LiveDevice{share("a", 5), share("b", 7), share("a", 6), share("b", 0), observer}},
		{Claim: claim.Ref{UID: "u2"}, Devices: []claim.LiveDevice{share("a", 1)}},
		{Claim: claim.Ref{UID: "u3"}, Devices: []claim.LiveDevice{whole}},
		{Claim: claim.Ref{UID: "u4"}, Devices: []claim.LiveDevice{own}},
		{Claim: claim.Ref{UID: "u5"}, Devices: []claim.LiveDevice{slice}},
	})
	partition := held("u5", "w", device.Partition, "MIG-1", 10)
	partition.Partition = slice.Partition
	want := []Holding{
		held("u1", "a", device.MPS, "GPU-1", 11), held("u1", "b", device.MPS, "GPU-1", 0), held("u2", "a", device.MPS, "GPU-1", 1),
		held("u3", "w", device.Whole, "GPU-1", 100), held("u4", "w", device.Whole, "GPU-1", 100), partition,
	}
	expect.Same(t, got, want)
}
