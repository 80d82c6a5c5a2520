// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sysroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func machineOf(t *testing.T, name string) *machine.Machine {
	t.Helper()
	return must.Get(catalog.Machine(name, catalog.Options{}))(t)
}

// fakeAssets are files with the right names; nothing here runs them.
func fakeAssets(t *testing.T) Assets {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{
		"lib/libnvidia-ml.so", "lib/libcuda.so", "bin/nvidia-smi", "bin/nvidia-cuda-mps-control", "bin/nvidia-cuda-mps-server",
	} {
		path := filepath.Join(dir, name)
		must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Do(t, os.WriteFile(path, []byte(name), 0o600))
	}
	return must.Get(AssetsIn(dir))(t)
}

// create makes a root, or skips the test where device nodes cannot be made.
func create(t *testing.T, root string, m *machine.Machine, a Assets) {
	t.Helper()
	err := Create(root, m, a)
	if errors.Is(err, unix.EPERM) {
		expect.Contains(t, err.Error(), "CAP_MKNOD", "the error must say what is missing", err)
		t.Skipf("not permitted to make device nodes: %v", err)
	}
	must.Do(t, err)
}

// files lists everything that is not a folder, relative to the root.
func files(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, strings.TrimPrefix(path, root+"/"))
		}
		return err
	})
	must.Do(t, err)
	sort.Strings(out)
	return out
}

func read(t *testing.T, path ...string) string {
	t.Helper()
	data := must.Get(os.ReadFile(filepath.Join(path...)))(t)
	return string(data)
}

func TestDeviceNodes(t *testing.T) {
	root := t.TempDir()
	m := machineOf(t, "mixed")
	create(t, root, m, fakeAssets(t))
	want := map[string]string{
		"nvidiactl": "195:255", "nvidia-modeset": "195:254", "nvidia-uvm": "510:0", "nvidia-uvm-tools": "510:1",
		"nvidia-caps/nvidia-cap1": "508:1", "nvidia-caps/nvidia-cap2": "508:2",
		"nvidia0": "195:0", "nvidia1": "195:1", "nvidia2": "195:2", "nvidia3": "195:3", "nvidia4": "195:4", "nvidia5": "195:5",
	}
	expect.Same(t, nodesOf(t, root), want)
}

// TestDriverContainer: a driver container has the nodes of the driver to itself.
func TestDriverContainer(t *testing.T) {
	root := t.TempDir()
	m, assets := machineOf(t, "t4x1"), fakeAssets(t)
	create(t, root, m, assets)
	must.Do(t, CreateInContainer(root, m, assets))
	inContainer := map[string]string{
		"nvidiactl": "195:255", "nvidia-modeset": "195:254", "nvidia-uvm": "510:0", "nvidia-uvm-tools": "510:1", "nvidia0": "195:0",
	}
	onHost := map[string]string{"nvidia-caps/nvidia-cap1": "508:1", "nvidia-caps/nvidia-cap2": "508:2"}
	check := func(when string) {
		t.Helper()
		expect.Same(t, nodesOf(t, DriverRoot(root)), inContainer, when, "nodes of the container")
		expect.Same(t, nodesOf(t, root), onHost, when, "nodes of the host")
	}
	check("made")
	if want := filepath.Join(root, "run/nvidia/driver"); DriverRoot(root) != want || !strings.HasPrefix(LibraryDir(root), want+"/usr/lib/") {
		t.Errorf("the driver is in %s, its libraries in %s", DriverRoot(root), LibraryDir(root))
	}
	expect.Is(t, expect.Err(os.Stat(filepath.Join(root, "usr"))), fs.ErrNotExist, "the host has a driver, too")
	expect.Equal(t, read(t, DriverRoot(root), home, "state"), read(t, StatePath(root)), "the container has another state")
	must.Do(t, Renew(root, assets))
	check("made again")
	must.Do(t, Reboot(root, RebootOptions{Renumber: true}))
	n := firstMajors.next()
	inContainer["nvidia-uvm"], inContainer["nvidia-uvm-tools"] = fmt.Sprint(n.uvm, ":0"), fmt.Sprint(n.uvm, ":1")
	for i := 1; i <= 2; i++ {
		onHost[fmt.Sprint("nvidia-caps/nvidia-cap", i)] = fmt.Sprint(n.caps, ":", i)
	}
	check("rebooted")
	create(t, root, m, assets)
	expect.Equal(t, DriverRoot(root), root, "the container is left of the earlier machine")
}

func TestProc(t *testing.T) {
	root := t.TempDir()
	m := machineOf(t, "dgx-a100")
	create(t, root, m, fakeAssets(t))
	expect.Equal(t, read(t, root, "proc/sys/kernel/random/boot_id"), m.BootID+"\n", "boot id")
	minors := strings.Split(strings.TrimSpace(read(t, root, "proc/driver/nvidia-caps/mig-minors")), "\n")
	if len(minors) != 4322 || minors[0] != "config 1" || minors[2] != "gpu0/gi0/access 3" || minors[3] != "gpu0/gi0/ci0/access 4" ||
		minors[4321] != "gpu31/gi14/ci7/access 4322" {
		t.Errorf("mig-minors has %d lines, from %q to %q", len(minors), minors[0], minors[len(minors)-1])
	}
	info := read(t, root, "proc/driver/nvidia/gpus/0000:07:00.0/information")
	for _, want := range []string{"NVIDIA A100-SXM4-80GB", m.GPUs[0].UUID, "Device Minor: \t 2"} {
		expect.Contains(t, info, want, "information has no")
	}
	expect.Contains(t, read(t, root, "proc/driver/nvidia/version"), "  580.95.05  ", "version")
	expect.Contains(t, read(t, root, "proc/devices"), "\n508 nvidia-caps\n", "devices")
}

// Files of instances that exist before anybody has opened the state.
func TestCapabilities(t *testing.T) {
	root := t.TempDir()
	m := machineOf(t, "mixed")
	h100 := &m.GPUs[1]
	h100.Minor = 3
	m.GPUs[3].Minor = 0
	h100.MIG.Current, h100.MIG.Pending = true, true
	h100.MIG.Instances = []machine.GPUInstance{{ID: 9, ProfileID: 19, Placement: machine.Placement{Start: 2, Size: 1},
		Compute: []machine.ComputeInstance{{ID: 0, Placement: machine.Placement{Size: 1}, UUID: "MIG-x"}}}}
	create(t, root, m, fakeAssets(t))
	for file, want := range map[string]string{"gi9/access": "DeviceFileMinor: 489", "gi9/ci0/access": "DeviceFileMinor: 490"} {
		if got := read(t, root, "proc/driver/nvidia/capabilities/gpu3/mig", file); !strings.HasPrefix(got, want+"\n") {
			t.Errorf("%s: %q, want %s", file, got, want)
		}
	}
}

// The values come back through the helpers that drivers use.
func TestSysIsWhatUpstreamReads(t *testing.T) {
	for _, name := range []string{"dgx-a100", "dgx-h100", "gb200-node", "l4x3"} {
		root := t.TempDir()
		m := machineOf(t, name)
		create(t, root, m, fakeAssets(t))
		sys := deviceattribute.WithFSFromRoot(filepath.Join(root, "sys"))
		for _, g := range m.GPUs {
			pcie := must.Get(deviceattribute.GetPCIeRootAttributeByPCIBusID(g.PCIAddress, sys))(t)
			numa, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(g.PCIAddress, deviceattribute.ScalarAttribute, sys)
			must.Do(t, err)
			node := int64(g.NUMANode)
			want := []resourceapi.DeviceAttribute{{StringValue: &g.PCIeRoot}, {IntValue: &node}}
			expect.Same(t, []resourceapi.DeviceAttribute{pcie.Value, numa.Value}, want, name, g.PCIAddress)
		}
	}
	root := t.TempDir()
	create(t, root, machineOf(t, "dgx-a100"), fakeAssets(t))
	numa, err := deviceattribute.GetNUMANodeAttributeByPCIBusID("0000:07:00.0", deviceattribute.ListAttribute,
		deviceattribute.WithFSFromRoot(filepath.Join(root, "sys")))
	must.Do(t, err)
	expect.Same(t, numa.Value.IntValues, []int64{3, 0, 1, 2}, "near NUMA nodes of one on the first socket")
}

// Devices behind one PCIe switch have its upstream port in their paths, and bridges of their own below it.
func TestPCIeSwitches(t *testing.T) {
	cases := 0
	for _, name := range []string{"dgx-a100", "dgx-h100", "gb200-node", "h100-nvl-pairs"} {
		root := t.TempDir()
		m := machineOf(t, name)
		create(t, root, m, fakeAssets(t))
		bridges := map[string]string{}
		for _, e := range endpoints(m) {
			target := must.Get(os.Readlink(filepath.Join(root, "sys/bus/pci/devices", e.address)))(t)
			_, path, _ := strings.Cut(target, "devices/")
			above := strings.Split(path, "/")
			want := []string{e.root, above[1], e.address}
			if e.upstream != "" {
				want = []string{e.root, above[1], e.upstream, above[len(above)-2], e.address}
			}
			expect.Same(t, above, want, name)
			bridge := above[len(above)-2]
			expect.Equal(t, bridges[bridge], "", name, e.address, "are behind one bridge")
			bridges[bridge] = e.address
			if got := read(t, filepath.Join(root, "sys/bus/pci/devices", e.address, "vendor")); got != map[bool]string{true: "0x10de\n", false: "0x15b3\n"}[e.class == "0x030200"] {
				t.Errorf("%s: vendor %s of %s", name, got, e.address)
			}
			cases++
		}
	}
	expect.Equal(t, cases, 16+16+8+10, "devices")
}

func TestLibraries(t *testing.T) {
	root := t.TempDir()
	create(t, root, machineOf(t, "t4x1"), fakeAssets(t))
	dir := LibraryDir(root)
	got := files(t, dir)
	want := []string{
		"libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05",
		"libnvidia-gpusim-state.so.580.95.05",
		"libnvidia-ml.so", "libnvidia-ml.so.1", "libnvidia-ml.so.580.95.05",
	}
	expect.Same(t, got, want)
	expect.Equal(t, read(t, dir, "libnvidia-ml.so"), "lib/libnvidia-ml.so", "libnvidia-ml.so leads to")
	sameState(t, root)
}

func TestPrograms(t *testing.T) {
	root := t.TempDir()
	a := fakeAssets(t)
	create(t, root, machineOf(t, "t4x1"), a)
	for _, name := range []string{"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"} {
		expect.Equal(t, read(t, root, "usr/bin", name), "bin/"+name, name, "is a copy")
	}
	a.MPSControl, a.MPSServer = "", ""
	create(t, root, machineOf(t, "t4x1"), a)
	expect.Same(t, files(t, filepath.Join(root, "usr/bin")), []string{"nvidia-smi"}, "without the stand-ins of MPS")
}

// sameState checks that the state and its name among the libraries are one file.
func sameState(t *testing.T, root string) {
	t.Helper()
	a := must.Get(os.Stat(StatePath(root)))(t)
	links, err := filepath.Glob(filepath.Join(LibraryDir(root), "libnvidia-gpusim-state.so.*"))
	if err != nil || len(links) != 1 {
		t.Fatalf("%v, %v", links, err)
	}
	b, err := os.Stat(links[0])
	if err != nil || !os.SameFile(a, b) {
		t.Errorf("the state's link is another file (%v)", err)
	}
}

// A second Create leaves exactly what the first on a new folder makes.
func TestCreateAgain(t *testing.T) {
	assets := fakeAssets(t)
	small := machineOf(t, "t4x1")
	small.DriverVersion = "570.1.2"
	fresh, used := t.TempDir(), t.TempDir()
	create(t, fresh, small, assets)
	create(t, used, machineOf(t, "dgx-a100"), assets)
	create(t, used, machineOf(t, "dgx-a100"), assets)
	create(t, used, small, assets)
	expect.Same(t, files(t, used), files(t, fresh))
	sameState(t, used)
	must.Do(t, Remove(used))
	expect.Is(t, expect.Err(os.Stat(used)), fs.ErrNotExist, "still there")
	expect.Do(t, Remove(used), "removing nothing")
}

func TestRefusals(t *testing.T) {
	foreign := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(foreign, "precious"), nil, 0o600))
	for name, err := range map[string]error{
		"create in a used folder": Create(foreign, machineOf(t, "t4x1"), fakeAssets(t)),
		"remove a used folder":    Remove(foreign),
		"create in /":             Create("/", machineOf(t, "t4x1"), fakeAssets(t)),
		"remove /":                Remove("/"),
	} {
		expect.Says(t, err, "not the root of a simulated machine", name)
	}
	expect.Do(t, expect.Err(os.Stat(filepath.Join(foreign, "precious"))))
	expect.Says(t, expect.Err(AssetsIn(foreign)), "libnvidia-ml.so", "missing assets")
}
