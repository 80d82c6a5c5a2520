// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

func TestCapabilities(t *testing.T) {
	path, f := create(t, full())
	dir := filepath.Join(filepath.Dir(path), "proc/driver/nvidia/capabilities")
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err.Error()
		}
		return string(text)
	}
	want := "DeviceFileMinor: 158\nDeviceFileMode: 292\nDeviceFileModify: 1\n" // 3 + 135*1 + 9*2 + 1 + 1
	if got := read("gpu1/mig/gi2/ci1/access"); got != want {
		t.Errorf("compute instance: %q, want %q", got, want)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := f.SyncCapabilities(); err != nil {
		t.Fatal(err)
	}
	if got := read("gpu1/mig/gi2/ci1/access"); got != want {
		t.Errorf("after a sync: %q, want %q", got, want)
	}
	err := f.Update(func(m *machine.Machine) error {
		m.GPUs[0].Minor, m.GPUs[1].Minor = 5, 0
		m.GPUs[1].MIG.Instances = m.GPUs[1].MIG.Instances[1:]
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	gone, err := filepath.Glob(dir + "/gpu1")
	if err != nil || len(gone) > 0 {
		t.Errorf("minor 1 is still there: %v, %v", gone, err)
	}
	for name, want := range map[string]string{
		"gpu5/mig/gi1/access": "DeviceFileMinor: 687\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
		"gpu0/mig/gi2/access": "DeviceFileMinor: 21\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
		"mig/config":          "DeviceFileMinor: 1\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
	} {
		if got := read(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "gpu0/mig/gi1")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("instance 1 of minor 0 is still there: %v", err)
	}
}

// TestCapabilitiesThatFail: an instance whose files cannot be written does not
// come into being.
func TestCapabilitiesThatFail(t *testing.T) {
	path, f := create(t, full())
	gpu := filepath.Join(filepath.Dir(path), "proc/driver/nvidia/capabilities/gpu0/mig")
	if err := os.WriteFile(filepath.Join(gpu, "gi9"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	err := f.Update(func(m *machine.Machine) error {
		m.GPUs[0].MIG.Instances = append(m.GPUs[0].MIG.Instances, machine.GPUInstance{ID: 9})
		return nil
	})
	if err == nil {
		t.Error("the update succeeded")
	}
	if diff := cmp.Diff(full(), snapshot(t, f)); diff != "" {
		t.Errorf("the machine changed (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(filepath.Join(gpu, "gi9")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a trace of the instance is left: %v", err)
	}
}

// TestCapabilitiesThatStay: while one instance comes, no process finds the files of
// another one empty.
func TestCapabilitiesThatStay(t *testing.T) {
	path, f := create(t, full())
	file := filepath.Join(filepath.Dir(path), "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access")
	before, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	err = f.Update(func(m *machine.Machine) error {
		m.GPUs[0].MIG.Instances = append(m.GPUs[0].MIG.Instances, machine.GPUInstance{ID: 9})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if !after.ModTime().Equal(before.ModTime()) {
		t.Error("the file of the instance that stayed was written again")
	}
}
