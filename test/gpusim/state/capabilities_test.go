// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
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
	expect.Equal(t, read("gpu1/mig/gi2/ci1/access"), want, "compute instance")
	must.Do(t, os.RemoveAll(dir))
	must.Do(t, f.SyncCapabilities())
	expect.Equal(t, read("gpu1/mig/gi2/ci1/access"), want, "after a sync")
	err := f.Update(func(m *machine.Machine) error {
		m.GPUs[0].Minor, m.GPUs[1].Minor = 5, 0
		m.GPUs[1].MIG.Instances = m.GPUs[1].MIG.Instances[1:]
		return nil
	})
	must.Do(t, err)
	expect.Len(t, must.Get(filepath.Glob(dir+"/gpu1"))(t), 0, "minor 1 is still there")
	for name, want := range map[string]string{
		"gpu5/mig/gi1/access": "DeviceFileMinor: 687\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
		"gpu0/mig/gi2/access": "DeviceFileMinor: 21\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
		"mig/config":          "DeviceFileMinor: 1\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
	} {
		expect.Equal(t, read(name), want, name)
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
	must.Do(t, os.WriteFile(filepath.Join(gpu, "gi9"), nil, 0o644))
	err := f.Update(func(m *machine.Machine) error {
		m.GPUs[0].MIG.Instances = append(m.GPUs[0].MIG.Instances, machine.GPUInstance{ID: 9})
		return nil
	})
	expect.Fails(t, err, "the update succeeded")
	expect.Same(t, snapshot(t, f), full(), "the machine changed")
	expect.Is(t, expect.Err(os.Stat(filepath.Join(gpu, "gi9"))), fs.ErrNotExist, "a trace of the instance is left")
}

// TestCapabilitiesThatStay: while one instance comes, no process finds the files of
// another one empty.
func TestCapabilitiesThatStay(t *testing.T) {
	path, f := create(t, full())
	file := filepath.Join(filepath.Dir(path), "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access")
	before, err := os.Stat(file)
	must.Do(t, err)
	err = f.Update(func(m *machine.Machine) error {
		m.GPUs[0].MIG.Instances = append(m.GPUs[0].MIG.Instances, machine.GPUInstance{ID: 9})
		return nil
	})
	must.Do(t, err)
	after := must.Get(os.Stat(file))(t)
	if !after.ModTime().Equal(before.ModTime()) {
		t.Error("the file of the instance that stayed was written again")
	}
}
