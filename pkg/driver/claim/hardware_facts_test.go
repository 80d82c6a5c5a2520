// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
)

// A partition of somebody else with a compute instance that does not span it has less
// than its device would promise.
func TestForeignPartitionWithSmallerComputeInstance(t *testing.T) {
	half := partition.Address{PCIAddress: pciA, ProfileID: 9, Placement: gpu.Placement{Start: 0, Size: 4}}
	for slices, usable := range map[int]bool{1: false, 2: false, 3: true, 0: true} {
		b := newBox(t)
		b.makeForeign(half)
		b.change(half, func(i *gpu.Instance) { i.Compute[0].Slices = slices })
		status := survey(t.Context(), b.manager())
		if got := len(status.Static) == 1; got != usable {
			t.Errorf("%d of 3 slices: got %+v", slices, status)
		}
		if usable {
			continue
		}
		if len(status.Conditions) != 1 || status.Conditions[0].Reason != device.Occupied || !strings.Contains(status.Conditions[0].Message, "slices") {
			t.Errorf("%d of 3 slices: got %+v", slices, status.Conditions)
		}
	}
}

// A GPU whose driver cannot list processes is not given away under a container: the
// kernel knows who has it open.
func TestOrphanOnGPUWithoutProcessList(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", wholeC))
	b.processesErr = gpu.ErrNotSupported
	descriptor := filepath.Join(b.root, "proc/5004711/fd/5") // no process has this ID: the manager leaves its own out
	if err := os.MkdirAll(filepath.Dir(descriptor), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/nvidia1", descriptor); err != nil {
		t.Fatal(err)
	}
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	wantError(t, reconcile(t, m), "is kept, because processes use", "process 5004711")
	if r, err := m.store.Read("u1"); err != nil || r == nil || r.State != record.Prepared {
		t.Errorf("got %+v, %v", r, err)
	}
	if err := os.Remove(descriptor); err != nil {
		t.Fatal(err)
	}
	mustReconcile(t, m)
	b.wantNothing()
}

// A GPU can get another minor while the driver runs, when its kernel module is loaded
// again. The CDI spec is of this moment and not of the last discovery.
func TestMinorOfThisMoment(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.put("proc/driver/nvidia/gpus/"+pciC+"/information", "Device Minor: \t 0\n")
	mustPrepare(t, m, newClaim("u1", wholeC))
	if nodes := b.spec("u1")[0].Nodes; nodes[0].Path != "/dev/nvidia0" {
		t.Errorf("got %+v", nodes)
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}
