// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

func write(t *testing.T, root, path, content string) {
	t.Helper()
	full := filepath.Join(root, path)
	must.Do(t, os.MkdirAll(filepath.Dir(full), 0o755))
	must.Do(t, os.WriteFile(full, []byte(content), 0o644))
}

func link(t *testing.T, root, path, target string) {
	t.Helper()
	full := filepath.Join(root, path)
	must.Do(t, os.MkdirAll(filepath.Dir(full), 0o755))
	must.Do(t, os.Symlink(target, full))
}

// tree is a temporary machine: Roots whose folders all lie in one root.
func tree(t *testing.T) (string, Roots) {
	t.Helper()
	root := t.TempDir()
	return root, Roots{Driver: root, Dev: root, Proc: filepath.Join(root, "proc"), Sys: filepath.Join(root, "sys")}
}

func TestComplete(t *testing.T) {
	for name, test := range map[string]struct{ in, want Roots }{
		"zero": {
			want: Roots{Driver: "/", Dev: "/", Proc: "/proc", Sys: "/sys", HostDriver: "/", HostDev: "/", PodLogs: DefaultPodLogs},
		},
		"container view only": {
			in:   Roots{Driver: "/a", Dev: "/b", Proc: "/c", Sys: "/d"},
			want: Roots{Driver: "/a", Dev: "/b", Proc: "/c", Sys: "/d", HostDriver: "/a", HostDev: "/b", PodLogs: DefaultPodLogs},
		},
		"automatic": {
			in:   Roots{Driver: "/a", Dev: AutoDev},
			want: Roots{Driver: "/a", Dev: AutoDev, Proc: "/proc", Sys: "/sys", HostDriver: "/a", PodLogs: DefaultPodLogs},
		},
		"both views": {
			in:   Roots{Driver: "/a", HostDriver: "/run/nvidia/driver", HostDev: "/", PodLogs: DefaultPodLogs},
			want: Roots{Driver: "/a", Dev: "/", Proc: "/proc", Sys: "/sys", HostDriver: "/run/nvidia/driver", HostDev: "/", PodLogs: DefaultPodLogs},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := test.in.Complete(); got != test.want {
				t.Errorf("%+v, want %+v", got, test.want)
			}
		})
	}
}

func TestLibraryPath(t *testing.T) {
	if !slices.Contains(libraryFolders, "usr/local/nvidia/lib64") {
		t.Error("the driver of Container-Optimized OS is not found")
	}
	for _, folder := range libraryFolders {
		t.Run(folder, func(t *testing.T) {
			root, roots := tree(t)
			write(t, root, filepath.Join(folder, "libnvidia-ml.so.580.95.05"), "")
			must.Do(t, os.Symlink("libnvidia-ml.so.580.95.05", filepath.Join(root, folder, nvmlLibrary)))
			got := must.Get(roots.LibraryPath())(t)
			if want := filepath.Join(root, folder, "libnvidia-ml.so.580.95.05"); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
	t.Run("absent", func(t *testing.T) {
		root, roots := tree(t)
		_, err := roots.LibraryPath()
		if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), root) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("by way of a link of the root", func(t *testing.T) {
		root, roots := tree(t)
		write(t, root, "usr/lib/nvidia/current/libnvidia-ml.so.580.95.05", "")
		link(t, root, "usr/lib/x86_64-linux-gnu/"+nvmlLibrary, "/etc/alternatives/nvml")
		link(t, root, "etc/alternatives/nvml", "/usr/lib/nvidia/current/libnvidia-ml.so.580.95.05")
		got, err := roots.LibraryPath()
		if want := filepath.Join(root, "usr/lib/nvidia/current/libnvidia-ml.so.580.95.05"); err != nil || got != want {
			t.Errorf("got %s, %v, want %s", got, err, want)
		}
	})
	t.Run("dangling link", func(t *testing.T) {
		root, roots := tree(t)
		write(t, root, "usr/lib64/other", "")
		must.Do(t, os.Symlink("gone", filepath.Join(root, "usr/lib64", nvmlLibrary)))
		if _, err := roots.LibraryPath(); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

func TestCharDevice(t *testing.T) {
	root, roots := tree(t)
	write(t, root, "dev/nvidia1", "")
	if _, _, err := roots.CharDevice("/dev/nvidia0"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "nvidia0") {
		t.Errorf("missing node: got %v", err)
	}
	if _, _, err := roots.CharDevice("/dev/nvidia1"); !errors.Is(err, ErrNotCharDevice) {
		t.Errorf("plain file: got %v", err)
	}
	// A node that every Linux machine has stands in for what only root can make.
	major, minor, err := Roots{}.CharDevice("/dev/null")
	if err != nil || major != 1 || minor != 3 {
		t.Errorf("/dev/null: got %d:%d, %v", major, minor, err)
	}
	node := filepath.Join(root, "dev/nvidia300")
	if err := unix.Mknod(node, unix.S_IFCHR|0o666, int(unix.Mkdev(195, 300))); err != nil {
		t.Skipf("cannot make device nodes: %v", err)
	}
	major, minor, err = roots.CharDevice("/dev/nvidia300")
	if err != nil || major != 195 || minor != 300 {
		t.Errorf("got %d:%d, %v", major, minor, err)
	}
}

func TestCapabilityMajor(t *testing.T) {
	const head = "Character devices:\n  1 mem\n195 nvidia\n"
	for name, test := range map[string]struct {
		content string
		want    int64
		wantErr string
	}{
		"present":       {content: head + "508 nvidia-caps\n509 nvidia-caps-imex-channels\n\nBlock devices:\n  8 sd\n", want: 508},
		"absent":        {content: head + "509 nvidia-caps-imex-channels\n", wantErr: "no nvidia-caps"},
		"block section": {content: head + "\nBlock devices:\n508 nvidia-caps\n", wantErr: "no nvidia-caps"},
		"not a number":  {content: head + "x nvidia-caps\n", wantErr: `line "x nvidia-caps"`},
		"negative":      {content: head + "-1 nvidia-caps\n", wantErr: `line "-1 nvidia-caps"`},
		"empty":         {wantErr: "no nvidia-caps"},
	} {
		t.Run(name, func(t *testing.T) {
			root, roots := tree(t)
			write(t, root, "proc/devices", test.content)
			got, err := roots.CapabilityMajor()
			check(t, got, err, test.want, test.wantErr)
		})
	}
	_, roots := tree(t)
	if _, err := roots.CapabilityMajor(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no procfs: got %v", err)
	}
}

func check(t *testing.T, got int64, err error, want int64, wantErr string) {
	t.Helper()
	switch {
	case wantErr == "" && err != nil:
		t.Errorf("unexpected error: %v", err)
	case wantErr != "" && (err == nil || !strings.Contains(err.Error(), wantErr)):
		t.Errorf("got error %v, want one with %q", err, wantErr)
	case got != want:
		t.Errorf("got %d, want %d", got, want)
	}
}

func TestCapabilities(t *testing.T) {
	root, roots := tree(t)
	access := func(minor string) string {
		return "DeviceFileMinor: " + minor + "\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
	}
	write(t, root, "proc/driver/nvidia/capabilities/gpu3/mig/gi7/access", access("471"))
	write(t, root, "proc/driver/nvidia/capabilities/gpu3/mig/gi7/ci0/access", access("472"))
	write(t, root, "proc/driver/nvidia/capabilities/gpu3/mig/gi8/access", access("many"))
	write(t, root, "proc/driver/nvidia/capabilities/gpu3/mig/gi9/access", "DeviceFileMode: 292\n")

	minor, err := roots.InstanceCapability(3, 7)
	check(t, minor, err, 471, "")
	minor, err = roots.ComputeCapability(3, 7, 0)
	check(t, minor, err, 472, "")
	minor, err = roots.InstanceCapability(3, 8)
	check(t, minor, err, 0, "gi8/access: DeviceFileMinor")
	minor, err = roots.InstanceCapability(3, 9)
	check(t, minor, err, 0, `expected a line "DeviceFileMinor: <minor number>"`)
	if _, err := roots.ComputeCapability(3, 7, 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing compute instance: got %v", err)
	}
}

func TestGPUMinor(t *testing.T) {
	const address = "0000:1b:00.0"
	// As the driver prints it.
	information := func(minor string) string {
		return "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t GPU-e1bd0f2c-4e5e-0b4d-5d06-9d1e8c5e8e0a\n" +
			"Video BIOS: \t 96.00.74.00.01\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n" +
			"Bus Location: \t " + address + "\n" + minor + "GPU Firmware: \t 580.95.05\nGPU Excluded:\t No\n"
	}
	for name, test := range map[string]struct {
		content string
		want    int64
		wantErr string
	}{
		"zero":         {content: information("Device Minor: \t 0\n"), want: 0},
		"large":        {content: information("Device Minor: \t 255\n"), want: 255},
		"absent":       {content: information(""), wantErr: `expected a line "Device Minor: <minor number>", found none`},
		"empty file":   {wantErr: `expected a line "Device Minor: <minor number>", found none`},
		"no number":    {content: information("Device Minor: \t \n"), wantErr: "Device Minor: expected a minor number"},
		"not assigned": {content: information("Device Minor: \t 4294967295\n"), wantErr: "Device Minor: expected a minor number"},
	} {
		t.Run(name, func(t *testing.T) {
			root, roots := tree(t)
			path := "proc/driver/nvidia/gpus/" + address + "/information"
			write(t, root, path, test.content)
			got, err := roots.GPUMinor(address)
			check(t, int64(got), err, test.want, test.wantErr)
			if err != nil && !strings.Contains(err.Error(), "GPU "+address+" from "+filepath.Join(root, path)) {
				t.Errorf("the error names not both GPU and path: %v", err)
			}
		})
	}
	t.Run("read anew", func(t *testing.T) {
		root, roots := tree(t)
		for minor := range 3 {
			write(t, root, "proc/driver/nvidia/gpus/"+address+"/information", information(fmt.Sprintf("Device Minor: \t %d\n", minor)))
			got, err := roots.GPUMinor(address)
			check(t, int64(got), err, int64(minor), "")
		}
	})
	t.Run("unknown GPU", func(t *testing.T) {
		root, roots := tree(t)
		write(t, root, "proc/driver/nvidia/gpus/"+address+"/information", information("Device Minor: \t 0\n"))
		if _, err := roots.GPUMinor("0000:1c:00.0"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "GPU 0000:1c:00.0") {
			t.Errorf("got %v", err)
		}
	})
}

func TestBootID(t *testing.T) {
	root, roots := tree(t)
	if _, err := roots.BootID(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	write(t, root, "proc/sys/kernel/random/boot_id", "\n")
	if _, err := roots.BootID(); err == nil || !strings.Contains(err.Error(), "is empty") {
		t.Errorf("got %v", err)
	}
	write(t, root, "proc/sys/kernel/random/boot_id", "2f0e6a0c-7f9f-4c0a-9d0c-7e2b2b0a9d11\n")
	if got, err := roots.BootID(); err != nil || got != "2f0e6a0c-7f9f-4c0a-9d0c-7e2b2b0a9d11" {
		t.Errorf("got %q, %v", got, err)
	}
}

func FuzzParseMinor(f *testing.F) {
	f.Add([]byte("DeviceFileMinor: 12\nDeviceFileMode: 292\n"), "DeviceFileMinor")
	f.Add([]byte("DeviceFileMinor: -1"), "DeviceFileMinor")
	f.Add([]byte("GPU UUID: \t GPU-1\nDevice Minor: \t 3\n"), "Device Minor")
	f.Fuzz(func(t *testing.T, data []byte, field string) {
		if minor, err := parseMinor(data, field); err == nil && (minor < 0 || minor >= 1<<minorBits) {
			t.Errorf("minor %d from %q", minor, data)
		}
	})
}

func FuzzParseMajor(f *testing.F) {
	f.Add([]byte("Character devices:\n508 nvidia-caps\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if major, found, err := parseMajor(data, capabilityDriver); err == nil && found && major < 0 {
			t.Errorf("major %d from %q", major, data)
		}
	})
}

func TestNVIDIAGPUs(t *testing.T) {
	root, roots := tree(t)
	if _, err := roots.NVIDIAGPUs(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a PCI bus: %v", err)
	}
	for address, device := range map[string]struct{ vendor, class, driver string }{
		"0000:00:00.0": {"0x8086", "0x060000", ""},       // host bridge
		"0000:00:02.0": {"0x1af4", "0x030000", ""},       // another vendor's display
		"0000:17:00.0": {"0x10de", "0x068000", ""},       // NVSwitch
		"0000:19:00.1": {"0x10de", "0x040300", ""},       // audio of a GPU
		"0000:1b:00.0": {"0x10de", "0x030200", "nvidia"}, // 3D controller
		"0000:43:00.0": {"0x10de", "0x030000", ""},       // VGA, no driver
		"0000:52:00.0": {"0x10de", "0x030200", "vfio-pci"},
		"0000:61:00.0": {"0x10de", "0x030200", "nvgrace_gpu_vfio_pci"},
	} {
		folder := "sys/bus/pci/devices/" + address
		write(t, root, folder+"/vendor", device.vendor+"\n")
		write(t, root, folder+"/class", device.class+"\n")
		if device.driver != "" {
			link(t, root, folder+"/driver", "../../../bus/pci/drivers/"+device.driver)
		}
	}
	got := must.Get(roots.NVIDIAGPUs())(t)
	if diff := cmp.Diff([]string{"0000:1b:00.0", "0000:43:00.0"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestDriverManagesMemory(t *testing.T) {
	paramsOf := func(text string) Roots {
		roots := Roots{Proc: t.TempDir()}
		path := filepath.Join(roots.Proc, "driver/nvidia/params")
		must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)))
		return roots
	}
	for text, want := range map[string]bool{
		"ModifyDeviceFiles: 1\nEnableUserNUMAManagement: 1\nRegistryDwords: \"\"\n": false, // R535 has no mode
		"EnableUserNUMAManagement: 1\nCoherentGPUMemoryMode: \"\"\n":                false,
		"EnableUserNUMAManagement: 1\nCoherentGPUMemoryMode: \"numa\"\n":            false,
		"EnableUserNUMAManagement: 0\nCoherentGPUMemoryMode: \"driver\"\n":          true,
		// R615 by itself, and drivers that have only the older parameter.
		"EnableUserNUMAManagement: 0\nCoherentGPUMemoryMode: \"\"\n":                true,
		"ModifyDeviceFiles: 1\nEnableUserNUMAManagement: 0\nRegistryDwords: \"\"\n": true,
	} {
		if got, err := paramsOf(text).DriverManagesMemory(); err != nil || got != want {
			t.Errorf("%q: %t, %v", text, got, err)
		}
	}
	// What is not there says nothing.
	for _, text := range []string{"", "ModifyDeviceFiles: 1\n"} {
		if _, err := paramsOf(text).DriverManagesMemory(); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
	if _, err := (Roots{Proc: t.TempDir()}).DriverManagesMemory(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a driver: %v", err)
	}
}

func TestPodNames(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for _, name := range []string{
		"team-a_train-0_3f2a1b4c-0000-4000-8000-0123456789ab",
		"kube-system_etcd-node.example.com_2f0c5c5d4e1a4f6c8b7a9d0e1f2a3b4c", // static
		"a_twice_u2", "b_twice_u2", "same_twice_u3",
		"_name_u4", "namespace__u5", "namespace_name_", "two_parts", "more_than_three_parts", "lost+found",
	} {
		must.Do(t, os.Mkdir(filepath.Join(folder, name), 0o755))
	}
	must.Do(t, os.WriteFile(filepath.Join(folder, "a_file_u6"), nil, 0o600))
	got, err := Roots{PodLogs: folder}.PodNames()
	want := map[string]string{
		"3f2a1b4c-0000-4000-8000-0123456789ab": "team-a/train-0",
		"2f0c5c5d4e1a4f6c8b7a9d0e1f2a3b4c":     "kube-system/etcd-node.example.com",
		"u2":                                   "",
		"u3":                                   "same/twice",
	}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	if _, err := (Roots{PodLogs: filepath.Join(folder, "none")}).PodNames(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the folder: %v", err)
	}
}
