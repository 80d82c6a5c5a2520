// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lastseen

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gofrs/flock"
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

// TestBoots: what was seen is known as long as the machine runs. What was seen before
// is told apart, even if it was written again.
func TestBoots(t *testing.T) {
	dir := t.TempDir()
	read := func(boot, thisBoot, earlier string) GPUs {
		t.Helper()
		seen, err := New(dir, boot).Read()
		if err != nil {
			t.Fatal(err)
		}
		if addresses(seen.ThisBoot) != thisBoot || addresses(seen.Earlier) != earlier {
			t.Errorf("boot %s: read %q and earlier %q, want %q and %q", boot, addresses(seen.ThisBoot), addresses(seen.Earlier), thisBoot, earlier)
		}
		if thisBoot+earlier != "" && seen.ThisBoot.DriverVersion != "580.95.05" {
			t.Errorf("boot %s: driver version %q", boot, seen.ThisBoot.DriverVersion)
		}
		return seen
	}
	write := func(boot string, thisBoot, earlier *gpu.Node) {
		t.Helper()
		if err := New(dir, boot).Write(GPUs{thisBoot, earlier}); err != nil {
			t.Fatal(err)
		}
	}
	read("1", "", "")
	write("1", node("0000:1b:00.0", "0000:28:00.0"), &gpu.Node{})
	seen := read("1", "0000:1b:00.0 0000:28:00.0", "")
	if diff := cmp.Diff(node("0000:1b:00.0", "0000:28:00.0"), seen.ThisBoot); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	read("2", "", "0000:1b:00.0 0000:28:00.0")
	write("2", node("0000:28:00.0"), node("0000:1b:00.0"))
	read("2", "0000:28:00.0", "0000:1b:00.0")
	read("3", "", "0000:1b:00.0 0000:28:00.0")
}

// TestWriteOnlyChanges: a file is not worn out by discoveries that find the same.
func TestWriteOnlyChanges(t *testing.T) {
	dir := t.TempDir()
	f := New(dir, "1")
	seen := GPUs{node("0000:1b:00.0"), &gpu.Node{}}
	path := filepath.Join(dir, FileName)
	if err := f.Write(seen); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	again := New(dir, "1")
	if _, err := again.Read(); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*File{f, again} {
		if err := f.Write(seen); err != nil {
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

// TestWriteTogether: a process does not disturb another one that is writing, and
// writes later.
func TestWriteTogether(t *testing.T) {
	dir := t.TempDir()
	other := flock.New(dir, flock.SetFlag(os.O_RDONLY))
	if locked, err := other.TryLock(); err != nil || !locked {
		t.Fatal(locked, err)
	}
	f := New(dir, "1")
	for _, free := range []bool{false, true} {
		if free {
			if err := other.Unlock(); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.Write(GPUs{node("0000:1b:00.0"), &gpu.Node{}}); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(dir, FileName)); (err == nil) != free {
			t.Errorf("free %t: %v", free, err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("the folder has %v, %v", entries, err)
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
		"no boot":        strings.Replace(good, `"bootID":"1"`, `"bootID":""`, 1),
		"no address":     strings.Replace(good, "0000:1b:00.0", "", 1),
		"twice":          strings.Replace(good, `"more":1`, `"earlierGPUs":[{"pciAddress":"0000:1b:00.0"}]`, 1),
		"odd type":       strings.Replace(good, `"0000:1b:00.0"`, `7`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, FileName)
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			f := New(dir, "1")
			seen, err := f.Read()
			if name == "good" {
				if err != nil || addresses(seen.ThisBoot) != "0000:1b:00.0" {
					t.Errorf("read %+v, %v", seen, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), path) || len(seen.ThisBoot.GPUs)+len(seen.Earlier.GPUs) > 0 {
				t.Errorf("read %+v, %v", seen, err)
			}
			if err := f.Write(GPUs{node("0000:28:00.0"), &gpu.Node{}}); err != nil {
				t.Fatal(err)
			}
			if seen, err := f.Read(); err != nil || addresses(seen.ThisBoot) != "0000:28:00.0" {
				t.Errorf("after the next write: %+v, %v", seen, err)
			}
		})
	}
}
