// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestBrokenGPU checks that the devices of a GPU that breaks stay published and are tainted until it is back, also by drivers
// that start meanwhile, that the pods which have them are told and can end, and that the other GPU serves on.
func TestBrokenGPU(t *testing.T) {
	t.Parallel()
	for reason, broken := range map[string]struct {
		code  int
		event string
	}{"gpu-lost": {harness.NVMLGPUIsLost, "GPULost"}, "reset-required": {harness.NVMLResetRequired, "GPUResetRequired"}} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewMPSDriver(t, "h100x2", harness.Frequent...)
			p.UntilPublished(t, n, 0, 1)
			partition := harness.Partition(0, "1g.10gb", 4)
			claim := n.Allocate(t, []harness.Device{partition})
			n.API.Reserve(claim.GetNamespace(), claim.GetName(), "user")
			p.MustPrepare(t, claim)
			devices := n.DevicesOf(t, 0)
			n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure = broken.code })
			for range 2 {
				p.UntilTainted(t, n, reason, devices)
				p.UntilPublished(t, n, 0, 1)
				p.WantFree(t, n, harness.Partition(1, "1g.10gb", 4))
				for _, question := range []string{"liveness", "readiness"} {
					expect.Do(t, p.Check(question)(t.Context()))
				}
				untilPodTold(t, p, n, "user", broken.event)
				p.Kill()
				p = n.Run(t, harness.Frequent...)
			}
			p.MustUnprepare(t, claim)
			n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure = 0 })
			p.UntilTainted(t, n, reason, nil)
			p.UntilEvent(t, n, "GPURecovered", n.Address(t, 0))
			p.UntilClean(t, n)
			p.WantFree(t, n, partition)
			for _, e := range n.Events(t) {
				if strings.Contains(e.Message, n.Address(t, 1)) && e.Type == corev1.EventTypeWarning {
					t.Errorf("an event is about the GPU that is well: %+v", e)
				}
			}
		})
	}
}

// unloadDriver unloads the NVIDIA driver; the result loads it again.
func unloadDriver(t testing.TB, n *harness.Node) (load func()) {
	t.Helper()
	dirs := []string{"usr", "dev"}
	for _, dir := range dirs {
		harness.Rename(t, filepath.Join(n.Root, dir), filepath.Join(n.Root, dir+".away"))
	}
	return func() {
		t.Helper()
		for _, dir := range dirs {
			harness.Rename(t, filepath.Join(n.Root, dir+".away"), filepath.Join(n.Root, dir))
		}
	}
}

// TestStartWithoutDriver checks that a driver that starts without the NVIDIA driver is alive and says why it is not ready, that
// pods can end and none starts, that all devices stay published, tainted, and that they are cleaned up once it is loaded.
func TestStartWithoutDriver(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", harness.Frequent...)
	part, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
	whole, _ := p.NewClaim(t, n, harness.Device{GPU: 1})
	p.UntilPublished(t, n, 0, 1)
	devices := append(n.DevicesOf(t, 0), n.DevicesOf(t, 1)...)
	p.Kill()
	load := unloadDriver(t, n)

	p = n.Start(t, harness.Frequent...)
	p.Until(t, "liveness", p.Check("liveness"))
	p.MustUnprepare(t, part, whole)
	expect.Len(t, n.CDISpecs(t), 0, "CDI files are left")
	if r, err := n.Record(part.GetUid()); err != nil || r == nil || r.State != harness.StateReleasing {
		t.Errorf("the journal says %+v of a claim whose partition could not be removed (%v)", r, err)
	}
	expect.Contains(t, p.Prepare(t, whole)[0].GetError(), "NVIDIA driver is not loaded", "prepare without a driver")
	p.MustUnprepare(t, whole)
	p.UntilTainted(t, n, "unresponsive", devices)
	expect.Fails(t, p.Check("readiness")(t.Context()), "ready without a driver")
	p.WantLog(t, "NVIDIA driver is not loaded")

	load()
	p.Ready(t)
	p.UntilTainted(t, n, "unresponsive", nil)
	p.UntilPublished(t, n, 0, 1)
	p.UntilClean(t, n)
}

// TestDriverUnloaded checks that all devices are tainted and pods can end while the NVIDIA
// driver is unloaded under a running driver, and that all recovers by itself.
func TestDriverUnloaded(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", harness.Frequent...)
	part, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
	whole, _ := p.NewClaim(t, n, harness.Device{GPU: 1})
	const driverNotLoaded = 9
	away := n.Inject(t, machine.Fault{Function: "*", GPU: -1, Code: driverNotLoaded})
	p.UntilTainted(t, n, "unresponsive", append(n.DevicesOf(t, 0), n.DevicesOf(t, 1)...))
	p.Until(t, "the driver not to be ready", func(ctx context.Context) error {
		if err := p.Check("readiness")(ctx); err == nil {
			return errors.New("it is")
		}
		return nil
	})
	expect.Do(t, p.Check("liveness")(t.Context()))
	p.MustUnprepare(t, part, whole)
	expect.Len(t, n.CDISpecs(t), 0, "CDI files are left")
	away.Remove(t)
	p.Ready(t)
	p.UntilClean(t, n)
	untilPrinted(t, p, n)
	p.WantFree(t, n, harness.Device{GPU: 0}, harness.Partition(0, "1g.10gb", 0))
}

// NVML's states of the registration with an NVLink fabric.
const (
	fabricInProgress = 2
	fabricCompleted  = 3
)

// TestFabricAfterPartitions: the NVIDIA driver registers a GPU with the NVLink fabric again after its last
// partition is gone. A claim of the whole GPU waits for that, so that its program does not fail, and claims of the
// other GPU do not.
func TestFabricAfterPartitions(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2", func(m *machine.Machine) {
		m.GPUs[0].Health.Fabric.State, m.GPUs[1].Health.Fabric.State = fabricCompleted, fabricCompleted
	})
	fabric := func(state int) {
		t.Helper()
		n.Update(t, func(m *machine.Machine) { m.GPUs[0].Health.Fabric.State = state })
	}
	p := n.Run(t)
	partition, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 0))
	fabric(fabricInProgress)
	p.MustUnprepare(t, partition)
	p.WantTaken(t, n, "the GPU is not registered with its fabric", harness.Device{GPU: 0})
	p.WantLog(t, "NVLink fabric")
	p.WantFree(t, n, harness.Device{GPU: 1})
	fabric(fabricCompleted)
	_, ids := p.NewClaim(t, n, harness.Device{GPU: 0})
	// What a program would have met.
	fabric(fabricInProgress)
	if out, err := n.RunProgram(t, n.Container(t, ids...), "info"); err == nil || !strings.Contains(out, "SYSTEM_NOT_READY") {
		t.Errorf("a program before that: %v, %s", err, out)
	}
	fabric(fabricCompleted)
	n.StartProgram(t, ids...)
}
