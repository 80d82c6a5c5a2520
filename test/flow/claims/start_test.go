// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

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

// TestUnprepareBeforeTheDriverIsLoaded checks that pods can end without the NVIDIA driver,
// and that their devices are cleaned up once it is loaded.
func TestUnprepareBeforeTheDriverIsLoaded(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Frequent...)
	part := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	whole := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 1}}))
	p.MustPrepare(t, part)
	p.MustPrepare(t, whole)
	p.Kill()
	load := unloadDriver(t, n)

	p = n.Start(t, harness.Frequent...)
	p.Until(t, "liveness", p.Check("liveness"))
	p.MustUnprepare(t, part, whole)
	if left := n.CDISpecs(t); len(left) > 0 {
		t.Errorf("CDI files are left: %v", left)
	}
	if r, err := n.Record(part.GetUid()); err != nil || r == nil || r.State != harness.StateReleasing {
		t.Errorf("the journal says %+v of a claim whose partition could not be removed (%v)", r, err)
	}
	if err := p.Check("readiness")(t.Context()); err == nil {
		t.Error("ready without a driver")
	}
	p.WantLog(t, "NVIDIA driver is not loaded")

	load()
	p.Ready(t)
	p.UntilPublished(t, n, 0, 1)
	p.UntilClean(t, n)
}

// TestDriverUnloadedWhileRunning checks that pods can end while the NVIDIA driver is away
// and the GPUs are tainted, and that all recovers with it.
func TestDriverUnloadedWhileRunning(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	part := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	whole := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 1}}))
	p.MustPrepare(t, part)
	p.MustPrepare(t, whole)
	const driverNotLoaded = 9
	fault := n.Inject(t, machine.Fault{Function: "*", GPU: -1, Code: driverNotLoaded})
	p.MustUnprepare(t, part, whole)
	if left := n.CDISpecs(t); len(left) > 0 {
		t.Errorf("CDI files are left: %v", left)
	}
	p.UntilTainted(t, n, "unresponsive", append(n.DevicesOf(t, 0), n.DevicesOf(t, 1)...))
	fault.Remove(t)
	p.UntilClean(t, n)
	p.UntilTainted(t, n, "unresponsive", nil)
	again := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
	p.MustPrepare(t, again)
	p.MustUnprepare(t, again)
	n.WantClean(t)
}

// TestDamagedRecord checks that a record that cannot be read stays and is reported,
// and affects no prepared claim and no other GPU that it cannot be about, not even after a restart.
func TestDamagedRecord(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(string) string{
		"empty":         func(string) string { return "" },
		"cut off":       func(text string) string { return text[:len(text)/2] },
		"zeros":         func(text string) string { return strings.Repeat("\x00", len(text)) },
		"another claim": func(text string) string { return strings.Replace(text, `"uid": "`, `"uid": "x`, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			p := n.Start(t, harness.Frequent...)
			damaged := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			healthy := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
			p.MustPrepare(t, damaged)
			p.MustPrepare(t, healthy)
			p.Kill()
			damageRecord(t, n, damaged.GetUid(), damage)

			for range 2 {
				p = n.Start(t, harness.Frequent...)
				p.Ready(t)
				p.UntilEvent(t, n, "DamagedClaimRecord", damaged.GetUid())
				if got := n.Records(t); !slices.ContainsFunc(got, func(name string) bool { return strings.HasPrefix(name, damaged.GetUid()) }) {
					t.Errorf("records are %v", got)
				}
				p.MustPrepare(t, healthy)
				if saysGPU := name == "cut off" || name == "another claim"; saysGPU {
					other := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 0)}))
					p.MustPrepare(t, other)
					p.MustUnprepare(t, other)
				}
				p.Kill()
			}
			// What it had is not known, so it is not removed.
			n.WantInstances(t, 0, harness.Place{Profile: "1g.10gb", Start: 0}, harness.Place{Profile: "1g.10gb", Start: 4})

			// The allocation says it as well, if the kubelet asks again.
			p = n.Start(t, harness.Frequent...)
			p.Ready(t)
			ids := p.MustPrepare(t, damaged)
			if err := n.CheckPrepared(damaged.GetUid(), ids, 0, harness.Place{Profile: "1g.10gb", Start: 4}); err != nil {
				t.Error(err)
			}
			p.MustUnprepare(t, damaged, healthy)
			n.WantClean(t)
		})
	}
}

// TestDamagedRecordUnprepared checks that the pod of a claim with a damaged record can end.
// Its partition then counts as foreign until an administrator removes it. The record stays, since it does not say which GPUs
// it is about and there may be ones that are not seen now, and keeps nothing from the ones that are.
func TestDamagedRecordUnprepared(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t, harness.Frequent...)
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, claim)
	p.Kill()
	damageRecord(t, n, claim.GetUid(), func(string) string { return "{" })
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	p.UntilEvent(t, n, "DamagedClaimRecord", claim.GetUid())
	p.MustUnprepare(t, claim)
	if left := n.CDISpecs(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 4, 1))
	n.RunSMI(t, "mig -i 0 -dci")
	n.RunSMI(t, "mig -i 0 -dgi")
	p.UntilTainted(t, n, "occupied", nil)
	other := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, other)
	p.MustUnprepare(t, other)
	kept := n.Records(t)
	if len(kept) != 1 || !strings.HasPrefix(kept[0], claim.GetUid()) {
		t.Fatalf("records are %v, want that of the damaged one", kept)
	}
	if err := os.Remove(filepath.Join(n.RecordsDir(), kept[0])); err != nil {
		t.Fatal(err)
	}
	p.UntilClean(t, n)
}

// TestRecordOfLaterVersion checks that a record of a later version stays for that version,
// and its devices stay in use.
func TestRecordOfLaterVersion(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Frequent...)
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, claim)
	p.Kill()
	damageRecord(t, n, claim.GetUid(), func(text string) string { return withVersion(text, "1", "9") })
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	p.UntilEvent(t, n, "DamagedClaimRecord", claim.GetUid(), "run the version of the driver that wrote it")
	p.MustUnprepare(t, claim)
	other := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 1}}))
	p.MustPrepare(t, other)
	p.MustUnprepare(t, other)
	n.WantInstances(t, 0, harness.Place{Profile: "1g.10gb", Start: 4})
	p.Kill()
	damageRecord(t, n, claim.GetUid(), func(text string) string { return withVersion(text, "9", "1") })
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	p.UntilClean(t, n)
}

// withVersion gives a record another version, as that version would have written it.
func withVersion(text, is, want string) string {
	line, body, _ := strings.Cut(text, "\n")
	line = strings.Replace(line[:len(line)-8], "partage-claim-record/"+is, "partage-claim-record/"+want, 1)
	return fmt.Sprintf("%s%08x\n%s", line, crc32.ChecksumIEEE([]byte(line)), body)
}

// damageRecord changes the record of a claim.
func damageRecord(t testing.TB, n *harness.Node, uid string, change func(string) string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(n.RecordsDir(), uid+".*"))
	if err != nil {
		t.Fatal(err)
	}
	damaged := 0
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if changed := change(string(data)); changed != string(data) {
			damaged++
			if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if damaged != 1 {
		t.Fatalf("%d records of %d files are not as before, want 1", damaged, len(paths))
	}
}

// TestBrokenGPUAtStart checks that the other GPUs are published and serve, and that a broken
// one is published when it has recovered.
func TestBrokenGPUAtStart(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]int{"lost": harness.NVMLGPUIsLost, "reset required": harness.NVMLResetRequired} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x3", func(m *machine.Machine) { m.GPUs[1].Failure = failure })
			p := n.Start(t, harness.Frequent...)
			p.Ready(t)
			p.UntilPublished(t, n, 0, 2)
			for _, gpu := range []int{0, 2} {
				claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(gpu, "1g.10gb", 4)}))
				p.MustPrepare(t, claim)
				p.MustUnprepare(t, claim)
			}
			n.Update(t, func(m *machine.Machine) { m.GPUs[1].Failure = 0 })
			p.UntilPublished(t, n, 0, 1, 2)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
			p.MustPrepare(t, claim)
			p.MustUnprepare(t, claim)
			n.WantClean(t)
		})
	}
}

// TestGPUBreaksAndRecovers checks that the devices of a broken GPU stay published, tainted,
// that its pods can end, and that it recovers by itself.
func TestGPUBreaksAndRecovers(t *testing.T) {
	t.Parallel()
	for reason, failure := range map[string]int{"gpu-lost": harness.NVMLGPUIsLost, "reset-required": harness.NVMLResetRequired} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			p := n.Start(t, harness.Frequent...)
			p.Ready(t)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			p.MustPrepare(t, claim)
			devices := n.DevicesOf(t, 0)
			n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure = failure })
			p.UntilTainted(t, n, reason, devices)
			beside := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
			p.MustPrepare(t, beside)
			p.MustUnprepare(t, beside, claim)
			n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure = 0 })
			p.UntilTainted(t, n, reason, nil)
			p.UntilClean(t, n)
		})
	}
}
