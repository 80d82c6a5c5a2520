// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/libtest"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

var update = flag.Bool("update", false, "write the golden files")

// timestamp is what differs between two runs of -q.
var timestamp = regexp.MustCompile(`(?m)^(Timestamp +: |)(?:... ... [ 0-9]\d \d\d:\d\d:\d\d \d{4}).*$`)

// node is a simulated machine whose nvidia-smi is this package, built.
type node struct {
	t    *testing.T
	root string
	uid  uint32 // that nvidia-smi runs as; making a node needs root
}

// newNode makes a machine and changes it before anybody looks.
func newNode(t *testing.T, name string, prepare func(*machine.Machine)) node {
	t.Helper()
	m := must.Get(catalog.Machine(name, catalog.Options{}))(t)
	if prepare != nil {
		prepare(m)
	}
	root := t.TempDir()
	if err := sysroot.Create(root, m, assets(t)); errors.Is(err, unix.EPERM) {
		t.Skip(err)
	} else if err != nil {
		t.Fatal(err)
	}
	return node{t: t, root: root}
}

// smi runs ROOT/usr/bin/nvidia-smi.
func (n node) smi(args ...string) (output string, exit int) {
	n.t.Helper()
	c := exec.Command(filepath.Join(n.root, "usr/bin/nvidia-smi"), args...)
	c.Env = []string{"PATH=/nonexistent"}
	if n.uid != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: n.uid, Gid: n.uid}}
	}
	out, err := c.Output()
	if e := new(exec.ExitError); errors.As(err, &e) {
		exit = e.ExitCode()
	} else if err != nil {
		n.t.Fatal(err)
	}
	return timestamp.ReplaceAllString(string(out), "${1}now"), exit
}

func (n node) golden(name string, exit int, args ...string) {
	n.t.Helper()
	got, code := n.smi(args...)
	expect.Equal(n.t, code, exit, args, "exit code")
	all := outputs(n.t)
	if *update {
		all[name] = got
		var text strings.Builder
		for _, name := range slices.Sorted(maps.Keys(all)) {
			text.WriteString(goldenMark + name + "\n" + all[name])
		}
		must.Do(n.t, os.WriteFile(goldenFile, []byte(text.String()), 0o600))
	}
	if want, found := all[name]; !found || want != got {
		d := cmp.Diff(want, got)
		n.t.Errorf("%v, %s (-update rewrites it): %s", args, name, d)
	}
}

// goldenFile has all outputs, each below a line with goldenMark and its name.
const goldenFile, goldenMark = "testdata/outputs.golden.txt", ">>> "

// outputs are those of the golden file by name.
func outputs(t *testing.T) map[string]string {
	t.Helper()
	data := must.Get(os.ReadFile(goldenFile))(t)
	all, name := map[string]string{}, ""
	for line := range strings.Lines(string(data)) {
		if begins, found := strings.CutPrefix(line, goldenMark); found {
			name = strings.TrimSpace(begins)
			all[name] = ""
			continue
		}
		all[name] += line
	}
	return all
}

// instance is a GPU instance with the compute instance that spans it.
func instanceOf(id int, profile uint32, start, size int, compute uint32, slices int, uuid string) machine.GPUInstance {
	return machine.GPUInstance{ID: id, ProfileID: profile, Placement: machine.Placement{Start: start, Size: size},
		Compute: []machine.ComputeInstance{{ProfileID: compute, Placement: machine.Placement{Size: slices}, UUID: uuid}}}
}

func divided(m *machine.Machine) {
	for i, instances := range map[int][]machine.GPUInstance{
		1: {
			instanceOf(9, 19, 2, 1, 0, 1, "MIG-00000000-0000-5000-8000-000000000009"),
			instanceOf(3, 15, 0, 2, 7, 1, "MIG-00000000-0000-5000-8000-000000000003"),
			instanceOf(2, 9, 4, 4, 2, 3, "MIG-00000000-0000-5000-8000-000000000002"),
		},
		5: {
			instanceOf(5, 65, 6, 3, 0, 1, "MIG-00000000-0000-5000-8000-000000000015"),
			instanceOf(1, 66, 0, 6, 1, 2, "MIG-00000000-0000-5000-8000-000000000011"),
		},
	} {
		g := m.GPUs[i].MIG
		g.Current, g.Pending, g.Instances = true, true, instances
	}
	m.Processes = []machine.Process{
		{PID: 4711, Name: "python3", GPU: 1, InstanceID: 9, MemoryBytes: 512 << 20},
		{PID: 4712, Name: "python3", GPU: 3, InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30},
	}
}

func TestOutput(t *testing.T) {
	n := newNode(t, "mixed", divided)
	for _, table := range []string{"-lgip", "-lgi", "-lci", ""} {
		args := []string{"mig", table}
		if table == "" {
			args = nil
		}
		out, _ := n.smi(args...)
		out = strings.ReplaceAll(out, "\n\n", "\n")
		_, out, _ = strings.Cut(out, "+")
		out = "+" + out
		lines := strings.Split(strings.TrimSpace(out), "\n")
		for _, l := range lines {
			expect.Equal(t, len(l), len(lines[0]), table, "characters", l)
		}
	}
	n.golden("L.txt", 0, "-L")
	n.golden("q.txt", 0, "-q")
	n.golden("lgip.txt", 0, "mig", "-lgip")
	n.golden("lgipp.txt", 0, "mig", "-lgipp")
	n.golden("lgi.txt", 0, "mig", "-lgi")
	n.golden("lci.txt", 0, "mig", "-lci")
	n.golden("policy.txt", 0, "compute-policy", "-l")
	n.golden("not-capable.txt", exitNotFound, "mig", "-lgip", "-i", "3")
	n.golden("not-enabled.txt", exitNotFound, "mig", "-lgi", "-i", "0")
	n.golden("summary.txt", 0)
	n.golden("query-gpu.txt", 0, "--query-gpu=index,name,gpu_uuid,pci.bus_id,memory.total,memory.used,memory.free,compute_mode,mig.mode.current,persistence_mode,compute_cap", "--format=csv")
	n.golden("query-gpu-plain.txt", 0, "-i", "1,3", "--query-gpu", "memory.reserved, ecc.mode.current,mig.mode.pending,driver_version,count", "--format=csv,noheader,nounits")
	n.golden("query-compute-apps.txt", 0, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv")
	n.golden("query-unknown.txt", exitUsage, "--query-gpu=index,colour", "--format=csv")
	n.golden("none.txt", exitNotFound, "-L", "-i", "GPU-nobody")
	n.golden("version.txt", 0, "--version")
	n.golden("usage.txt", exitUsage, "--fly")
}

// TestTopologyMatrix: GPUs of DGX H100 are equally near, those of pairs are not.
func TestTopologyMatrix(t *testing.T) {
	newNode(t, "dgx-h100", nil).golden("topo-dgx-h100.txt", 0, "topo", "-m")
	newNode(t, "h100-nvl-pairs", nil).golden("topo-h100-nvl-pairs.txt", 0, "topo", "-m")
	newNode(t, "l4x4", nil).golden("topo-l4x4.txt", 0, "topo", "-m", "-i", "0,1,3")
}

// These were published by users of the boards, and are the same here.
func TestPublishedTables(t *testing.T) {
	for _, board := range []string{"a30", "h100-80-sxm", "rtx-pro-6000"} {
		n := newNode(t, board+"x1", func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true })
		n.golden("lgip-"+board+".txt", 0, "mig", "-lgip")
		n.golden("lgipp-"+board+".txt", 0, "mig", "-lgipp")
		n.golden("lgi-"+board+".txt", exitNotFound, "mig", "-lgi")
	}
}

func TestSelection(t *testing.T) {
	n := newNode(t, "dgx-a100", nil)
	all, _ := n.smi("-L")
	lines := regexp.MustCompile(`(?m)^GPU 3: .*\(UUID: (.*)\)\n`).FindStringSubmatch(all)
	if lines == nil {
		t.Fatal(all)
	}
	for _, id := range []string{"3", lines[1], "00000000:4E:00.0", "0000:4e:00.0"} {
		if got, exit := n.smi("-L", "-i", id); got != lines[0] || exit != 0 {
			t.Errorf("-i %s: %d, %s", id, exit, got)
		}
	}
}

func (n node) machine() *machine.Machine {
	n.t.Helper()
	return must.Get(sysroot.Load(n.root))(n.t)
}

func TestSetting(t *testing.T) {
	n := newNode(t, "mixed", nil)
	uuid := n.machine().GPUs[1].UUID
	n.golden("set-timeslice.txt", 0, "compute-policy", "-i", uuid, "--set-timeslice", "3")
	n.golden("set-compute-mode.txt", 0, "-i", uuid, "-c", "EXCLUSIVE_PROCESS")
	if g := n.machine().GPUs[1]; g.TimeSlice != 3 || g.ComputeMode != 3 {
		t.Errorf("H100: time slice %d, compute mode %d", g.TimeSlice, g.ComputeMode)
	}
	n.golden("set-mig.txt", 0, "-i", "0,1", "-mig", "1")
	n.golden("set-nonsense.txt", exitUsage, "compute-policy", "--set-timeslice", "9")
	m := n.machine()
	if g := m.GPUs[1]; !g.MIG.Current {
		t.Errorf("H100: %+v", g)
	}
	if g := m.GPUs[0]; g.TimeSlice != 0 || g.ComputeMode != 0 || g.MIG.Current || !g.MIG.Pending {
		t.Errorf("A100: %+v", g)
	}
}

// A container sees the GPUs and instances whose nodes it has.
func TestContainer(t *testing.T) {
	n := newNode(t, "mixed", divided)
	dev := filepath.Join(n.root, "dev")
	nodes := must.Get(filepath.Glob(dev + "/nvidia[0-9]"))(t)
	for _, path := range append(nodes, dev+"/nvidia-caps/nvidia-cap1", dev+"/nvidia-caps/nvidia-cap2") {
		must.Do(t, os.Remove(path))
	}
	n.golden("container-nothing.txt", exitNotFound, "-L")
	// The H100 is minor 0; its GPU instance 9 has capability 3 + 9 x 9.
	for path, minor := range map[string]uint32{"nvidia0": 0, "nvidia-caps/nvidia-cap84": 84, "nvidia-caps/nvidia-cap85": 85} {
		major := uint32(195)
		if minor > 0 {
			major = 508
		}
		must.Do(t, unix.Mknod(filepath.Join(dev, path), unix.S_IFCHR|0o444, int(unix.Mkdev(major, minor))))
	}
	n.golden("container-one.txt", 0, "-L")
}

// Without the library the tool says so, and ends as the real one does.
func TestNoLibrary(t *testing.T) {
	n := newNode(t, "t4x1", nil)
	must.Do(t, os.RemoveAll(sysroot.LibraryDir(n.root)))
	n.golden("no-library.txt", exitNoLibrary, "-L")
}

// A lost GPU ends the tool with the code for it, others do not.
func TestLost(t *testing.T) {
	n := newNode(t, "h100x2", func(m *machine.Machine) { m.GPUs[1].Failure = 15 })
	n.golden("lost.txt", exitLost, "-q")
	must.Do(t, sysroot.Reboot(n.root, sysroot.RebootOptions{Renumber: true}))
	if out, exit := n.smi("-q"); exit != 0 {
		t.Errorf("after a reboot: exit code %d, %s", exit, out)
	}
}

// A library whose state is gone is a driver that is not loaded.
func TestNoDriver(t *testing.T) {
	n := newNode(t, "t4x1", nil)
	links, err := filepath.Glob(filepath.Join(sysroot.LibraryDir(n.root), "libnvidia-gpusim-state.so.*"))
	if err != nil || len(links) != 1 {
		t.Fatal(links, err)
	}
	must.Do(t, errors.Join(os.Remove(links[0]), os.Remove(sysroot.StatePath(n.root))))
	n.golden("no-driver.txt", exitNoDriver, "-L")
}

// Without privileges everything can be read and nothing set.
func TestNotRoot(t *testing.T) {
	n := newNode(t, "h100x1", nil)
	n.uid = 65534
	if err := os.Chmod(filepath.Dir(n.root), 0o755); err != nil { // the test's folder is private
		t.Fatal(err)
	}
	n.golden("denied-compute-mode.txt", exitPermission, "-c", "3")
	n.golden("denied-mig.txt", exitPermission, "-mig", "1")
	n.golden("denied-timeslice.txt", exitPermission, "compute-policy", "--set-timeslice", "1")
	if out, exit := n.smi("-L"); exit != 0 {
		t.Errorf("-L: exit code %d, %s", exit, out)
	}
	if out, exit := n.smi("compute-policy", "-l"); exit != 0 {
		t.Errorf("compute-policy -l: exit code %d, %s", exit, out)
	}
}

func TestStateIsFoundInContainers(t *testing.T) {
	n := newNode(t, "t4x1", nil)
	must.Do(t, os.RemoveAll(filepath.Join(n.root, "var")))
	n.golden("policy-container.txt", 0, "compute-policy", "-l")
	if _, err := state.Open(sysroot.StatePath(n.root)); err == nil {
		t.Error("the state is still at its place, so the test shows nothing")
	}
}

var built libtest.Node

func TestMain(m *testing.M) {
	code := m.Run()
	built.Remove()
	os.Exit(code)
}

// assets builds the simulated library, this program and those of MPS.
func assets(t *testing.T) sysroot.Assets {
	t.Helper()
	dir := built.Dir(t, ".", "../nvidia-cuda-mps-control", "../nvidia-cuda-mps-server")
	return must.Get(sysroot.AssetsIn(dir))(t)
}
