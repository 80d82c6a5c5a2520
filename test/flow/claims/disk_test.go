// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestReleaseOnReadOnlyDisk checks that devices are given back and pods can end although the driver cannot write anything
// down.
func TestReleaseOnReadOnlyDisk(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	d.prepare(t)
	harness.ReadOnly(t, d.n.DataDir())
	d.wantReleased(t)
}

// TestReleaseOnFullDisk checks the same where there is no room for a letter more.
func TestReleaseOnFullDisk(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	fill := d.n.SmallDisk(t)
	d.prepare(t)
	fill()
	d.wantReleased(t)
}

// TestReleaseWithReadOnlySpecs checks the same where CDI specs cannot be removed. Nobody can use them without the claim.
func TestReleaseWithReadOnlySpecs(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	d.prepare(t)
	harness.ReadOnly(t, d.n.CDIDir)
	d.specsStay = true
	d.wantReleased(t)
}

// disk is a node whose disk goes bad while there is a claim of each kind, each on a GPU of its own.
type disk struct {
	n         *harness.Node
	p         *harness.Driver
	claims    []*drapb.Claim
	specsStay bool
}

func newDisk(t *testing.T) *disk {
	t.Helper()
	return &disk{n: harness.NewNode(t, "dgx-h100")}
}

func (d *disk) prepare(t *testing.T) {
	t.Helper()
	d.n.StartSupervisor(t)
	d.p = d.n.Start(t, d.n.Interposer(t), d.n.Policy(t, "default:\n  timeslice: {clients: 3, interval: Long}\n"))
	d.p.Ready(t)
	for _, device := range []harness.Device{harness.Partition(0, "1g.10gb", 4), {GPU: 1, Kind: harness.MPS}, {GPU: 2, Kind: harness.TimeSlice}, {GPU: 3}} {
		c := d.n.Allocate(t, []harness.Device{device})
		d.p.MustPrepare(t, c)
		d.claims = append(d.claims, c)
	}
}

// wantReleased lets all pods end at the same time.
func (d *disk) wantReleased(t *testing.T) {
	t.Helper()
	errs := make([]error, len(d.claims))
	var wg sync.WaitGroup
	for i, c := range d.claims {
		wg.Go(func() { errs[i] = d.p.Release(t.Context(), c) })
	}
	wg.Wait()
	for gpu, g := range d.n.Machine(t).GPUs {
		if len(g.MIG.Instances) > 0 || g.ComputeMode != harness.DefaultMode || g.TimeSlice != harness.DefaultSlice {
			t.Errorf("GPU %d is not given back: instances %+v, compute mode %d, time slice %d", gpu, g.MIG.Instances, g.ComputeMode, g.TimeSlice)
		}
	}
	for gpu, err := range errs {
		if err != nil {
			t.Errorf("the pod with GPU %d cannot end, because the driver cannot write: %v", gpu, err)
		}
	}
	if left := d.n.CDISpecs(t); len(left) > 0 && !d.specsStay {
		t.Errorf("CDI specs of released claims are still there: %v", left)
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
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	before := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, before)
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
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := p.Release(t.Context(), before); err != nil {
		t.Errorf("without the folder %s a pod cannot end: %v", name, err)
	}
	if known && len(n.Instances(t)) > 0 {
		t.Errorf("without the folder %s a partition is not given back", name)
	}
	after := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 5)}))
	if _, err := p.TryPrepare(t.Context(), after, harness.ReleaseTimeout); err != nil {
		t.Errorf("without the folder %s no pod can start: %v", name, err)
	}
	return all
}
