// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// gpuIsLost is NVML_ERROR_GPU_IS_LOST, and the other one likewise.
const (
	gpuIsLost     = 15
	resetRequired = 16
)

// takeDriver unloads the NVIDIA driver; the result loads it again.
func (n *node) takeDriver(t testing.TB) (load func()) {
	t.Helper()
	dirs := []string{"usr", "dev"}
	for _, dir := range dirs {
		rename(t, filepath.Join(n.root, dir), filepath.Join(n.root, dir+".away"))
	}
	return func() {
		t.Helper()
		for _, dir := range dirs {
			rename(t, filepath.Join(n.root, dir+".away"), filepath.Join(n.root, dir))
		}
	}
}

// TestUnprepareBeforeTheDriverIsLoaded: pods end while there is no driver, and
// what they had is cleaned up once there is one.
func TestUnprepareBeforeTheDriverIsLoaded(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t, frequent...)
	part := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
	whole := n.allocate(n.names(t, []request{{gpu: 1}}))
	p.mustPrepare(t, part)
	p.mustPrepare(t, whole)
	p.kill()
	load := n.takeDriver(t)

	p = n.start(t, frequent...)
	p.until(t, "liveness", p.check("liveness"))
	p.mustUnprepare(t, part, whole)
	if left := n.cdiSpecs(t); len(left) > 0 {
		t.Errorf("CDI files are left: %v", left)
	}
	if r, err := n.record(part.GetUid()); err != nil || r == nil || r.State != "unpreparing" {
		t.Errorf("the journal says %+v of a claim whose partition could not be removed (%v)", r, err)
	}
	if err := p.check("readiness")(t.Context()); err == nil {
		t.Error("ready without a driver")
	}
	p.wantLog(t, "NVIDIA driver is not loaded")

	load()
	n.untilAnew(t, p)
	p.ready(t)
	p.untilPublished(t, n, 0, 1)
	p.untilClean(t, n)
}

// TestDriverUnloadedWhileRunning: unprepare works, the GPUs are tainted, and all
// is well again when the driver is back.
func TestDriverUnloadedWhileRunning(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t, frequent...)
	p.ready(t)
	part := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
	whole := n.allocate(n.names(t, []request{{gpu: 1}}))
	p.mustPrepare(t, part)
	p.mustPrepare(t, whole)
	const driverNotLoaded = 9
	fault := n.inject(t, machine.Fault{Function: "*", GPU: -1, Code: driverNotLoaded})
	p.mustUnprepare(t, part, whole)
	if left := n.cdiSpecs(t); len(left) > 0 {
		t.Errorf("CDI files are left: %v", left)
	}
	p.untilTainted(t, n, "unresponsive", append(n.devicesOf(t, 0), n.devicesOf(t, 1)...))
	fault.remove(t)
	p.untilClean(t, n)
	p.untilTainted(t, n, "unresponsive", nil)
	again := n.allocate(n.names(t, []request{{gpu: 0}}))
	p.mustPrepare(t, again)
	p.mustUnprepare(t, again)
	n.wantClean(t)
}

// TestDamagedJournal: a file that makes no sense is set aside and reported. It
// stops nobody else, not even the next start.
func TestDamagedJournal(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(string) string{
		"empty":         func(string) string { return "" },
		"cut off":       func(text string) string { return text[:len(text)/2] },
		"zeros":         func(text string) string { return strings.Repeat("\x00", len(text)) },
		"another claim": func(text string) string { return strings.Replace(text, `"uid": "`, `"uid": "x`, 1) },
		"no address":    func(text string) string { return strings.Replace(text, `"pciAddress"`, `"address"`, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x2")
			p := n.start(t, frequent...)
			damaged := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
			healthy := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 0)}))
			p.mustPrepare(t, damaged)
			p.mustPrepare(t, healthy)
			p.kill()
			n.damage(t, damaged.GetUid(), damage)

			for range 2 {
				p = n.start(t, frequent...)
				p.ready(t)
				p.untilEvent(t, n, "DamagedClaimRecord", damaged.GetUid())
				if got := n.quarantined(t); len(got) != 1 || !strings.HasPrefix(got[0], damaged.GetUid()) {
					t.Errorf("in quarantine are %v", got)
				}
				other := n.allocate(n.names(t, []request{mig(1, "1g.10gb", 0)}))
				p.mustPrepare(t, other)
				p.mustPrepare(t, healthy)
				p.mustUnprepare(t, other)
				p.kill()
			}
			// What it had is not known, so it is not removed.
			n.wantInstances(t, 0, place{"1g.10gb", 0}, place{"1g.10gb", 4})

			// The allocation says it as well, if the kubelet asks again.
			p = n.start(t, frequent...)
			p.ready(t)
			ids := p.mustPrepare(t, damaged)
			if err := n.checkPrepared(damaged.GetUid(), ids, 0, place{"1g.10gb", 4}); err != nil {
				t.Error(err)
			}
			p.mustUnprepare(t, damaged, healthy)
			n.wantClean(t)
		})
	}
}

// TestDamagedJournalUnprepared: the pod of a claim with a damaged record can end.
// Its partition is what somebody made, until an administrator removes it.
func TestDamagedJournalUnprepared(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	p := n.start(t, frequent...)
	claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
	p.mustPrepare(t, claim)
	p.kill()
	n.damage(t, claim.GetUid(), func(string) string { return "{" })
	p = n.start(t, frequent...)
	p.ready(t)
	p.untilEvent(t, n, "DamagedClaimRecord", claim.GetUid())
	// It was reported, so that the next call succeeds at the latest.
	if err := p.unprepare(t, claim); err != nil {
		p.mustUnprepare(t, claim)
	}
	if left := append(n.journal(t), n.cdiSpecs(t)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	p.untilTainted(t, n, "occupied", n.overlapping(t, 0, 4, 1))
	n.smi(t, "mig -i 0 -dci")
	n.smi(t, "mig -i 0 -dgi")
	p.untilTainted(t, n, "occupied", nil)
}

// TestJournalOfLaterVersion: it is not damaged, so it stays for the version that
// wrote it, and its devices are in use.
func TestJournalOfLaterVersion(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t, frequent...)
	claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
	p.mustPrepare(t, claim)
	p.kill()
	n.damage(t, claim.GetUid(), func(text string) string {
		return strings.Replace(text, "journal.partage.dev/v1", "journal.partage.dev/v9", 1)
	})
	p = n.start(t, frequent...)
	p.ready(t)
	p.untilEvent(t, n, "ClaimRecordOfOtherVersion", claim.GetUid())
	if err := p.unprepare(t, claim); err == nil {
		t.Error("a claim was released whose record cannot be read")
	}
	other := n.allocate(n.names(t, []request{{gpu: 1}}))
	p.mustPrepare(t, other)
	p.mustUnprepare(t, other)
	n.wantInstances(t, 0, place{"1g.10gb", 4})
	p.kill()
	n.damage(t, claim.GetUid(), func(text string) string {
		return strings.Replace(text, "journal.partage.dev/v9", "journal.partage.dev/v1", 1)
	})
	p = n.start(t, frequent...)
	p.ready(t)
	p.mustUnprepare(t, claim)
	n.wantClean(t)
}

// damage changes the journal file of a claim.
func (n *node) damage(t testing.TB, uid string, change func(string) string) {
	t.Helper()
	path := filepath.Join(n.plugins, driverName, "claims", uid+".json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	changed := change(string(data))
	if changed == string(data) {
		t.Fatal("the journal file is as before")
	}
	if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
}

// quarantined are the damaged journal files of this boot.
func (n *node) quarantined(t testing.TB) []string {
	t.Helper()
	return list(t, filepath.Join(n.plugins, driverName, "quarantine", n.machine(t).BootID))
}

// TestBrokenGPUAtStart: the others are published and serve; it appears when it is
// well.
func TestBrokenGPUAtStart(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]int{"lost": gpuIsLost, "reset required": resetRequired} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x3", func(m *machine.Machine) { m.GPUs[1].Failure = failure })
			p := n.start(t, frequent...)
			p.ready(t)
			p.untilPublished(t, n, 0, 2)
			for _, gpu := range []int{0, 2} {
				claim := n.allocate(n.names(t, []request{mig(gpu, "1g.10gb", 4)}))
				p.mustPrepare(t, claim)
				p.mustUnprepare(t, claim)
			}
			n.update(t, func(m *machine.Machine) { m.GPUs[1].Failure = 0 })
			p.untilPublished(t, n, 0, 1, 2)
			claim := n.allocate(n.names(t, []request{mig(1, "1g.10gb", 4)}))
			p.mustPrepare(t, claim)
			p.mustUnprepare(t, claim)
			n.wantClean(t)
		})
	}
}

// TestGPUBreaksAndRecovers: its devices stay published and tainted, pods on it
// can end, and it comes back by itself.
func TestGPUBreaksAndRecovers(t *testing.T) {
	t.Parallel()
	for reason, failure := range map[string]int{"lost": gpuIsLost, "reset-required": resetRequired} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x2")
			p := n.start(t, frequent...)
			p.ready(t)
			claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
			p.mustPrepare(t, claim)
			devices := n.devicesOf(t, 0)
			n.update(t, func(m *machine.Machine) { m.GPUs[0].Failure = failure })
			p.untilTainted(t, n, reason, devices)
			beside := n.allocate(n.names(t, []request{mig(1, "1g.10gb", 4)}))
			p.mustPrepare(t, beside)
			p.mustUnprepare(t, beside, claim)
			n.update(t, func(m *machine.Machine) { m.GPUs[0].Failure = 0 })
			p.untilTainted(t, n, reason, nil)
			p.untilClean(t, n)
		})
	}
}
