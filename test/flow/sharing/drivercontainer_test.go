// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// TestDriverContainer checks that every kind of claim works on a machine whose driver is in
// a container, as with NVIDIA's GPU Operator: nvidia-uvm is below the container's root only.
func TestDriverContainer(t *testing.T) {
	t.Parallel()
	n := harness.NewNodeInContainer(t, "h100x3")
	s := n.StartSupervisor(t)
	p := n.Run(t)
	var claims []*drapb.Claim
	for name, device := range map[string]harness.Device{
		"whole GPU": {GPU: 0},
		"partition": harness.Partition(1, "1g.10gb", 4),
		"MPS share": {GPU: 2, Kind: harness.MPS, Memory: 10 << 30, Percent: 25},
	} {
		claim := n.Allocate(t, []harness.Device{device})
		ids := p.MustPrepare(t, claim)
		claims = append(claims, claim)
		for _, node := range nodesOfHost(t, n, claim) {
			if !strings.HasPrefix(node, n.DriverRoot()+"/dev/") {
				t.Errorf("%s: containers get %s, want it from %s", name, node, n.DriverRoot())
			}
			// Those of capabilities are nowhere here: their numbers are enough.
			if _, err := os.Stat(node); (err == nil) == strings.Contains(node, "nvidia-caps") {
				t.Errorf("%s: device node %s: %v", name, node, err)
			}
		}
		var says []string
		if device.Kind == harness.MPS {
			says = []string{"as a client"}
		}
		wantOutput(t, n, n.Container(t, ids...), says, "info")
	}
	p.WantLog(t, `folder="`+n.DriverRoot()+`/dev"`)
	s.WantLog(t, `folder="`+n.DriverRoot()+`/dev"`)
	p.MustUnprepare(t, claims...)
	n.WantClean(t)
}

// nodesOfHost are the device nodes on the host that containers of a claim get.
func nodesOfHost(t *testing.T, n *harness.Node, claim *drapb.Claim) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(n.CDIDir, "*"+claim.GetUid()+"*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("claim %s has the CDI specs %v, %v", claim.GetName(), files, err)
	}
	spec := must.Get(cdi.ReadSpec(files[0], 0))(t)
	edits := spec.ContainerEdits.DeviceNodes
	for _, d := range spec.Devices {
		edits = append(edits, d.ContainerEdits.DeviceNodes...)
	}
	var paths []string
	for _, node := range edits {
		paths = append(paths, node.HostPath)
	}
	return paths
}

// TestDriverContainerRestarts checks that GPUs are found while the container's nodes are
// away, that a claim says then which one is missing, where it was looked for and what to do,
// and that the next one succeeds once they are there.
func TestDriverContainerRestarts(t *testing.T) {
	t.Parallel()
	n := harness.NewNodeInContainer(t, "h100x2")
	dev := filepath.Join(n.DriverRoot(), "dev")
	uvm := filepath.Join(dev, "nvidia-uvm")
	harness.Rename(t, uvm, uvm+".later")
	harness.Rename(t, dev, dev+".later")
	n.StartSupervisor(t)
	p := n.Run(t)
	p.WantLog(t, "no claim can be prepared yet")
	whole, share := n.Allocate(t, []harness.Device{{GPU: 0}}), n.Allocate(t, []harness.Device{{GPU: 1, Kind: harness.MPS}})
	refused := func(claim *drapb.Claim, node, remedy string) {
		t.Helper()
		_, err := p.TryPrepare(t.Context(), claim, harness.KubeletTimeout)
		for _, want := range []string{"the device node " + node + " is neither in " + dev + " nor in /dev on this node", remedy, "GPU Operator"} {
			expect.Says(t, err, want)
		}
	}
	refused(whole, "nvidia0", "nvidia-modprobe -c=0")
	refused(share, "nvidiactl", "nvidia-modprobe -c=0")
	harness.Rename(t, dev+".later", dev)
	refused(whole, "nvidia-uvm", "nvidia-modprobe -u -c=0")
	refused(share, "nvidia-uvm", "nvidia-modprobe -u -c=0")
	harness.Rename(t, uvm+".later", uvm)
	wantOutput(t, n, n.Container(t, p.MustPrepare(t, whole)...), nil, "info")
	wantOutput(t, n, n.Container(t, p.MustPrepare(t, share)...), []string{"as a client"}, "info")
	p.MustUnprepare(t, whole, share)
	n.WantClean(t)
}

// TestDevicesOfTheHost checks what the values for a driver on the host do where it is in a
// container: GPUs are found, and the first claim names what is missing.
func TestDevicesOfTheHost(t *testing.T) {
	t.Parallel()
	n := harness.NewNodeInContainer(t, "h100x1")
	p := n.Run(t, "--dev-root="+n.Root)
	claim := n.Allocate(t, []harness.Device{{GPU: 0}})
	_, err := p.TryPrepare(t.Context(), claim, harness.KubeletTimeout)
	if want := "the device node nvidia-uvm is not in " + n.Root + "/dev on this node"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
}
