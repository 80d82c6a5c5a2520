// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// loseSpec removes the CDI spec of a claim that is prepared, which the driver is to write again by itself, and returns its path.
func loseSpec(t *testing.T, n *harness.Node, c *drapb.Claim) (path string) {
	t.Helper()
	specs := n.CDISpecs(t)
	at := slices.IndexFunc(specs, func(name string) bool { return strings.Contains(name, c.GetUid()) })
	if at < 0 {
		t.Fatalf("claim %s has no CDI spec: %v", c.GetName(), specs)
	}
	path = filepath.Join(n.CDIDir, specs[at])
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// writesAgain reports whether the driver writes a CDI spec again that is lost: all claims that need something get their turn.
func writesAgain(t *testing.T, n *harness.Node, c *drapb.Claim, within time.Duration) bool {
	t.Helper()
	path := loseSpec(t, n, c)
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	for {
		if _, err := os.Stat(path); err == nil {
			return true
		}
		if harness.Soon(ctx) != nil {
			return false
		}
	}
}

// procfsHangs is a node where the driver looks after a claim of GPU 0, whose file in /proc hangs. The other is of GPU 1.
func procfsHangs(t *testing.T) (n *harness.Node, p *harness.Driver, onHung, beside *drapb.Claim) {
	t.Helper()
	n = harness.NewNode(t, "h100x2")
	p = n.Start(t, harness.Eager...)
	p.Ready(t)
	onHung = n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	beside = n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
	for _, c := range []*drapb.Claim{onHung, beside} {
		p.MustPrepare(t, c)
	}
	if !writesAgain(t, n, beside, harness.Patience) {
		t.Fatal("a CDI spec that is missing is not written again, although nothing hangs")
	}
	hung := n.HoldProc(t, 0)
	loseSpec(t, n, onHung)
	hung.UntilHeld(t, 1)
	return n, p, onHung, beside
}

// TestCleanUpWhileProcfsHangs checks that a GPU whose file in /proc cannot be read for a while keeps the driver from looking
// after no other claim.
func TestCleanUpWhileProcfsHangs(t *testing.T) {
	t.Parallel()
	n, p, _, beside := procfsHangs(t)
	// A turn that began before may come to its end; there are to be more.
	for range 3 {
		if !writesAgain(t, n, beside, 10*time.Second) {
			t.Error("GPU 0 hangs, and nothing is cleaned up any more for a claim of GPU 1")
			break
		}
	}
	if err := p.TryUnprepare(t.Context(), beside, harness.ReleaseTimeout); err != nil {
		t.Errorf("GPU 0 hangs, and a pod with GPU 1 cannot end: %v", err)
	}
}

// TestReleaseWhileProcfsHangs checks that claims can be released although the file in /proc of one of their GPUs cannot be
// read, also one that is just being prepared, and that other GPUs are given back.
func TestReleaseWhileProcfsHangs(t *testing.T) {
	t.Parallel()
	n, p, onHung, _ := procfsHangs(t)
	both := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 5), harness.Partition(1, "1g.10gb", 5)}))
	_, _ = p.TryPrepare(t.Context(), both, harness.ShortTimeout)
	errs := make(chan error, 2)
	for _, c := range []*drapb.Claim{onHung, both} {
		go func() { errs <- p.TryUnprepare(t.Context(), c, harness.ReleaseTimeout) }()
	}
	if err := errors.Join(<-errs, <-errs); err != nil {
		t.Errorf("GPU 0 hangs, and a pod with it cannot end: %v", err)
	}
	n.WantInstances(t, 1, harness.Place{Profile: "1g.10gb", Start: 4})
}

// TestDriverFolderHangs checks that pods can end although the folder with the driver's files does not answer, as one on a
// network or on a bad disk.
func TestDriverFolderHangs(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	p.Ready(t)
	earlier := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
	p.MustPrepare(t, earlier)
	// What is new there has to be looked at.
	if err := os.WriteFile(filepath.Join(sysroot.LibraryDir(n.Root), "libnew.so"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	hung := n.HoldLibraries(t)
	stuck := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	go func() { _, _ = p.TryPrepare(t.Context(), stuck, harness.ReleaseTimeout) }()
	hung.UntilHeld(t, 1)
	errs := make(chan error, 2)
	for _, c := range []*drapb.Claim{earlier, stuck} {
		go func() { errs <- p.TryUnprepare(t.Context(), c, harness.ReleaseTimeout) }()
	}
	if err := errors.Join(<-errs, <-errs); err != nil {
		t.Errorf("the driver's folder does not answer, and a pod cannot end: %v", err)
	}
	p.Until(t, "partitions to be given back while the driver's folder does not answer", func(context.Context) error {
		if left := n.Instances(t); len(left) > 0 {
			return fmt.Errorf("there are %+v", left)
		}
		return nil
	})
}

// TestRecordsHang checks that every call gets an answer although the disk with the records does not, and that all goes on when
// it does again.
func TestRecordsHang(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Quiet...)
	p.Ready(t)
	earlier := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
	later := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, earlier)
	hung := harness.HoldFiles(t, n.RecordsDir())

	// The first one finds out that the disk does not answer. The kubelet comes again.
	for range 2 {
		err := p.TryUnprepare(t.Context(), earlier, harness.ReleaseTimeout)
		if err == nil || !strings.Contains(err.Error(), "the disk does not answer") {
			t.Errorf("release: got %v, want that the disk does not answer", err)
		}
	}
	hung.UntilHeld(t, 1)
	if _, err := p.TryPrepare(t.Context(), later, harness.ReleaseTimeout); err == nil || !strings.Contains(err.Error(), "may be in use by a claim whose record cannot be read") {
		t.Errorf("prepare: got %v, want that a record cannot be read", err)
	}
	n.WantInstances(t, 1, harness.Place{Profile: "1g.10gb", Start: 4})

	hung.Open()
	// What the disk still holds comes back in a moment, and the kubelet comes again until then.
	if err := p.Release(t.Context(), earlier); err != nil {
		t.Fatalf("the disk answers again: %v", err)
	}
	p.MustPrepare(t, later)
	n.WantInstances(t, 0, harness.Place{Profile: "1g.10gb", Start: 4})
	n.WantInstances(t, 1)
	p.MustUnprepare(t, later)
}
