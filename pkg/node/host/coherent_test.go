// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestDriverManagesMemory(t *testing.T) {
	paramsOf := func(text string) Roots {
		roots := Roots{Proc: t.TempDir()}
		path := filepath.Join(roots.Proc, "driver/nvidia/params")
		must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)))
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
