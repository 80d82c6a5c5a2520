// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package sysroot makes the files that a simulated GPU machine is seen through:
// device nodes, the parts of /proc and /sys that the NVIDIA kernel driver and
// the PCI bus fill, the driver's libraries and programs.
//
// Everything lies below one root:
//
//	dev/                         nvidia0…, nvidiactl, nvidia-uvm…, nvidia-caps/
//	proc -> var/lib/gpusim/proc  devices, driver/nvidia…, sys/kernel/random/boot_id
//	sys/                         bus/pci/devices, devices, module/nvidia
//	usr/lib/<triplet>/           libnvidia-ml.so.<version>, libcuda.so.<version>, links
//	usr/bin/nvidia-smi, …        stand-ins, also for nvidia-cuda-mps-control and -server
//	var/lib/gpusim/state         the machine's state, shared by all processes
//
// A machine whose driver is in a container, as those of NVIDIA's GPU Operator are, has the
// driver's libraries, programs and device nodes in run/nvidia/driver, and in its own dev
// nothing at first but the nodes of capabilities; see CreateInContainer.
//
// What changes while the machine runs is below var/lib/gpusim, so that the rest
// may be mounted read-only. The state has a second name among the libraries,
// because container tooling mounts every library with the driver's version into
// containers, and the state must get there too.
package sysroot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// home is the folder that marks a root as ours.
const home = "var/lib/gpusim"

// Assets are the built files that go into a root.
type Assets struct {
	NVML string // the simulated libnvidia-ml.so
	CUDA string // libcuda.so, a stub

	// Stand-ins of the programs. One without a path is not put into the root.
	NVIDIASMI  string
	MPSControl string
	MPSServer  string
}

// AssetsIn finds the assets in a build's output folder: libnvidia-ml.so and
// libcuda.so in lib, and in bin the stand-ins by the names of what they stand in
// for. The error names what is missing.
func AssetsIn(dir string) (Assets, error) {
	a := Assets{
		NVML:       filepath.Join(dir, "lib/libnvidia-ml.so"),
		CUDA:       filepath.Join(dir, "lib/libcuda.so"),
		NVIDIASMI:  filepath.Join(dir, "bin/nvidia-smi"),
		MPSControl: filepath.Join(dir, "bin/nvidia-cuda-mps-control"),
		MPSServer:  filepath.Join(dir, "bin/nvidia-cuda-mps-server"),
	}
	for _, path := range []string{a.NVML, a.CUDA, a.NVIDIASMI, a.MPSControl, a.MPSServer} {
		if _, err := os.Stat(path); err != nil {
			return Assets{}, fmt.Errorf("built files in %s are incomplete: %w", dir, err)
		}
	}
	return a, nil
}

// StatePath is where a root's machine state is.
func StatePath(root string) string { return filepath.Join(root, home, "state") }

// containerRoot is where driver containers of the GPU Operator mount their root.
const containerRoot = "run/nvidia/driver"

// DriverRoot is the folder that holds the driver's libraries and programs: the root
// itself, or that of the driver's container.
func DriverRoot(root string) string {
	if inContainer(root) {
		return filepath.Join(root, containerRoot)
	}
	return root
}

// inContainer reports whether CreateInContainer made a root.
func inContainer(root string) bool {
	_, err := os.Lstat(filepath.Join(root, containerRoot, home))
	return err == nil
}

// LibraryDir is the folder of a root's libraries.
func LibraryDir(root string) string { return filepath.Join(DriverRoot(root), "usr/lib", triplet()) }

func triplet() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}

// Create makes the root for a machine, or makes an existing root again, with the
// machine as given; what an earlier machine left is removed. Files are replaced
// by renaming, so that a reader sees the old or the new one.
//
// It needs the right to make device nodes. It refuses a folder that has
// something else in it. Nothing may use the root's machine at the same time.
func Create(root string, m *machine.Machine, a Assets) error {
	return createIn(root, "", m, a)
}

// CreateInContainer is Create for a machine whose driver is in a container. Its device
// nodes are below the container's root only, nvidia-uvm among them: the container has a
// /dev of its own. On the host are those of capabilities, which nvidia-modprobe or the
// container toolkit make there. The library makes nvidiactl and nvidia0… there as well,
// when root initialises it from outside of containers, as NVIDIA's does.
func CreateInContainer(root string, m *machine.Machine, a Assets) error {
	return createIn(root, containerRoot+"/", m, a)
}

// createIn makes a root with the driver in a folder of it, which is "" or ends in a slash.
func createIn(root, driver string, m *machine.Machine, a Assets) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return fmt.Errorf("root: %w", err)
	}
	if err := claim(root); err != nil {
		return err
	}
	if err := state.Create(StatePath(root), m); err != nil {
		return fmt.Errorf("machine state: %w", err)
	}
	return build(root, m, firstMajors, a, driver)
}

// Renew rewrites the files of an existing root and keeps its machine as it
// is, instances included. It serves after the assets were built again. Processes
// that have the old library loaded keep it.
func Renew(root string, a Assets) error {
	m, err := Load(root)
	if err != nil {
		return err
	}
	if root, err = filepath.Abs(root); err != nil {
		return fmt.Errorf("root: %w", err)
	}
	n, err := majorsOf(root)
	if err != nil {
		return err
	}
	return build(root, m, n, a, driverFolder(root))
}

// driverFolder is the folder with the driver as createIn takes it.
func driverFolder(root string) string {
	if inContainer(root) {
		return containerRoot + "/"
	}
	return ""
}

// Load reads the machine of a root as it is now.
func Load(root string) (*machine.Machine, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("root: %w", err)
	}
	if err := own(root); err != nil {
		return nil, err
	}
	f, err := state.Open(StatePath(root))
	if err != nil {
		return nil, fmt.Errorf("machine state: %w", err)
	}
	defer f.Close()
	m, err := f.Snapshot()
	if err != nil {
		return nil, fmt.Errorf("machine state: %w", err)
	}
	return m, nil
}

// build makes everything except the state.
func build(root string, m *machine.Machine, n majors, a Assets, driver string) error {
	t := newTree(root)
	t.link("proc", home+"/proc")
	t.written[home+"/state"] = true
	folders := []string{"dev", home + "/proc", "sys"}
	if driver == "" {
		folders = append(folders, "usr")
	} else {
		// By way of this link the library knows that the host is another root.
		t.link(driver+home, strings.Repeat("../", strings.Count(driver+home, "/"))+home)
		folders = append(folders, driver+"dev", driver+"usr")
	}
	devices(t, m, n, driver)
	proc(t, m, n)
	sys(t, m)
	libraries(t, m, a, driver)
	if t.err != nil {
		return fmt.Errorf("make %s: %w", root, t.err)
	}
	if err := t.sweep(folders...); err != nil {
		return err
	}
	return dropOther(root, driver)
}

// dropOther removes the driver of an earlier machine that was elsewhere.
func dropOther(root, driver string) error {
	other := containerRoot
	if driver != "" {
		other = "usr"
	}
	if err := os.RemoveAll(filepath.Join(root, other)); err != nil {
		return fmt.Errorf("remove what an earlier machine left: %w", err)
	}
	return nil
}

// claim makes the folder, and fails if it has content that is not ours.
func claim(root string) error {
	if err := own(root); err != nil && !errors.Is(err, fs.ErrNotExist) {
		entries, readErr := os.ReadDir(root)
		if readErr != nil || len(entries) > 0 {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Join(root, home), 0o755); err != nil {
		return fmt.Errorf("root: %w", err)
	}
	return nil
}

// own fails unless the folder is a root that Create made.
func own(root string) error {
	if _, err := os.Stat(root); err != nil {
		return fmt.Errorf("root: %w", err)
	}
	if info, err := os.Stat(filepath.Join(root, home)); root == "/" || err != nil || !info.IsDir() {
		return fmt.Errorf("%s is not the root of a simulated machine and not empty", root)
	}
	return nil
}

// Remove deletes a root that Create made. A root that does not exist is no
// error; a folder with other content is one, and is left alone.
func Remove(root string) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return fmt.Errorf("root: %w", err)
	}
	if err := own(root); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	if err := os.RemoveAll(root); err != nil {
		return fmt.Errorf("remove %s: %w", root, err)
	}
	return nil
}

func libraries(t *tree, m *machine.Machine, a Assets, driver string) {
	dir := driver + "usr/lib/" + triplet() + "/"
	for _, l := range []struct{ name, file string }{{"libnvidia-ml.so", a.NVML}, {"libcuda.so", a.CUDA}} {
		t.copy(dir+l.name+"."+m.DriverVersion, l.file)
		t.link(dir+l.name+".1", l.name+"."+m.DriverVersion)
		t.link(dir+l.name, l.name+".1")
	}
	t.hardLink(dir+"libnvidia-gpusim-state.so."+m.DriverVersion, home+"/state")
	for _, p := range []struct{ name, file string }{
		{"nvidia-smi", a.NVIDIASMI}, {"nvidia-cuda-mps-control", a.MPSControl}, {"nvidia-cuda-mps-server", a.MPSServer},
	} {
		if p.file != "" {
			t.copy(driver+"usr/bin/"+p.name, p.file)
		}
	}
}

// lines joins lines of a file.
func lines(l ...string) string { return strings.Join(l, "\n") + "\n" }
