// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// update rewrites golden files.
var update = flag.Bool("update", false, "rewrite files of expected values")

func TestMain(m *testing.M) {
	if root := os.Getenv(factsRootVariable); root != "" {
		os.Exit(printFacts(root))
	}
	harness.Main(m)
}

// factsRootVariable makes the test program print the facts of the machine in
// that root instead of running tests: a process loads one NVML library only.
const factsRootVariable = "PARTAGE_FLOW_FACTS_ROOT"

// TestBoardFacts checks that the real binding reads from the simulator what package
// boards has of each board. With -update it rewrites their files.
func TestBoardFacts(t *testing.T) {
	t.Parallel()
	if boards := catalog.Boards(); len(boards) < 18 {
		t.Errorf("the catalogue has the boards %v, want at least 18", boards)
	}
	for _, board := range catalog.Boards() {
		t.Run(board, func(t *testing.T) {
			t.Parallel()
			got := discoverAlone(t, board)
			path := filepath.Join("../../../pkg/kubectl/boards/facts", board+".yaml")
			if *update {
				writeFacts(t, path, got)
			}
			data := must.Get(os.ReadFile(path))(t)
			var want gpu.Node
			must.Do(t, yaml.UnmarshalStrict(data, &want))
			expect.Same(t, got, &want, board, "discovered")
		})
	}
}

func discoverAlone(t *testing.T, board string) *gpu.Node {
	t.Helper()
	// All files are about a GPU in the same place.
	n := harness.NewNode(t, board+"x1", func(m *machine.Machine) {
		g := &m.GPUs[0]
		g.UUID, g.Minor = "GPU-5b1a7e00-0000-4000-8000-000000000000", 0
		g.PCIAddress, g.PCIeRoot, g.NUMANode = "0000:1b:00.0", "pci0000:16", 0
	})
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), factsRootVariable+"="+n.Root)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("discover %s: %v\n%s", board, err, stderr.String())
	}
	var node gpu.Node
	must.Do(t, yaml.UnmarshalStrict(out, &node))
	return &node
}

func writeFacts(t *testing.T, path string, node *gpu.Node) {
	t.Helper()
	text := must.Get(yaml.Marshal(node))(t)
	const header = `# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
`
	must.Do(t, os.WriteFile(path, append([]byte(header), text...), 0o644))
}

// printFacts is the other process.
func printFacts(root string) (code int) {
	node, err := discover(root)
	if err == nil {
		var text []byte
		if text, err = yaml.Marshal(node); err == nil {
			_, err = os.Stdout.Write(text)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func discover(root string) (*gpu.Node, error) {
	client := nvml.New(nvml.Options{Roots: host.Roots{
		Driver: root, Dev: root, Proc: filepath.Join(root, "proc"), Sys: filepath.Join(root, "sys"),
	}})
	defer client.Close()
	ctx := context.Background()
	if err := client.Open(ctx); err != nil {
		return nil, err
	}
	return client.Discover(ctx)
}

// TestAlone: the first process of all that these tests and the drivers see is a part of this program, so that those of other
// tests on this machine use no GPU here.
func TestAlone(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("namespaces need root")
	}
	self := must.Get(os.Stat("/proc/self/exe"))(t)
	first := must.Get(os.Stat("/proc/1/exe"))(t)
	if !os.SameFile(self, first) {
		t.Error("the first process in /proc is another program")
	}
}
