// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// listing is what a process sees, and what it may do.
type listing struct {
	GPUs    []string // "UUID index"
	MIG     []string // "UUID index"
	Create  string   // creating an instance on the first GPU
	List    string   // listing its instances
	Compute string   // setting its compute mode
}

// list is a helper: it prints its listing as JSON.
func list(lib nvml.Interface) error {
	var l listing
	count, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("count: %w", ret)
	}
	for i := range count {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			return fmt.Errorf("handle: %w", ret)
		}
		uuid, _ := d.GetUUID()
		index, _ := d.GetIndex()
		l.GPUs = append(l.GPUs, fmt.Sprint(uuid, " ", index))
		most, _ := d.GetMaxMigDeviceCount()
		for j := range most {
			if mig, ret := d.GetMigDeviceHandleByIndex(j); ret == nvml.SUCCESS {
				uuid, _ := mig.GetUUID()
				index, _ := mig.GetIndex()
				l.MIG = append(l.MIG, fmt.Sprint(uuid, " ", index))
			}
		}
		if i == 0 {
			info, _ := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
			_, ret := d.CreateGpuInstance(&info)
			l.Create = ret.Error()
			_, ret = d.GetGpuInstances(&info)
			l.List = ret.Error()
			l.Compute = d.SetComputeMode(nvml.COMPUTEMODE_DEFAULT).Error()
		}
	}
	return json.NewEncoder(os.Stdout).Encode(l)
}

// container makes a root such as a container has: the library, the state
// beside it under a driver version's name, and some device nodes.
func container(t *testing.T, host *root, nodes ...string) string {
	t.Helper()
	r := &root{t: t, dir: t.TempDir()}
	r.mknod(nodes...)
	folder := filepath.Join(r.dir, "usr/lib/x86_64-linux-gnu")
	must.Do(t, os.MkdirAll(folder, 0o755))
	text := must.Get(os.ReadFile(library))(t)
	path := filepath.Join(folder, "libnvidia-ml.so.580.95.05")
	must.Do(t, os.WriteFile(path, text, 0o755))
	must.Do(t, os.Symlink(filepath.Base(path), filepath.Join(folder, "libnvidia-ml.so.1")))
	must.Do(t, os.Link(host.state(), filepath.Join(folder, "libnvidia-gpusim-state.so.580.95.05")))
	return filepath.Join(folder, "libnvidia-ml.so.1")
}

func TestVisibility(t *testing.T) {
	m := machineOf(h100(0), h100(1), h100(2))
	for i := range m.GPUs {
		m.GPUs[i].MIG.Current, m.GPUs[i].MIG.Pending = true, true
	}
	host := newRoot(t, m)
	d := device(t, host.open(), 1)
	for _, at := range []uint32{0, 1} { // GPU instances 7 and 8 of minor 1
		createCompute(t, createAt(t, d, id1g, place(at, 1)), nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE)
	}
	var mig []string
	for i, in := range host.machine().GPUs[1].MIG.Instances {
		mig = append(mig, fmt.Sprint(in.Compute[0].UUID, " ", i))
	}
	capability := func(minor int) string { return fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor) }
	second := 3 + 135*1 + 9*8 // GPU instance 8
	const denied = "Insufficient Permissions"
	uuid := func(n, index int) string { return fmt.Sprint(m.GPUs[n].UUID, " ", index) }

	for name, c := range map[string]struct {
		nodes []string
		want  listing
	}{
		"one GPU": {[]string{"nvidiactl", "nvidia2"},
			listing{GPUs: []string{uuid(2, 0)}, Create: denied, List: denied, Compute: "Not Supported"}},
		"GPU without capabilities": {[]string{"nvidiactl", "nvidia1"},
			listing{GPUs: []string{uuid(1, 0)}, Create: denied, List: denied, Compute: "Not Supported"}},
		"one instance": {[]string{"nvidiactl", "nvidia1", capability(second), capability(second + 1)},
			listing{GPUs: []string{uuid(1, 0)}, MIG: []string{mig[1][:len(mig[1])-1] + "0"}, Create: denied, List: denied, Compute: "Not Supported"}},
		"half of an instance": {[]string{"nvidiactl", "nvidia1", capability(second)},
			listing{GPUs: []string{uuid(1, 0)}, Create: denied, List: denied, Compute: "Not Supported"}},
		"instance of an invisible GPU": {[]string{"nvidiactl", "nvidia0", capability(second), capability(second + 1)},
			listing{GPUs: []string{uuid(0, 0)}, Create: denied, List: denied, Compute: "Not Supported"}},
		"MIG configuration": {[]string{"nvidiactl", "nvidia1", "nvidia2", "nvidia-caps/nvidia-cap1"},
			listing{GPUs: []string{uuid(1, 0), uuid(2, 1)}, MIG: mig, Create: "Success", List: "Success", Compute: "Not Supported"}},
	} {
		t.Run(name, func(t *testing.T) {
			lib := container(t, host, c.nodes...)
			out := must.Get(helper(t, "list", lib, "GPUSIM_STATE=").Output())(t)
			var got listing
			must.Do(t, json.Unmarshal(out, &got))
			expect.Same(t, got, c.want, "seen in the container")
		})
	}
}

// TestPermissions: root without the configuration capability, and others.
func TestPermissions(t *testing.T) {
	r, d := oneH100(t)
	enable(t, d)
	info := profileInfo(t, d, id1g)
	must.Do(t, os.Remove(filepath.Join(r.dir, "dev/nvidia-caps/nvidia-cap1")))
	wants(t, "CreateGpuInstance", code(d.CreateGpuInstance(info)), nvml.ERROR_NO_PERMISSION)
	wants(t, "SetMigMode", code(d.SetMigMode(nvml.DEVICE_MIG_DISABLE)), nvml.ERROR_NO_PERMISSION)
	wants(t, "GetGpuInstancePossiblePlacements", code(d.GetGpuInstancePossiblePlacements(info)), nvml.ERROR_NO_PERMISSION)
	wants(t, "GetGpuInstanceById", code(d.GetGpuInstanceById(7)), nvml.ERROR_NO_PERMISSION)
}

func TestPermissionsOfUsers(t *testing.T) {
	m := machineOf(h100(0), h100(1))
	m.GPUs[0].MIG.Current = true
	r := newRoot(t, m)
	lib := container(t, r, "nvidiactl", "nvidia0", "nvidia-caps/nvidia-cap1")
	cmd := asUser(t, helper(t, "list", lib, "GPUSIM_STATE="), lib)
	out := must.Get(cmd.Output())(t)
	var got listing
	must.Do(t, json.Unmarshal(out, &got))
	const denied = "Insufficient Permissions"
	want := listing{GPUs: []string{m.GPUs[0].UUID + " 0"}, Create: denied, List: denied, Compute: "Not Supported"}
	expect.Same(t, got, want, "seen by a user")
}

// asUser makes a helper run as a user other than root.
func asUser(t *testing.T, cmd *exec.Cmd, lib string) *exec.Cmd {
	t.Helper()
	// A user can neither enter the test's temporary folders nor run the test
	// binary where it is.
	binary := filepath.Join(t.TempDir(), "helper")
	must.Do(t, os.WriteFile(binary, must.Get(os.ReadFile(os.Args[0]))(t), 0o755))
	for _, path := range []string{lib, binary} {
		for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
			must.Do(t, os.Chmod(dir, 0o755))
		}
	}
	cmd.Path = binary
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	return cmd
}

// TestDriverContainer: from the host, the library makes the nodes of the driver and of the
// GPUs, and not that of unified memory. In a container it makes none.
func TestDriverContainer(t *testing.T) {
	m := machineOf(h100(0), h100(1))
	host := t.TempDir()
	err := sysroot.CreateInContainer(host, m, sysroot.Assets{NVML: library, CUDA: library})
	if errors.Is(err, syscall.EPERM) {
		t.Skip(err)
	}
	must.Do(t, err)
	run := func() string {
		t.Helper()
		out, err := helper(t, "list", filepath.Join(sysroot.LibraryDir(host), "libnvidia-ml.so.1"), "GPUSIM_STATE=").Output()
		must.Do(t, err)
		return string(out)
	}
	for _, when := range []string{"first", "again"} {
		var l listing
		if err := json.Unmarshal([]byte(run()), &l); err != nil || len(l.GPUs) != 2 {
			t.Errorf("%s: it sees %v, %v", when, l.GPUs, err)
		}
		entries := must.Get(os.ReadDir(filepath.Join(host, "dev")))(t)
		expect.Equal(t, fmt.Sprint(entries), "[d nvidia-caps/ Dc nvidia0 Dc nvidia1 Dc nvidiactl]", when, "the host")
	}
	r := &root{t: t, dir: host}
	lib := container(t, r)
	if err := helper(t, "list", lib, "GPUSIM_STATE=").Run(); err == nil {
		t.Error("a container without nodes initialises the library")
	}
}
