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
	for text, want := range map[string]bool{
		"": false, // R535 has neither parameter
		"EnableUserNUMAManagement: 1\nCoherentGPUMemoryMode: \"\"\n":       false,
		"EnableUserNUMAManagement: 1\nCoherentGPUMemoryMode: \"numa\"\n":   false,
		"EnableUserNUMAManagement: 0\nCoherentGPUMemoryMode: \"driver\"\n": true,
		// R615 by itself, and drivers that have only the older parameter.
		"EnableUserNUMAManagement: 0\nCoherentGPUMemoryMode: \"\"\n":                true,
		"ModifyDeviceFiles: 1\nEnableUserNUMAManagement: 0\nRegistryDwords: \"\"\n": true,
	} {
		roots := Roots{Proc: t.TempDir()}
		path := filepath.Join(roots.Proc, "driver/nvidia/params")
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		if got, err := roots.DriverManagesMemory(); err != nil || got != want {
			t.Errorf("%q: %t, %v", text, got, err)
		}
	}
	if managed, err := (Roots{Proc: t.TempDir()}).DriverManagesMemory(); managed || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a driver: %t, %v", managed, err)
	}
}
