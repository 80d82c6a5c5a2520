// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

const goldenHeader = "# SPDX-FileCopyrightText: The Partage Authors\n# SPDX-License-Identifier: Apache-2.0\n"

// TestGolden compares the full slices of one GPU of every board. For 8 and 16
// GPUs a digest is enough: the layout, and a hash of everything.
func TestGolden(t *testing.T) {
	var used []string
	for _, b := range testBoards(t) {
		t.Run(b.name, func(t *testing.T) {
			used = append(used, b.name+".yaml", b.name+"-digest.txt")
			one := mustInventory(t, b.node).ResourceSlices(testOptions)
			compareGolden(t, b.name+".yaml", documents(t, one))

			var digests strings.Builder
			for _, n := range []int{8, 16} {
				fmt.Fprintf(&digests, "%d GPUs:\n%s", n, digest(t, mustInventory(t, replicate(b.node, n)).ResourceSlices(testOptions)))
			}
			compareGolden(t, b.name+"-digest.txt", digests.String())
		})
	}
	files, err := filepath.Glob("testdata/slices/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if !slices.Contains(used, filepath.Base(file)) {
			t.Errorf("%s belongs to no board", file)
		}
	}
}

// documents is a YAML stream, without depending on the order of map keys.
func documents(t *testing.T, objects []resourceapi.ResourceSlice) string {
	t.Helper()
	var out []string
	for _, object := range objects {
		data, err := yaml.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, string(data))
	}
	return strings.Join(out, "---\n")
}

func digest(t *testing.T, objects []resourceapi.ResourceSlice) string {
	t.Helper()
	var out strings.Builder
	for _, object := range objects {
		fmt.Fprintf(&out, "- name: %s\n", object.Name)
		for _, set := range object.Spec.SharedCounters {
			fmt.Fprintf(&out, "  counterSet: %s, %d counters\n", set.Name, len(set.Counters))
		}
		if devices := object.Spec.Devices; len(devices) > 0 {
			fmt.Fprintf(&out, "  devices: %d, %s to %s\n", len(devices), devices[0].Name, devices[len(devices)-1].Name)
		}
	}
	fmt.Fprintf(&out, "sha256: %x\n", sha256.Sum256([]byte(documents(t, objects))))
	return out.String()
}

func compareGolden(t *testing.T, file, got string) {
	t.Helper()
	path := filepath.Join("testdata/slices", file)
	got = goldenHeader + got
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (run the test with -update to write it)", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s differs (run the test with -update to accept; -want +got):\n%s", path, diff)
	}
}
