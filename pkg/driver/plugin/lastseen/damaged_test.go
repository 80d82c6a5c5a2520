// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lastseen

import (
	"os"
	"path/filepath"
	"testing"
)

// TestDamagedAddress: what is no PCI address would become a device with an illegal name,
// for which the API server refuses the whole slice.
func TestDamagedAddress(t *testing.T) {
	for _, address := range []string{"0000:1b:00.0 ", "0000:1B:00.0", "?000:1b:00.0", "1b:00.0", "0000:1b:00"} {
		dir := t.TempDir()
		text := `{"apiVersion":"gpus.partage.dev/v1","kind":"DiscoveredGPUs","bootID":"1","gpus":[{"pciAddress":"` + address + `"}]}`
		if err := os.WriteFile(filepath.Join(dir, FileName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if seen, _, err := New(dir, "1").Read(); err == nil {
			t.Errorf("%q: read %+v", address, seen.GPUs)
		}
	}
}
