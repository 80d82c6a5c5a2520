// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// Snapshot is everything that claims leave on a node.
type Snapshot struct {
	GPUs []gpuSnapshot
	// Processes are those that hold GPUs.
	Processes []machine.Process
	// Files are the contents of CDI specs, journal, MPS sessions, the folders of
	// software limits and the files about devices, by path.
	Files map[string]string
	// Mounts are in the folder of MPS sessions.
	Mounts []string
	// Running are daemons and servers, by process ID.
	Running map[int]string
}

// gpuSnapshot is the part of one GPU. The compute mode of a MIG device is in its instance.
type gpuSnapshot struct {
	Current, Pending       bool
	Instances              []machine.GPUInstance
	ComputeMode, TimeSlice int
}

// Snapshot reads everything, so that unexpected files are found as well.
func (n *Node) Snapshot(t testing.TB) Snapshot {
	t.Helper()
	m := n.Machine(t)
	all := Snapshot{Files: map[string]string{}, Processes: m.Processes}
	slices.SortFunc(all.Processes, func(a, b machine.Process) int {
		return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.GPU, b.GPU))
	})
	for _, g := range m.GPUs {
		one := gpuSnapshot{ComputeMode: g.ComputeMode, TimeSlice: g.TimeSlice}
		if g.MIG != nil {
			one.Current, one.Pending, one.Instances = g.MIG.Current, g.MIG.Pending, g.MIG.Instances
		}
		slices.SortFunc(one.Instances, func(a, b machine.GPUInstance) int {
			return cmp.Compare(a.Placement.Start, b.Placement.Start)
		})
		all.GPUs = append(all.GPUs, one)
	}
	data := filepath.Join(n.PluginsDir, DriverName)
	for prefix, dir := range map[string]string{
		"cdi": n.CDIDir, "records": n.RecordsDir(), "limits": filepath.Join(data, "limits"), "mps": n.MPSDir,
		"metadata": filepath.Join(data, "dra-device-metadata"),
	} {
		must.Do(t, readTree(dir, prefix, all.Files))
	}
	var err error
	if all.Mounts, err = n.MPSMounts(); err != nil {
		t.Fatal(err)
	}
	if all.Running, err = n.MPSProcesses(); err != nil {
		t.Fatal(err)
	}
	return all
}

// readTree adds the files and folders below a folder. One that vanishes
// meanwhile, or a folder that is not there, is not there.
func readTree(dir, prefix string, files map[string]string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || path == dir {
			return nil
		}
		if err != nil {
			return err
		}
		name := filepath.Join(prefix, strings.TrimPrefix(path, dir))
		switch {
		case name == "mps/supervisor.lock", name == "mps/"+supervisorSocket, name == "limits/ld.so.preload":
			// Locks, and what is the same for all claims, stay.
			return nil
		case prefix == "mps" && strings.HasPrefix(entry.Name(), "."):
			// What was to become a session's record goes with the session.
			return nil
		case prefix == "records" && (entry.IsDir() || isTombstone(path)):
			return nil
		case entry.IsDir():
			files[name+"/"] = ""
			if prefix == "mps" && isRuntime(entry.Name()) {
				return fs.SkipDir
			}
			return nil
		}
		data, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		files[name] = string(writes.ReplaceAll(data, nil))
		return err
	})
}

// writes is what a record says of how often it was written.
var writes = regexp.MustCompile(` writes=\d+| head=[0-9a-f]+\n`)

// isTombstone reports whether a file says only when a claim was released.
func isTombstone(path string) bool {
	r, err := ReadRecord(path)
	return err == nil && r == nil
}

// isRuntime reports whether a folder of an MPS session is for what a daemon makes
// while it runs.
func isRuntime(name string) bool { return name == "pipe" || name == "log" || name == "memory" }

// Diff is empty where there is no difference.
func (want Snapshot) Diff(got Snapshot) string { return gocmp.Diff(want, got) }

// CheckDevice fails unless a device of a claim is there and a container that
// gets it has its device nodes.
func (n *Node) CheckDevice(uid, id string, d Device, g *machine.GPU) error {
	var instance *machine.GPUInstance
	if d.Profile != "" {
		if instance = (Place{Profile: d.Profile, Start: d.Start}).Find(g); instance == nil {
			return fmt.Errorf("the GPU has %v", Places(g))
		}
	} else if g.MIG != nil && g.MIG.Current {
		return errors.New("MIG mode is on")
	}
	want, err := n.WantNodes(g, instance)
	if err != nil {
		return err
	}
	got, err := n.SpecNodes(uid, id)
	if err != nil {
		return err
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("its CDI spec has the device nodes %v, want %v", got, want)
	}
	return nil
}
