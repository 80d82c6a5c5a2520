// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestCataloguePatch: what all parts measure of a simulated board is what the catalogue has
// and how long its calls take; and the same can be written from the transcript.
func TestCataloguePatch(t *testing.T) {
	t.Parallel()
	const slow = 30 * time.Millisecond
	functions := []string{
		"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance",
		"nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy", "mps_server_start",
	}
	n := harness.NewNode(t, "h100-80-sxmx1", func(m *machine.Machine) {
		for _, function := range functions {
			m.Latencies = append(m.Latencies, machine.Latency{Function: function, Base: slow})
		}
	})
	dir := t.TempDir()
	transcript, live, replayed := filepath.Join(dir, "transcript"), filepath.Join(dir, "live"), filepath.Join(dir, "replayed")
	if _, code, stderr := run(t, n, "--mps", "--intrusive", "--limit=5m", "--gpu="+n.Machine(t).GPUs[0].UUID, "--transcript="+transcript, "--catalogue-patch="+live); code > 1 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if _, code, stderr := run(t, n, "--replay="+transcript, "--catalogue-patch="+replayed); code > 1 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	patch := content(t, live)
	if diff := cmp.Diff(patch, content(t, replayed)); diff != "" {
		t.Errorf("-live +replayed:\n%s", diff)
	}
	documents := strings.Split(patch, "---\n")
	if len(documents) != 3 {
		t.Fatalf("got %d documents, want a comment, a board and latencies:\n%s", len(documents), patch)
	}
	checkBoard(t, documents[1])
	profiles, err := catalog.DecodeLatencies([]byte(documents[2]))
	if err != nil {
		t.Fatal(err)
	}
	for _, function := range functions {
		i := slices.IndexFunc(profiles["h100-80-sxm"], func(l machine.Latency) bool { return l.Function == function })
		if i < 0 || profiles["h100-80-sxm"][i].Base < slow {
			t.Errorf("got %+v, want %s to take at least %s", profiles, function, slow)
		}
	}
}

func content(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// checkBoard compares what parts B and C have measured of a board with the catalogue.
func checkBoard(t *testing.T, document string) {
	t.Helper()
	var board catalog.Board
	if err := yaml.UnmarshalStrict([]byte(document), &board); err != nil {
		t.Fatal(err)
	}
	known, err := catalog.Load("h100-80-sxm")
	if err != nil {
		t.Fatal(err)
	}
	want := known.MPS
	want.Tags = catalog.Tags{Source: catalog.Measured}
	if diff := cmp.Diff(want, board.MPS); diff != "" {
		t.Errorf("MPS: -catalogue +measured:\n%s", diff)
	}
	for _, p := range known.MIG.Profiles {
		i := slices.IndexFunc(board.MIG.Profiles, func(m catalog.Profile) bool { return m.Name == p.Name })
		if i < 0 || !slices.Equal(board.MIG.Profiles[i].InstanceIDs, p.InstanceIDs[:len(p.Placements.Starts)]) {
			t.Errorf("instance IDs of %s: got %+v, want %v", p.Name, board.MIG.Profiles, p.InstanceIDs)
		}
	}
}
