// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// busy is the mixed machine with everything that a reboot ends.
func busy(t *testing.T) *machine.Machine {
	m := machineOf(t, "mixed")
	a100, h100 := &m.GPUs[0], &m.GPUs[1]
	a100.MIG.Pending = true // asked for, waiting for a reset
	a100.Failure = 16
	h100.MIG.Current, h100.MIG.Pending = true, true
	h100.ComputeMode, h100.TimeSlice, h100.Persistence = 3, 2, true
	h100.Failure = 15
	h100.MIG.Instances = []machine.GPUInstance{{ID: 7, ProfileID: 19, Placement: machine.Placement{Start: 0, Size: 1},
		Compute: []machine.ComputeInstance{{ID: 0, Placement: machine.Placement{Size: 1}, UUID: "MIG-x"}}}}
	m.GPUs[2].Failure = 999
	m.Processes = []machine.Process{{PID: 4711, GPU: 1, InstanceID: 7, ComputeID: 0}}
	m.Faults = []machine.Fault{{ID: 3, Function: "nvmlGpuInstanceDestroy", GPU: -1, Code: 19}}
	m.Latencies = []machine.Latency{{Function: "nvmlInit_v2", Base: 1000}}
	return m
}

func TestReboot(t *testing.T) {
	root := t.TempDir()
	m := busy(t)
	create(t, root, m, fakeAssets(t))
	must.Do(t, Reboot(root, RebootOptions{}))
	got := must.Get(Load(root))(t)
	if got.BootID == m.BootID || read(t, root, "proc/sys/kernel/random/boot_id") != got.BootID+"\n" {
		t.Errorf("boot id %s, before %s", got.BootID, m.BootID)
	}
	if g := got.GPUs[0]; !g.MIG.Current || !g.MIG.Pending {
		t.Error("on the A100 the pending MIG mode must be on now")
	}
	if g := got.GPUs[1]; g.MIG.Current || g.MIG.Pending || len(g.MIG.Instances) != 0 || g.ComputeMode != 0 || g.TimeSlice != 0 || g.Persistence {
		t.Errorf("the H100 must be as new: %+v", g)
	}
	expect.Equal(t, len(got.Processes), 0, "processes are left", got.Processes)
	if left, _ := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/capabilities/gpu*/mig/gi*")); len(left) != 0 {
		t.Errorf("capability files are left: %v", left)
	}
	failures := []int{got.GPUs[0].Failure, got.GPUs[1].Failure, got.GPUs[2].Failure}
	expect.Same(t, failures, []int{0, 0, 999}, "failures after the reboot")
	expect.Same(t, []any{got.Faults, got.Latencies}, []any{m.Faults, m.Latencies}, "faults and latencies")
	expect.Same(t, numbersOf(t, got), numbersOf(t, m), "a plain reboot renumbers nothing")
	sameState(t, root)
	expect.Fails(t, Reboot(t.TempDir(), RebootOptions{}), "rebooting an empty folder must fail")
}

// numbersOf are the minors by UUID and PCI address.
func numbersOf(t *testing.T, m *machine.Machine) map[string]int {
	t.Helper()
	n := map[string]int{}
	for _, g := range m.GPUs {
		n[g.UUID+" "+g.PCIAddress] = g.Minor
	}
	if len(n) != len(m.GPUs) {
		t.Fatalf("GPUs are mixed up: %v", n)
	}
	return n
}

// Renumbering changes every number each time, and everything that shows numbers
// agrees on them.
func TestRenumber(t *testing.T) {
	root := t.TempDir()
	create(t, root, busy(t), fakeAssets(t))
	before := must.Get(Load(root))(t)
	open := must.Get(state.Open(StatePath(root)))(t)
	defer open.Close()
	stale := filepath.Join(root, "dev/nvidia-caps/nvidia-cap489")
	must.Do(t, unix.Mknod(stale, unix.S_IFCHR|0o444, int(unix.Mkdev(uint32(firstMajors.caps), 489))))
	old := firstMajors
	for range 70 { // more often than there are majors
		must.Do(t, Reboot(root, RebootOptions{Renumber: true}))
		after := must.Get(open.Snapshot())(t) // what was opened before is still the machine
		was, is := numbersOf(t, before), numbersOf(t, after)
		for gpu, minor := range was {
			if is[gpu] == minor {
				t.Fatalf("%s keeps minor %d", gpu, minor)
			}
		}
		if d := cmp.Diff(slices.Sorted(maps.Values(was)), slices.Sorted(maps.Values(is))); d != "" {
			t.Fatalf("the minors are other ones: %s", d)
		}
		n := must.Get(majorsOf(root))(t)
		if n.caps == old.caps || n.uvm == old.uvm || n.caps == n.uvm || min(n.caps, n.uvm) < lowestMajor || max(n.caps, n.uvm) > highestMajor {
			t.Fatalf("majors %+v after %+v", n, old)
		}
		agree(t, root, after, n)
		before, old = after, n
	}
	sameState(t, root)
}

// agree fails unless all files of a root show the numbers of the machine.
func agree(t *testing.T, root string, m *machine.Machine, n majors) {
	t.Helper()
	if got := read(t, root, "proc/sys/kernel/random/boot_id"); got != m.BootID+"\n" {
		t.Fatalf("boot id %q, want %s", got, m.BootID)
	}
	want := map[string]string{
		"nvidiactl": "195:255", "nvidia-modeset": "195:254",
		"nvidia-uvm": fmt.Sprintf("%d:0", n.uvm), "nvidia-uvm-tools": fmt.Sprintf("%d:1", n.uvm),
		"nvidia-caps/nvidia-cap1": fmt.Sprintf("%d:1", n.caps), "nvidia-caps/nvidia-cap2": fmt.Sprintf("%d:2", n.caps),
	}
	for _, g := range m.GPUs {
		want[fmt.Sprintf("nvidia%d", g.Minor)] = fmt.Sprintf("195:%d", g.Minor)
		info := read(t, root, "proc/driver/nvidia/gpus", g.PCIAddress, "information")
		for _, line := range []string{g.UUID, fmt.Sprintf("Device Minor: \t %d", g.Minor)} {
			if !strings.Contains(info, line+"\n") {
				t.Fatalf("information has no %q:\n%s", line, info)
			}
		}
		if minor, err := (host.Roots{Proc: filepath.Join(root, "proc")}).GPUMinor(g.PCIAddress); err != nil || minor != g.Minor {
			t.Fatalf("the driver reads minor %d (%v), want %d", minor, err, g.Minor)
		}
	}
	if d := cmp.Diff(want, nodesOf(t, root)); d != "" {
		t.Fatal(d)
	}
	for i := range m.GPUs {
		path := filepath.Join(root, fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig", m.GPUs[i].Minor))
		if found, _ := filepath.Glob(path); len(found) > 0 && m.GPUs[i].MIG == nil {
			t.Fatalf("GPU %d with minor %d cannot be partitioned and has %v", i, m.GPUs[i].Minor, found)
		}
	}
}

// nodesOf are the device nodes of a root with their numbers.
func nodesOf(t *testing.T, root string) map[string]string {
	t.Helper()
	got := map[string]string{}
	for _, name := range files(t, filepath.Join(root, "dev")) {
		var st unix.Stat_t
		must.Do(t, unix.Lstat(filepath.Join(root, "dev", name), &st))
		expect.Equal(t, st.Mode&unix.S_IFMT, unix.S_IFCHR, name, "is no character device")
		got[name] = fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	return got
}

// Instances that are made after a renumbering reboot have their capabilities
// under the new minor, also in files that are rewritten.
func TestRenewKeepsNumbers(t *testing.T) {
	root := t.TempDir()
	assets := fakeAssets(t)
	create(t, root, busy(t), assets)
	must.Do(t, Reboot(root, RebootOptions{Renumber: true}))
	f, err := state.Open(StatePath(root))
	must.Do(t, err)
	defer f.Close()
	err = f.Update(func(m *machine.Machine) error {
		h100 := &m.GPUs[1]
		h100.MIG.Current, h100.MIG.Pending = true, true
		h100.MIG.Instances = []machine.GPUInstance{{ID: 9, ProfileID: 19, Placement: machine.Placement{Start: 2, Size: 1}}}
		return nil
	})
	must.Do(t, err)
	must.Do(t, Renew(root, assets))
	m := must.Get(Load(root))(t)
	agree(t, root, m, firstMajors.next())
	minor := m.GPUs[1].Minor
	access := read(t, root, fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi9/access", minor))
	if want := fmt.Sprintf("DeviceFileMinor: %d\n", instanceMinor(minor, 9)); !strings.HasPrefix(access, want) {
		t.Errorf("%q, want %q", access, want)
	}
}

func TestRenumberOneGPU(t *testing.T) {
	root := t.TempDir()
	create(t, root, machineOf(t, "t4x1"), fakeAssets(t))
	must.Do(t, Reboot(root, RebootOptions{Renumber: true}))
	m := must.Get(Load(root))(t)
	expect.Equal(t, m.GPUs[0].Minor, 0, "the only GPU has minor")
	agree(t, root, m, firstMajors.next())
}
