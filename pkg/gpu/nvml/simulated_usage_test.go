// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	fatal "github.com/partage-dev/partage/test/must"
)

func setProcesses(t *testing.T, file *state.File, processes ...machine.Process) {
	t.Helper()
	update(t, file, func(m *machine.Machine) {
		m.Processes = processes
	})
}

// TestSimulatedUsage: memory and work of the undivided GPU, by process.
func TestSimulatedUsage(t *testing.T) {
	c, file := simulate(t, newMachine(t, "h100x1"))
	g := snapshot(t, file).GPUs[0]
	read := func() gpu.Usage {
		t.Helper()
		return fatal.Get(c.Usage(t.Context(), g.PCIAddress, nil, time.Time{}))(t)
	}
	idle := read()
	if idle.UsedBytes != 0 ||
		idle.Processes == nil || len(idle.Processes) > 0 || idle.Utilization == nil || *idle.Utilization != 0 || !idle.ProcessUtilization {
		t.Errorf("an idle GPU: %+v", idle)
	}
	setProcesses(t, file,
		machine.Process{PID: 11, GPU: 0, InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30, SM: 40, Kind: machine.Compute},
		machine.Process{PID: 12, GPU: 0, InstanceID: -1, ComputeID: -1, MemoryBytes: 2 << 30, SM: 0, Kind: machine.MPSClient},
	)
	busy := read()
	if busy.UsedBytes != 3<<30 || *busy.Utilization != 0.4 || len(busy.Processes) != 2 {
		t.Fatalf("a busy GPU: %+v", busy)
	}
	for i, want := range []struct {
		pid    int
		memory uint64
		sm     float64
	}{{11, 1 << 30, 0.4}, {12, 2 << 30, 0}} {
		p := busy.Processes[i]
		if p.PID != want.pid || p.MemoryBytes == nil || *p.MemoryBytes != want.memory || p.Utilization == nil || *p.Utilization != want.sm {
			t.Errorf("process %+v, want %+v", p, want)
		}
	}
}

// TestSimulatedMeters: what the board draws and moves, and nothing where it does not say.
func TestSimulatedMeters(t *testing.T) {
	m := newMachine(t, "dgx-h100")
	m.GPUs = m.GPUs[:4]
	m.GPUs[0].Meters = machine.Meters{PowerMilliwatts: 412_500, NVLinkTx: 1 << 32, NVLinkRx: 3, PCIeTx: 7}
	m.GPUs[1].Meters = machine.Meters{PCIeTx: -1, PCIeRx: -1}
	m.GPUs[1].NVLinks = nil
	m.GPUs[2].MIG.Current, m.GPUs[2].MIG.Pending = true, true
	m.GPUs[2].Meters = machine.Meters{PowerMilliwatts: 1}
	c, file := simulate(t, m)
	update(t, file, func(m *machine.Machine) {
		for _, f := range []string{"nvmlDeviceGetPowerUsage", "nvmlDeviceGetFieldValues", "nvmlDeviceGetPcieThroughput"} {
			state.AddFault(m, machine.Fault{Function: f, GPU: 3, Code: 999})
		}
	})
	for i, want := range []gpu.Usage{
		{PowerWatts: new(412.5), NVLink: &gpu.Traffic{Sent: 1 << 42, Received: 3 << 10}, PCIe: &gpu.Traffic{Sent: 7000}},
		{},
		{PowerWatts: new(.001), PCIe: &gpu.Traffic{}},
		{},
	} {
		got, err := c.Usage(t.Context(), m.GPUs[i].PCIAddress, nil, time.Time{})
		if err != nil || got.Processes == nil {
			t.Errorf("GPU %d: %+v, %v", i, got, err)
		}
		got = gpu.Usage{PowerWatts: got.PowerWatts, NVLink: got.NVLink, PCIe: got.PCIe}
		expect.Same(t, got, want, "GPU", i)
	}
}

// gpmInterval is the time that the library wants between two samples.
const gpmInterval = 100 * time.Millisecond

// TestSimulatedUsageOfPartitions: a partition that has gone is left out, also where another
// one has its ids; how busy one is is known from the second look on, on GPUs with GPM.
func TestSimulatedUsageOfPartitions(t *testing.T) {
	for name, gpm := range map[string]bool{"h100x1": true, "a100x1": false} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, name)
			m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true
			c, file := simulate(t, m)
			pci := m.GPUs[0].PCIAddress
			made, gone := makePartition(t, c, pci, 0), gpu.PartitionID{UUID: "MIG-gone"}
			gone.InstanceID, gone.ComputeID = made.InstanceID, made.ComputeID
			setProcesses(t, file, machine.Process{
				PID: 11, GPU: 0, InstanceID: made.InstanceID, ComputeID: made.ComputeID, MemoryBytes: 1 << 30, SM: 60, Kind: machine.Compute,
			})
			asked := []gpu.PartitionID{gone, made, {InstanceID: 99, UUID: "MIG-never"}}
			var usage gpu.Usage
			for look := range 2 {
				deadline := time.Now().Add(time.Minute)
				for {
					var err error
					if usage, err = c.Usage(t.Context(), pci, asked, time.Time{}); err != nil {
						t.Fatal(err)
					}
					if len(usage.Partitions) != 1 || usage.Partitions[0].PartitionID != made || usage.Utilization != nil {
						t.Fatalf("look %d: %+v", look, usage)
					}
					if known := usage.Partitions[0].Utilization != nil; look == 0 || known == gpm || time.Now().After(deadline) {
						break
					}
					time.Sleep(gpmInterval)
				}
			}
			one := usage.Partitions[0]
			if one.UsedBytes != 1<<30 {
				t.Errorf("memory %d", one.UsedBytes)
			}
			if known := one.Utilization != nil; known != gpm || known && *one.Utilization != 0.6 {
				t.Errorf("utilization %v", one.Utilization)
			}
			if len(usage.Processes) != 1 || usage.Processes[0].InstanceID != made.InstanceID || usage.Processes[0].Utilization != nil {
				t.Errorf("processes %+v", usage.Processes)
			}
		})
	}
}

func makePartition(t *testing.T, c *Client, pci string, start int) gpu.PartitionID {
	t.Helper()
	node := fatal.Get(c.Discover(t.Context()))(t)
	smallest := node.GPUs[0].MIG.Profiles[0]
	for _, p := range node.GPUs[0].MIG.Profiles {
		if p.Resources.MemoryBytes < smallest.Resources.MemoryBytes {
			smallest = p
		}
	}
	id := fatal.Get(c.CreateInstance(t.Context(), pci, smallest.ID, smallest.Placements[start]))(t)
	compute := fatal.Get(c.CreateComputeInstance(t.Context(), pci, id))(t)
	return gpu.PartitionID{InstanceID: id, ComputeID: compute.ID, UUID: compute.UUID}
}

// TestSimulatedUsageFails: a GPU that is lost has an error, one that cannot tell how busy it
// is tells the rest.
func TestSimulatedUsageFails(t *testing.T) {
	m := newMachine(t, "h100x2")
	c, file := simulate(t, m)
	update(t, file, func(m *machine.Machine) {
		m.GPUs[0].Failure = 15
		state.AddFault(m, machine.Fault{Function: "nvmlDeviceGetUtilizationRates", GPU: 1, Code: 999})
	})
	expect.Is(t, expect.Err(c.Usage(t.Context(), m.GPUs[0].PCIAddress, nil, time.Time{})), gpu.ErrLost, "a lost GPU")
	usage, err := c.Usage(t.Context(), m.GPUs[1].PCIAddress, nil, time.Time{})
	if err != nil || usage.Utilization != nil || usage.Processes == nil {
		t.Errorf("without utilization: %+v, %v", usage, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Usage(ended, m.GPUs[1].PCIAddress, nil, time.Time{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}

// TestSimulatedFacts: what a GPU does not support is left out, and every call is observed.
func TestSimulatedFacts(t *testing.T) {
	m := newMachine(t, "t4x2")
	m.GPUs[0].Persistence, m.GPUs[0].ECC = true, -1
	m.GPUs[0].ReservedBytes, m.GPUs[0].Cores = 450<<20, 2560
	m.GPUs[1].Failure = 15
	var mu sync.Mutex
	var calls []Call
	c, _ := simulateClosed(t, m, Options{Observe: func(_ context.Context, call Call) {
		mu.Lock()
		defer mu.Unlock()
		calls = append(calls, call)
	}})
	fatal.Do(t, c.Open(t.Context()))
	facts := fatal.Get(c.Facts(t.Context(), m.GPUs[0].PCIAddress))(t)
	if facts.Persistence == nil || !*facts.Persistence || facts.ECC != nil {
		t.Errorf("got persistence %v, ECC %v", facts.Persistence, facts.ECC)
	}
	if facts.ReservedBytes == nil || *facts.ReservedBytes != 450<<20 || facts.Cores == nil || *facts.Cores != 2560 {
		t.Errorf("got reserved %v, cores %v", facts.ReservedBytes, facts.Cores)
	}
	expect.Is(t, expect.Err(c.Facts(t.Context(), m.GPUs[1].PCIAddress)), gpu.ErrLost, "a lost GPU")

	mu.Lock()
	defer mu.Unlock()
	wantCall(t, calls, "nvmlInitWithFlags", "", nil, nil)
	wantCall(t, calls, "nvmlDeviceGetPersistenceMode", m.GPUs[0].PCIAddress, true, nil)
	wantCall(t, calls, "nvmlDeviceGetEccMode", m.GPUs[0].PCIAddress, false, gpu.ErrNotSupported)
}

func wantCall(t *testing.T, calls []Call, function, pci string, answer any, err error) {
	t.Helper()
	for _, c := range calls {
		if c.Function == function && c.PCIAddress == pci && c.Answer == answer && errors.Is(c.Err, err) {
			return
		}
	}
	t.Errorf("no call of %s on %q with %v, %v in %+v", function, pci, answer, err, calls)
}
