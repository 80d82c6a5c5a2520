// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// TestReleaseOnBadDisk checks that the devices of claims of each kind are given back, and all pods can end at the same time,
// although the driver cannot write anything down, there is no room for a letter more, or CDI specs cannot be removed: nobody
// can use those without the claim.
func TestReleaseOnBadDisk(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, n *harness.Node, fill func()){
		"read-only":      func(t *testing.T, n *harness.Node, _ func()) { t.Helper(); harness.ReadOnly(t, n.DataDir()) },
		"full":           func(_ *testing.T, _ *harness.Node, fill func()) { fill() },
		"specs are kept": func(t *testing.T, n *harness.Node, _ func()) { t.Helper(); harness.ReadOnly(t, n.CDIDir) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "dgx-h100")
			var fill func()
			if name == "full" {
				fill = n.SmallDisk(t)
			}
			n.StartSupervisor(t)
			p := n.Run(t, n.Interposer(t), n.Policy(t, "default:\n  timeslice: {clients: 3, interval: Long}\n"))
			var claims []*drapb.Claim
			for _, device := range []harness.Device{harness.Partition(0, "1g.10gb", 4), {GPU: 1, Kind: harness.MPS}, {GPU: 2, Kind: harness.TimeSlice}, {GPU: 3}} {
				c, _ := p.NewClaim(t, n, device)
				claims = append(claims, c)
			}
			spoil(t, n, fill)
			wantReleased(t, p, "the driver cannot write", claims...)
			for gpu, g := range n.Machine(t).GPUs {
				if len(g.MIG.Instances) > 0 || g.ComputeMode != harness.DefaultMode || g.TimeSlice != harness.DefaultSlice {
					t.Errorf("GPU %d is not given back: instances %+v, compute mode %d, time slice %d", gpu, g.MIG.Instances, g.ComputeMode, g.TimeSlice)
				}
			}
			if left := n.CDISpecs(t); len(left) > 0 && name != "specs are kept" {
				t.Errorf("CDI specs of released claims are still there: %v", left)
			}
		})
	}
}

// TestFoldersRemoved checks that claims come and go although somebody has removed a folder below the driver's while it runs.
func TestFoldersRemoved(t *testing.T) {
	t.Parallel()
	folders := removeFolder(t, "")
	if len(folders) == 0 {
		t.Fatal("the driver has no folders")
	}
	for _, folder := range folders {
		removeFolder(t, folder)
	}
	t.Logf("%d cases", len(folders))
}

// removeFolder removes a folder while there is a claim, and returns the names of all folders.
func removeFolder(t *testing.T, name string) (all []string) {
	t.Helper()
	n, p := harness.NewDriver(t, "h100x1")
	before, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
	for _, one := range harness.List(t, n.DataDir()) {
		if info, err := os.Stat(filepath.Join(n.DataDir(), one)); err == nil && info.IsDir() {
			all = append(all, one)
		}
	}
	if name == "" {
		return all
	}
	folder := filepath.Join(n.DataDir(), name)
	known := slices.ContainsFunc(n.RecordsOf(t, before.GetUid()), func(path string) bool { return !strings.HasPrefix(path, folder+"/") })
	must.Do(t, os.RemoveAll(folder))
	wantReleased(t, p, "folder "+name+" was removed", before)
	if known && len(n.Instances(t)) > 0 {
		t.Errorf("without the folder %s a partition is not given back", name)
	}
	after := n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 5)})
	if _, err := p.TryPrepare(t.Context(), after, harness.ReleaseTimeout); err != nil {
		t.Errorf("without the folder %s no pod can start: %v", name, err)
	}
	return all
}

// TestReleaseOnUnreadableRecord checks that a pod can end although what the driver has written down about its claim cannot
// be read any more, and that no container can get its devices from then on.
func TestReleaseOnUnreadableRecord(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(string) error{"EIO": harness.Unreadable, "cut off": harness.CutOff, "folder": harness.IsFolder} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewDriver(t, "h100x1")
			c, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
			n.DamageRecords(t, c.GetUid(), damage)
			expect.Do(t, p.Release(t.Context(), c), "the pod cannot end, because the record of its claim cannot be read")
			// A repair that began before the release writes it again, and takes it back when it finds the record unreadable.
			p.UntilTrue(t, "the CDI spec of a claim that is released to be gone", func() bool { return specOf(t, n, c) == "" })
		})
	}
}

// TestUnreadableRecordGuards checks that nothing of a GPU is given out that a claim has whose record cannot be read: its pod
// may be running. That is so after a restart, too.
func TestUnreadableRecordGuards(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(string) error{"EIO": harness.Unreadable, "cut off": harness.CutOff} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, p := harness.NewMPSDriver(t, "h100x4")
			held := []harness.Device{{GPU: 0}, {GPU: 1, Kind: harness.MPS}, {GPU: 2, Kind: harness.TimeSlice}, harness.Partition(3, "1g.10gb", 4)}
			var claims []*drapb.Claim
			for _, d := range held {
				c, _ := p.NewClaim(t, n, d)
				claims = append(claims, c)
			}
			for _, c := range claims {
				n.DamageRecords(t, c.GetUid(), damage)
			}
			var others []harness.Device
			for gpu, has := range held {
				for _, d := range []harness.Device{{GPU: gpu}, {GPU: gpu, Kind: harness.MPS}, {GPU: gpu, Kind: harness.TimeSlice}, harness.Partition(gpu, "1g.10gb", 4)} {
					// Whoever shares a GPU may have others beside it.
					if d.Kind == "" || d.Kind != has.Kind {
						others = append(others, d)
					}
				}
			}
			p.WantTaken(t, n, "a pod may have the GPU", others...)
			p.Kill()
			p = n.Run(t)
			for _, c := range claims {
				p.UntilEvent(t, n, "DamagedClaimRecord", c.GetUid())
			}
			p.WantTaken(t, n, "a pod may have the GPU after a restart", others...)
			// What a claim had is not known, so it is not removed.
			n.WantInstances(t, 3, harness.Place{Profile: "1g.10gb", Start: 4})
		})
	}
}
