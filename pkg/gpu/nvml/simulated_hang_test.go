// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/util/wait"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	fatal "github.com/partage-dev/partage/test/must"
)

// TestSimulatedUsageHang: whichever call hangs, Usage returns, and works again afterwards.
func TestSimulatedUsageHang(t *testing.T) {
	for _, function := range []string{
		"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3",
		"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetProcessUtilization", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc",
		"nvmlGpmMigSampleGet", "nvmlGpmMetricsGet", "nvmlGpmSampleFree", "nvmlDeviceGetUUID", "nvmlDeviceGetGpuInstanceById",
		"nvmlDeviceGetMPSComputeRunningProcesses_v3",
	} {
		t.Run(function, func(t *testing.T) {
			m := newMachine(t, "h100x1")
			m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true
			c, file := simulate(t, m)
			pci := m.GPUs[0].PCIAddress
			ids := []gpu.PartitionID{makePartition(t, c, pci, 0)}
			if function != "nvmlGpmQueryDeviceSupport" {
				fatal.Get(c.Usage(t.Context(), pci, ids, time.Time{}))(t)
			}
			fault := addFault(t, file, machine.Fault{Function: function, GPU: -1, Hang: true, Effect: machine.Proceed})
			restore := impatient(c, 200*time.Millisecond)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			_, err := c.Usage(ctx, pci, ids, time.Time{})
			if ctx.Err() != nil || err != nil && !gpu.IsPending(err) {
				t.Errorf("%v", err)
			}
			removeFault(t, file, fault)
			var hung *gpu.PendingError
			if errors.As(err, &hung) {
				<-hung.Done
			}
			restore()
			for {
				usage, err := c.Usage(ctx, pci, ids, time.Time{})
				if err == nil && len(usage.Partitions) == 1 && usage.Partitions[0].Utilization != nil {
					break
				}
				if ctx.Err() != nil {
					t.Fatalf("%v, %+v", err, usage)
				}
				time.Sleep(gpmInterval)
			}
		})
	}
}

// TestSimulatedEventCallsHang: whichever call hangs, the receiver ends when it is told to.
func TestSimulatedEventCallsHang(t *testing.T) {
	for _, function := range []string{
		"nvmlEventSetCreate", "nvmlEventSetFree", "nvmlEventSetWait_v2", "nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents",
	} {
		t.Run(function, func(t *testing.T) {
			m := newMachine(t, "h100-80-sxmx2")
			fault := state.AddFault(m, machine.Fault{Function: function, GPU: -1, Hang: true, Effect: machine.Proceed})
			c, file := simulateClosed(t, m, Options{Calls: call.New(2 * time.Second)})
			fatal.Do(t, c.Open(t.Context()))
			fatal.Get(c.Discover(t.Context()))(t)
			ctx, stop := context.WithCancel(t.Context())
			l := &listener{t: t, client: c, file: file, events: c.Events(ctx)}
			if function == "nvmlEventSetFree" {
				l.monitored(m.GPUs[0].PCIAddress)
			} else {
				l.until(m.GPUs[0].PCIAddress, "hung", gpu.IsPending)
			}
			stop()
			for range l.events { // until it is closed
			}
			c.Close()
			removeFault(t, file, fault)
			limited, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := wait.Until(limited, func() (bool, error) { return c.calls.Pending("nvml") == nil, nil }); err != nil {
				t.Fatalf("%v: %v", err, c.calls.Pending("nvml"))
			}
			expect.Do(t, c.Open(limited))
			c.Close()
		})
	}
}
