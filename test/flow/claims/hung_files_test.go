// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// specOf is the path of a claim's CDI spec, or nothing where there is none.
func specOf(t *testing.T, n *harness.Node, c *drapb.Claim) string {
	t.Helper()
	for _, name := range n.CDISpecs(t) {
		if strings.Contains(name, c.GetUid()) {
			return filepath.Join(n.CDIDir, name)
		}
	}
	return ""
}

// loseSpec removes the CDI spec of a claim that is prepared, which the driver is to write again by itself.
func loseSpec(t *testing.T, n *harness.Node, c *drapb.Claim) {
	t.Helper()
	must.Do(t, os.Remove(specOf(t, n, c)))
}

// wantReleased fails unless the pods with these claims can end, all at the same time.
func wantReleased(t *testing.T, p *harness.Driver, why string, claims ...*drapb.Claim) {
	t.Helper()
	errs := make(chan error, len(claims))
	for _, c := range claims {
		go func() { errs <- p.TryUnprepare(t.Context(), c, harness.ReleaseTimeout) }()
	}
	for range claims {
		expect.Do(t, <-errs, why, "and a pod cannot end")
	}
}

// TestProcfsHangs checks that a GPU whose file in /proc cannot be read for a while keeps the driver from looking after no
// claim of another one, that claims can be released all the same, also one that is just being prepared on both, and that the
// other GPU is given back.
func TestProcfsHangs(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", harness.Eager...)
	onHung, _ := p.NewClaim(t, n, harness.Partition(0, "1g.10gb", 4))
	beside, _ := p.NewClaim(t, n, harness.Partition(1, "1g.10gb", 4))
	hung := n.HoldProc(t, 0)
	loseSpec(t, n, onHung)
	hung.UntilHeld(t, 1)
	// A turn that began before may come to its end; there are to be more.
	for range 3 {
		loseSpec(t, n, beside)
		p.UntilTrue(t, "the spec of a claim of GPU 1 to be written again while GPU 0 hangs", func() bool { return specOf(t, n, beside) != "" })
	}
	both := n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 5), harness.Partition(1, "1g.10gb", 5)})
	_, _ = p.TryPrepare(t.Context(), both, harness.ShortTimeout)
	wantReleased(t, p, "GPU 0 hangs", onHung, both)
	n.WantInstances(t, 1, harness.Place{Profile: "1g.10gb", Start: 4})
	wantReleased(t, p, "GPU 0 hangs", beside)
	n.WantInstances(t, 1)
}

// TestDriverFolderHangs checks that pods can end although the folder with the driver's files does not answer, as one on a
// network or on a bad disk.
func TestDriverFolderHangs(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2")
	earlier, _ := p.NewClaim(t, n, harness.Partition(1, "1g.10gb", 4))
	// What is new there has to be looked at.
	must.Do(t, os.WriteFile(filepath.Join(sysroot.LibraryDir(n.Root), "libnew.so"), nil, 0o644))
	hung := n.HoldLibraries(t)
	stuck := n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)})
	go func() { _, _ = p.TryPrepare(t.Context(), stuck, harness.ReleaseTimeout) }()
	hung.UntilHeld(t, 1)
	wantReleased(t, p, "the driver's folder does not answer", earlier, stuck)
	p.UntilTrue(t, "partitions to be given back while the driver's folder does not answer", func() bool { return len(n.Instances(t)) == 0 })
}

// TestRecordsHang checks that every call gets an answer although the disk with the records does not, and that all goes on when
// it does again.
func TestRecordsHang(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", harness.Quiet...)
	earlier, _ := p.NewClaim(t, n, harness.Partition(1, "1g.10gb", 4))
	later := n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)})
	hung := harness.HoldFiles(t, n.RecordsDir())

	// The first one finds out that the disk does not answer. The kubelet comes again.
	for range 2 {
		expect.Says(t, p.TryUnprepare(t.Context(), earlier, harness.ReleaseTimeout), "the disk does not answer", "release")
	}
	hung.UntilHeld(t, 1)
	expect.Says(t, expect.Err(p.TryPrepare(t.Context(), later, harness.ReleaseTimeout)), "whose record cannot be read", "prepare")
	n.WantInstances(t, 1, harness.Place{Profile: "1g.10gb", Start: 4})

	hung.Open()
	// What the disk still holds comes back in a moment, and the kubelet comes again until then.
	must.Do(t, p.Release(t.Context(), earlier), "the disk answers again")
	p.MustPrepare(t, later)
	n.WantInstances(t, 0, harness.Place{Profile: "1g.10gb", Start: 4})
	n.WantInstances(t, 1)
	p.MustUnprepare(t, later)
}

// TestReleaseOfUnkillableMPS checks that a release is answered in time where the daemon of a session cannot be killed, as one
// whose server hangs in a call of the kernel module.
func TestReleaseOfUnkillableMPS(t *testing.T) {
	t.Parallel()
	n, p := harness.NewMPSDriver(t, "h100x1")
	c, ids := p.NewClaim(t, n, harness.Device{Kind: harness.MPS})
	n.StartProgram(t, ids...).Kill() // there is a server from now on
	running, err := n.MPSProcesses()
	if err != nil || len(running) == 0 {
		t.Fatalf("processes of MPS: %v, %v", running, err)
	}
	thaw := harness.Freeze(t, slices.Collect(maps.Keys(running))...)
	wantReleased(t, p, "MPS cannot be killed", c)
	thaw()
	p.UntilClean(t, n)
}
