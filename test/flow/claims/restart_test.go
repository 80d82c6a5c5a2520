// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestRestartWithBrokenGPU checks that all devices of a GPU that is broken when the driver
// starts again stay published, tainted, that the claims on it can be released, and that it
// recovers.
func TestRestartWithBrokenGPU(t *testing.T) {
	t.Parallel()
	for reason, failure := range map[string]int{"gpu-lost": harness.NVMLGPUIsLost, "reset-required": harness.NVMLResetRequired} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			p := n.Start(t, harness.Frequent...)
			p.UntilPublished(t, n, 0, 1)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			p.MustPrepare(t, claim)
			devices := n.DevicesOf(t, 0)
			p.Kill()
			n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure = failure })

			for range 2 {
				p = n.Start(t, harness.Frequent...)
				p.Ready(t)
				p.UntilTainted(t, n, reason, devices)
				p.UntilPublished(t, n, 0, 1)
				beside := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
				p.MustPrepare(t, beside)
				p.MustUnprepare(t, beside)
				p.Kill()
			}
			p = n.Start(t, harness.Frequent...)
			p.MustUnprepare(t, claim)
			n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure = 0 })
			p.UntilTainted(t, n, reason, nil)
			p.UntilClean(t, n)
		})
	}
}

// TestRestartWithoutDriver checks that all devices stay published, tainted, while the
// NVIDIA driver is away.
func TestRestartWithoutDriver(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Frequent...)
	p.UntilPublished(t, n, 0, 1)
	devices := append(n.DevicesOf(t, 0), n.DevicesOf(t, 1)...)
	p.Kill()
	load := unloadDriver(t, n)
	p = n.Start(t, harness.Frequent...)
	p.UntilTainted(t, n, "unresponsive", devices)
	if err := p.Check("readiness")(t.Context()); err == nil {
		t.Error("ready without a driver")
	}
	load()
	p.UntilTainted(t, n, "unresponsive", nil)
	p.UntilPublished(t, n, 0, 1)
}

// TestRebootWithBrokenGPUs checks that of GPUs that are broken after the machine was
// started anew those stay published, tainted, of which claims have devices, and only for as
// long.
func TestRebootWithBrokenGPUs(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x3")
	p := n.Start(t, harness.Frequent...)
	p.UntilPublished(t, n, 0, 1, 2)
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, claim)
	devices := n.DevicesOf(t, 0)
	p.Kill()
	n.Reboot(t)
	n.Update(t, func(m *machine.Machine) {
		m.GPUs[0].Failure, m.GPUs[1].Failure = harness.NVMLGPUIsLost, harness.NVMLGPUIsLost
	})
	// Restarts of the driver change nothing.
	for range 2 {
		p = n.Start(t, harness.Frequent...)
		p.Ready(t)
		p.UntilPublished(t, n, 0, 2)
		p.UntilTainted(t, n, "gpu-lost", devices)
		p.Kill()
	}
	p = n.Start(t, harness.Frequent...)
	p.MustUnprepare(t, claim)
	p.UntilPublished(t, n, 2)
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure, m.GPUs[1].Failure = 0, 0 })
	p.UntilPublished(t, n, 0, 1, 2)
	p.UntilTainted(t, n, "gpu-lost", nil)
	p.UntilClean(t, n)
}

// TestDamagedGPUFile checks that the driver starts without what it has written down of the
// GPUs, says so, and writes it anew.
func TestDamagedGPUFile(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	path := filepath.Join(n.PluginsDir, harness.DriverName, "gpus.json")
	p := n.Start(t)
	p.Ready(t)
	p.Kill()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, good[:len(good)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	p = n.Start(t)
	p.Ready(t)
	p.UntilPublished(t, n, 0, 1)
	p.WantLog(t, path)
	if now, err := os.ReadFile(path); err != nil || string(now) != string(good) {
		t.Errorf("the file is not as before: %v", err)
	}
}
