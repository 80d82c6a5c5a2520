// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

const (
	address = "0000:1b:00.0"
	share   = "gpu-0000-1b-00-0-mps-5f0c"
	hookAt  = "/data/hooks/partage-hook-12ab"
)

// machine returns the roots of a host with one GPU, which has the minor 3, and in it
// the GPU instance 7 with the compute instance 0. The node has the number of
// /dev/null.
func machine(t *testing.T) host.Roots {
	t.Helper()
	root := t.TempDir()
	for path, content := range map[string]string{
		"proc/devices": "Character devices:\n  1 mem\n508 nvidia-caps\n",
		"proc/driver/nvidia/gpus/" + address + "/information":     "Model: \t H100\nDevice Minor: \t 3\n",
		"proc/driver/nvidia/capabilities/mig/monitor":             "DeviceFileMinor: 2\nDeviceFileMode: 292\n",
		"proc/driver/nvidia/capabilities/gpu3/mig/gi7/access":     "DeviceFileMinor: 471\nDeviceFileMode: 292\n",
		"proc/driver/nvidia/capabilities/gpu3/mig/gi7/ci0/access": "DeviceFileMinor: 472\n",
		"proc/driver/nvidia/capabilities/gpu3/mig/gi8/access":     "DeviceFileMinor: 480\n",
		"proc/driver/nvidia/gpus/0000:43:00.0/information":        "Device Minor: \t 4\n",
	} {
		write(t, filepath.Join(root, path), content)
	}
	must.Do(t, os.MkdirAll(filepath.Join(root, "dev"), 0o755))
	must.Do(t, os.Symlink("/dev/null", filepath.Join(root, "dev/nvidia3")))
	return host.Roots{Dev: root, Proc: filepath.Join(root, "proc"), HostDev: "/host"}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must.Do(t, os.WriteFile(path, []byte(content), 0o644))
}

func TestEdits(t *testing.T) {
	roots := machine(t)
	gpu := cdi.Node{Path: "/dev/nvidia3", HostPath: "/host/dev/nvidia3", Major: 1, Minor: 3}
	client := MPSClient{Session: "gpu-0000-1b-00-0", PipeDir: "/mps/a/pipe", ShmDir: "/mps/a/shm", Hook: hookAt, Owner: "u1/" + share}
	clientMounts := []cdi.Mount{
		{HostPath: "/mps/a/pipe", ContainerPath: "/tmp/nvidia-mps", ReadOnly: true, NoExec: true},
		{HostPath: "/mps/a/shm", ContainerPath: "/dev/shm", NoExec: true, NoFollow: true},
	}
	clientHooks := []cdi.Hook{{Path: hookAt, Args: []string{
		"partage-hook-12ab", "mps-client", "--control", "/mps/a/pipe/control", "--session", "gpu-0000-1b-00-0",
	}}}
	limitedClient := client
	limitedClient.ActiveThreadPercentage, limitedClient.PinnedMemoryBytes = 30, 10<<30
	aloneClient := client
	aloneClient.ShmDir = ""
	lowClient := client
	lowClient.BelowNormal = true
	interposer := Interposer{Library: "/opt/limits/libhami-2.so", Folder: "/limits/u1", Device: "gpu-b", Hook: hookAt, Owner: "u1/r0"}
	limited := interposer
	limited.MemoryBytes, limited.SMPercent = 6<<30, 25
	interposerMounts := []cdi.Mount{
		{HostPath: "/opt/limits/libhami-2.so", ContainerPath: "/usr/local/vgpu/libvgpu.so", ReadOnly: true},
		{HostPath: "/limits/u1/ld.so.preload", ContainerPath: "/etc/ld.so.preload", ReadOnly: true},
		{HostPath: "/limits/u1/caches/gpu-b", ContainerPath: "/usr/local/vgpu/caches/gpu-b", NoExec: true},
		{HostPath: "/limits/u1/locks", ContainerPath: "/tmp/vgpulock", NoExec: true},
	}
	interposerHooks := []cdi.Hook{{Path: hookAt, Args: []string{"partage-hook-12ab", "software-limits"}}}
	const cache = "CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/caches/gpu-b/usage.cache"
	for name, test := range map[string]struct {
		edit Edit
		want cdi.Edits
	}{
		"GPU": {GPU{roots, address}, cdi.Edits{Nodes: []cdi.Node{gpu}}},
		"monitor": {Monitor{roots}, cdi.Edits{Nodes: []cdi.Node{
			{Path: "/dev/nvidia-caps/nvidia-cap2", HostPath: "/host/dev/nvidia-caps/nvidia-cap2", Major: 508, Minor: 2},
		}}},
		"monitor without MIG": {Monitor{host.Roots{Proc: t.TempDir()}}, cdi.Edits{}},
		"partition": {Partition{roots, address, 7, 0}, cdi.Edits{Nodes: []cdi.Node{
			gpu,
			{Path: "/dev/nvidia-caps/nvidia-cap471", HostPath: "/host/dev/nvidia-caps/nvidia-cap471", Major: 508, Minor: 471},
			{Path: "/dev/nvidia-caps/nvidia-cap472", HostPath: "/host/dev/nvidia-caps/nvidia-cap472", Major: 508, Minor: 472},
		}}},
		"direct": {Direct{"gpu-a", "u1/gpu-a"}, cdi.Edits{Env: []string{"PARTAGE_GPU_ec8f7b43=gpu-a"}}},
		"client of its claim's session": {client, cdi.Edits{
			Env:    []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "PARTAGE_MPS_3aa9464f=gpu-0000-1b-00-0"},
			Mounts: clientMounts, Hooks: clientHooks, NodesLibrary: true,
		}},
		"client without shared memory": {aloneClient, cdi.Edits{
			Env:    []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "PARTAGE_MPS_3aa9464f=gpu-0000-1b-00-0"},
			Mounts: clientMounts[:1], Hooks: clientHooks, NodesLibrary: true,
		}},
		"client with a priority": {lowClient, cdi.Edits{
			Env: []string{
				"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "PARTAGE_MPS_3aa9464f=gpu-0000-1b-00-0", "CUDA_MPS_CLIENT_PRIORITY=1",
			},
			Mounts: clientMounts, Hooks: clientHooks, NodesLibrary: true,
		}},
		"client with limits": {limitedClient, cdi.Edits{
			Env: []string{
				"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "PARTAGE_MPS_3aa9464f=gpu-0000-1b-00-0",
				"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
			},
			Mounts: clientMounts, Hooks: clientHooks, NodesLibrary: true,
		}},
		// Names on the host have no part in those of the container, and limits have no
		// number.
		"interposer": {limited, cdi.Edits{
			Env:    []string{cache, "PARTAGE_LIMITS_facfa011=gpu-b", "CUDA_DEVICE_MEMORY_LIMIT=6144m", "CUDA_DEVICE_SM_LIMIT=25"},
			Mounts: interposerMounts, Hooks: interposerHooks,
		}},
		"memory limit": {MemoryLimit{address, "GPU-a", hookAt, "/data/sockets", "u1/" + share, 1 << 29, 1 << 30}, cdi.Edits{
			Env: []string{"PARTAGE_MEMORY_3aa9464f=" + address},
			Hooks: []cdi.Hook{{Path: hookAt, Args: []string{
				"partage-hook-12ab", "memory-limit", "--sockets", "/data/sockets", "--gpu", address, "--uuid", "GPU-a",
				"--soft", "536870912", "--hard", "1073741824",
			}}},
		}},
		"interposer without limits": {interposer, cdi.Edits{
			Env:    []string{cache, "PARTAGE_LIMITS_328e2327=gpu-b"},
			Mounts: interposerMounts, Hooks: interposerHooks,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := must.Get(test.edit.Edits())(t)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestEditsFail(t *testing.T) {
	roots := machine(t)
	missing := func(err error) bool { return errors.Is(err, fs.ErrNotExist) }
	for name, test := range map[string]struct {
		edit Edit
		is   func(error) bool
		want string
	}{
		"no GPU":              {GPU{roots, "0000:99:00.0"}, missing, "0000:99:00.0"},
		"no node":             {GPU{roots, "0000:43:00.0"}, missing, "device node nvidia4"},
		"no GPU of partition": {Partition{roots, "0000:99:00.0", 7, 0}, missing, "0000:99:00.0"},
		"no GPU instance":     {Partition{roots, address, 9, 0}, missing, "gi9"},
		"no compute instance": {Partition{roots, address, 8, 0}, missing, "gi8/ci0"},
		"no session":          {MPSClient{Session: "s", ShmDir: "/s", Hook: hookAt}, nil, "MPS session s does not run"},
		"no library":          {Interposer{Folder: "/f", Hook: hookAt}, func(err error) bool { return errors.Is(err, ErrNoInterposer) }, "--interposer-library"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Device("gpu-x", test.edit)
			if err == nil || !strings.Contains(err.Error(), "device gpu-x") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			if test.is != nil && !test.is(err) {
				t.Errorf("got an error of another kind: %v", err)
			}
		})
	}
}

func TestDevice(t *testing.T) {
	got := must.Get(Device("gpu-a", GPU{machine(t), address}, Direct{"gpu-a", "u1/gpu-a"}, Direct{"gpu-b", "u1/gpu-b"}))(t)
	want := cdi.Device{Name: "gpu-a", Edits: cdi.Edits{
		Nodes: []cdi.Node{{Path: "/dev/nvidia3", HostPath: "/host/dev/nvidia3", Major: 1, Minor: 3}},
		Env:   []string{"PARTAGE_GPU_ec8f7b43=gpu-a", "PARTAGE_GPU_3e6a64e5=gpu-b"},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A container with limits for different devices must have different marks.
func TestLimitsOwners(t *testing.T) {
	a := Interposer{Library: "/l.so", Folder: "/f", Hook: hookAt, Device: "gpu-a", Owner: "u1/r0", MemoryBytes: 1 << 30}
	marker := func(change func(*Interposer)) string {
		t.Helper()
		i := a
		change(&i)
		edits := must.Get(i.Edits())(t)
		for _, v := range edits.Env {
			if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "PARTAGE_LIMITS_") {
				return name
			}
		}
		t.Fatal("no mark")
		return ""
	}
	same := marker(func(*Interposer) {})
	if got := marker(func(i *Interposer) { i.Device = "gpu-b" }); got != same {
		t.Errorf("devices of one owner with the same limits have %s and %s", same, got)
	}
	for name, change := range map[string]func(*Interposer){
		"owner":  func(i *Interposer) { i.Owner = "u2/r0" },
		"memory": func(i *Interposer) { i.MemoryBytes = 2 << 30 },
		"SMs":    func(i *Interposer) { i.SMPercent = 10 },
	} {
		if got := marker(change); got == same {
			t.Errorf("another %s has the same mark", name)
		}
	}
}
