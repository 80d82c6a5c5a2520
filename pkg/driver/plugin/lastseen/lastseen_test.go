// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lastseen

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
)

func node(addresses ...string) *gpu.Node {
	n := &gpu.Node{DriverVersion: "580.95.05", CUDAVersion: gpu.Version{Major: 13}}
	for _, address := range addresses {
		n.GPUs = append(n.GPUs, gpu.GPU{
			PCIAddress: address, UUID: "GPU-" + address, NUMANode: new(1),
			MIG: &gpu.MIG{Dynamic: true, MemorySlices: 8, Profiles: []gpu.Profile{{ID: 19, Name: "1g.10gb", Placements: []gpu.Placement{{Start: 4, Size: 1}}}}},
		})
	}
	return n
}

func addresses(n *gpu.Node) string {
	var all []string
	for _, g := range n.GPUs {
		all = append(all, g.PCIAddress)
	}
	return strings.Join(all, " ")
}

// TestBoots: what was seen is told apart from what was since the machine was started.
func TestBoots(t *testing.T) {
	dir := t.TempDir()
	read := func(boot, want, wantRemoved string) *gpu.Node {
		t.Helper()
		seen, removed, err := New(dir, boot).Read()
		if err != nil || addresses(seen) != want || strings.Join(removed, " ") != wantRemoved {
			t.Errorf("boot %s: read %q, removed %q, %v", boot, addresses(seen), removed, err)
		}
		return seen
	}
	const first, both = "0000:1b:00.0", "0000:1b:00.0 0000:28:00.0"
	read("1", "", "")
	want := node(first, "0000:28:00.0")
	if err := New(dir, "1").Write(want, nil); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, read("1", both, "")); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	read("2", both, both)
	if err := New(dir, "2").Write(want, []string{first}); err != nil {
		t.Fatal(err)
	}
	read("2", both, first)
	read("3", both, both)
}

// TestWriteOnlyChanges: a file is not worn out by discoveries that find the same.
func TestWriteOnlyChanges(t *testing.T) {
	dir := t.TempDir()
	f := New(dir, "1")
	seen := node("0000:1b:00.0")
	path := filepath.Join(dir, FileName)
	if err := f.Write(seen, nil); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	again := New(dir, "1")
	for _, f := range []*File{f, again} {
		if err := f.Write(seen, nil); err != nil {
			t.Fatal(err)
		}
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the same was written again (%v)", err)
	}
	if before.Mode().Perm() != fileMode {
		t.Errorf("mode %v", before.Mode())
	}
}

// TestDamaged: a file that cannot be used is an error that names it, and is replaced.
func TestDamaged(t *testing.T) {
	good := `{"apiVersion":"gpus.partage.dev/v1","kind":"DiscoveredGPUs","bootID":"1","gpus":[{"pciAddress":"0000:1b:00.0","color":"red"}],"more":1}`
	for name, text := range map[string]string{
		"good":           good,
		"empty":          "",
		"cut off":        good[:len(good)/2],
		"zeros":          strings.Repeat("\x00", len(good)),
		"later version":  strings.Replace(good, "/v1", "/v2", 1),
		"something else": strings.Replace(good, "DiscoveredGPUs", "Pod", 1),
		"no address":     strings.Replace(good, "0000:1b:00.0", "", 1),
		"twice":          strings.Replace(good, `"gpus":[`, `"gpus":[{"pciAddress":"0000:1b:00.0"},`, 1),
		"odd type":       strings.Replace(good, `"0000:1b:00.0"`, `7`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, FileName)
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			f := New(dir, "1")
			seen, _, err := f.Read()
			if name == "good" {
				if err != nil || addresses(seen) != "0000:1b:00.0" {
					t.Errorf("read %+v, %v", seen, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), path) || len(seen.GPUs) > 0 {
				t.Errorf("read %+v, %v", seen, err)
			}
			if err := f.Write(node("0000:28:00.0"), nil); err != nil {
				t.Fatal(err)
			}
			if seen, _, err := f.Read(); err != nil || addresses(seen) != "0000:28:00.0" {
				t.Errorf("after the next write: %+v, %v", seen, err)
			}
		})
	}
}
