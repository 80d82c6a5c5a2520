// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/neighbours"
)

// TestFeatureDiscovery lets NVIDIA's GPU feature discovery, unmodified, say which labels a node's GPUs have. Those that the plugin writes
// are the same.
func TestFeatureDiscovery(t *testing.T) {
	root := page.Root(t)
	program := filepath.Join(root, "_output/neighbours/gpu-feature-discovery")
	if _, err := os.Stat(program); err != nil {
		t.Skipf("test/neighbours/build has not built it: %v", err)
	}
	n := harness.NewNode(t, "dgx-h100")
	features := filepath.Join(t.TempDir(), "features")
	cmd := exec.CommandContext(t.Context(), program, "--oneshot", "--no-timestamp", "--use-node-feature-api=false",
		"--device-discovery-strategy=nvml", "--machine-type-file=/dev/null", "--output-file="+features)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(libraryOf(t, n)))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	text, err := os.ReadFile(features)
	if err != nil {
		t.Fatal(err)
	}
	theirs := map[string]string{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		theirs[name] = value
	}
	p := n.Start(t, "--node-labels=Write")
	p.Ready(t)
	p.Until(t, "the labels of the node", func(context.Context) error {
		got, want := map[string]string{}, map[string]string{}
		for name, value := range n.API.Node(harness.NodeName).Labels {
			if strings.HasPrefix(name, "nvidia.com/") {
				got[name], want[name] = value, theirs[name]
			}
		}
		if diff := cmp.Diff(want, got); diff != "" || len(got) != 6 {
			return fmt.Errorf("%d labels (-GPU feature discovery +plugin):\n%s", len(got), diff)
		}
		return nil
	})
	err = neighbours.Record(root, "NVIDIA GPU feature discovery", t.Name(), "its labels of eight H100 have the values that Partage writes")
	if err != nil {
		t.Fatal(err)
	}
}
