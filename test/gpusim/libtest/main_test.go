// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// library is the path of the simulated libnvidia-ml.so. A process binds
// go-nvml's calls to the first library that it loads, so all tests of one
// process use this file; the machine behind it differs.
var library string

// helperEnv names the function below that the test binary runs instead of the
// tests, in a process of its own.
const helperEnv = "LIBTEST_HELPER"

var helpers = map[string]func(nvml.Interface) error{
	"churn":  churn,
	"create": createOne,
	"hold":   holdGPU,
	"list":   list,
	"read":   readForever,
	"uuids":  uuids,
}

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	if name := os.Getenv(helperEnv); name != "" {
		lib := nvml.New(nvml.WithLibraryPath(os.Getenv("GPUSIM_LIB")))
		if ret := lib.Init(); ret != nvml.SUCCESS {
			return 1, fmt.Errorf("init: %w", ret)
		}
		return 0, helpers[name](lib)
	}
	dir, err := os.MkdirTemp("", "gpusim-lib")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	if library, err = Build(context.Background(), dir); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// helper makes a command that runs one of the helpers on a library file.
func helper(t testing.TB, name, lib string, env ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), append(env, helperEnv+"="+name, "GPUSIM_LIB="+lib)...)
	cmd.Stderr = os.Stderr
	return cmd
}

// root is a simulated root in a temporary folder.
type root struct {
	t      testing.TB
	dir    string
	opened *state.File
}

// newRoot makes a root with the state of m and the device nodes of its GPUs,
// of the control device and of the MIG configuration capability.
func newRoot(t testing.TB, m *machine.Machine) *root {
	t.Helper()
	r := &root{t: t, dir: t.TempDir()}
	nodes := []string{"nvidiactl", "nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"}
	for _, g := range m.GPUs {
		nodes = append(nodes, fmt.Sprintf("nvidia%d", g.Minor))
	}
	r.mknod(nodes...)
	must.Do(t, os.MkdirAll(filepath.Dir(r.state()), 0o755))
	must.Do(t, state.Create(r.state(), m))
	return r
}

func (r *root) state() string { return filepath.Join(r.dir, state.RelativePath) }

func (r *root) mknod(nodes ...string) {
	r.t.Helper()
	for i, node := range nodes {
		path := filepath.Join(r.dir, "dev", node)
		must.Do(r.t, os.MkdirAll(filepath.Dir(path), 0o755))
		err := syscall.Mknod(path, syscall.S_IFCHR|0o666, 195<<8|i)
		if errors.Is(err, syscall.EPERM) {
			r.t.Skip("making device nodes needs CAP_MKNOD: run the tests as root")
		}
		must.Do(r.t, err, "make", path)
	}
}

// open initialises the library on this root.
func (r *root) open() nvml.Interface {
	r.t.Helper()
	r.t.Setenv("GPUSIM_STATE", r.state())
	lib := nvml.New(nvml.WithLibraryPath(library))
	wants(r.t, "Init", lib.Init(), nvml.SUCCESS)
	r.t.Cleanup(func() { _ = lib.Shutdown() })
	return lib
}

// file is the state as the first user found it.
func (r *root) file() *state.File {
	r.t.Helper()
	if r.opened == nil {
		f := must.Get(state.Open(r.state()))(r.t)
		r.t.Cleanup(f.Close)
		r.opened = f
	}
	return r.opened
}

func (r *root) update(change func(*machine.Machine)) {
	r.t.Helper()
	err := r.file().Update(func(m *machine.Machine) error {
		change(m)
		return nil
	})
	must.Do(r.t, err)
}

func (r *root) machine() *machine.Machine {
	r.t.Helper()
	return must.Get(r.file().Snapshot())(r.t)
}

// capabilities reads the capability files: path below the folder -> contents.
func (r *root) capabilities() map[string]string {
	r.t.Helper()
	dir := filepath.Join(r.dir, "var/lib/gpusim/proc/driver/nvidia/capabilities")
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		files[strings.TrimPrefix(path, dir+"/")] = string(text)
		return err
	})
	must.Do(r.t, err)
	return files
}

// capabilitiesOf is what the files have to be for a machine.
func capabilitiesOf(m *machine.Machine) map[string]string {
	file := func(minor int) string {
		return fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor)
	}
	files := map[string]string{"mig/config": file(1), "mig/monitor": file(2)}
	for _, g := range m.GPUs {
		if g.MIG == nil {
			continue
		}
		for _, in := range g.MIG.Instances {
			minor := 3 + 135*g.Minor + 9*in.ID
			files[fmt.Sprintf("gpu%d/mig/gi%d/access", g.Minor, in.ID)] = file(minor)
			for _, ci := range in.Compute {
				files[fmt.Sprintf("gpu%d/mig/gi%d/ci%d/access", g.Minor, in.ID, ci.ID)] = file(minor + 1 + ci.ID)
			}
		}
	}
	return files
}

func wants(t testing.TB, call string, got, want nvml.Return) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: %v, want %v", call, got, want)
	}
}

// get returns a function that gives the value of a call, and ends its test unless the call succeeded.
func get[T any](value T, ret nvml.Return) func(t testing.TB, call string) T {
	return func(t testing.TB, call string) T {
		t.Helper()
		wants(t, call, ret, nvml.SUCCESS)
		return value
	}
}

// code is what a call returns beside its value.
func code[T any](_ T, ret nvml.Return) nvml.Return { return ret }

func device(t testing.TB, lib nvml.Interface, index int) nvml.Device {
	t.Helper()
	return get(lib.DeviceGetHandleByIndex(index))(t, "DeviceGetHandleByIndex")
}

// profileInfo is the profile with the driver's id, as go-nvml's calls want it.
func profileInfo(t testing.TB, d nvml.Device, id uint32) *nvml.GpuInstanceProfileInfo {
	t.Helper()
	for enum := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := d.GetGpuInstanceProfileInfo(enum)
		if ret == nvml.SUCCESS && info.Id == id {
			return &info
		}
	}
	t.Fatalf("no GPU instance profile %d", id)
	return nil
}

func place(start, size uint32) *nvml.GpuInstancePlacement {
	return &nvml.GpuInstancePlacement{Start: start, Size: size}
}

// createAt creates a GPU instance that has to succeed.
func createAt(t testing.TB, d nvml.Device, id uint32, at *nvml.GpuInstancePlacement) nvml.GpuInstance {
	t.Helper()
	gi, ret := d.CreateGpuInstanceWithPlacement(profileInfo(t, d, id), at)
	wants(t, fmt.Sprintf("create profile %d at %v", id, *at), ret, nvml.SUCCESS)
	return gi
}

// createCompute creates a compute instance by constant that has to succeed.
func createCompute(t testing.TB, gi nvml.GpuInstance, enum int) nvml.ComputeInstance {
	t.Helper()
	info, ret := gi.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	wants(t, "GetComputeInstanceProfileInfo", ret, nvml.SUCCESS)
	return get(gi.CreateComputeInstance(&info))(t, "CreateComputeInstance")
}

// enable switches MIG mode of an H100-like GPU on.
func enable(t testing.TB, d nvml.Device) {
	t.Helper()
	activation := get(d.SetMigMode(nvml.DEVICE_MIG_ENABLE))(t, "SetMigMode")
	wants(t, "activation of MIG mode", activation, nvml.SUCCESS)
}
