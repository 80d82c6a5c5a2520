// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// TestDriverOfContainerOptimizedOS checks that GPUs are found, and containers get the driver's
// libraries, where a driver root has these in a folder of NVIDIA's only.
func TestDriverOfContainerOptimizedOS(t *testing.T) {
	t.Parallel()
	const folder = "/usr/local/nvidia/lib64"
	n := harness.NewNode(t, "l4x1")
	usual, unusual := sysroot.LibraryDir(n.Root), filepath.Join(n.Root, folder)
	if err := os.MkdirAll(unusual, 0o755); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(usual)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		// What else is there ties libraries and programs to this machine.
		move := os.Link
		if strings.HasPrefix(e.Name(), "lib") {
			move = os.Rename
		}
		if err := move(filepath.Join(usual, e.Name()), filepath.Join(unusual, e.Name())); err != nil {
			t.Fatal(err)
		}
	}

	p := n.Start(t)
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
	container := n.Container(t, p.MustPrepare(t, claim)...)
	for _, library := range []string{"libnvidia-ml.so.", "libcuda.so."} {
		if !slices.ContainsFunc(container.Mounts, func(m oci.Mount) bool {
			return strings.HasPrefix(m.Destination, folder+"/"+library) && m.Source == filepath.Join(n.Root, m.Destination)
		}) {
			t.Errorf("no %s… from %s: %+v", library, folder, container.Mounts)
		}
	}
	p.MustUnprepare(t, claim)
}
