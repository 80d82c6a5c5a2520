// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package boot

import (
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/machine"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
)

// Each node must find its own part, its keys and its neighbours in what was written for all.
func TestPlan(t *testing.T) {
	n1 := sandbox.Host{Name: "n1", Address: netip.MustParseAddr("10.91.0.1"), Pods: netip.MustParsePrefix("10.92.0.0/24")}
	n2 := sandbox.Host{Name: "n2", Address: netip.MustParseAddr("10.91.0.2"), Pods: netip.MustParsePrefix("10.92.1.0/24")}
	plan := Plan{
		Root: t.TempDir(), Cluster: "a", Network: netip.MustParsePrefix("10.91.0.0/24"),
		Nodes: []Node{{Host: n1, Machine: &machine.Machine{Name: "dgx-h100"}}, {Host: n2}},
	}
	files, err := layout.Repo{Root: plan.Root}.Cluster(plan.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(files.Run(), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := plan.Write(); err != nil {
		t.Fatal(err)
	}
	read, err := readPlan(files.Plan())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(plan, read, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Errorf("-written +read:\n%s", diff)
	}
	for self, peer := range map[string]string{"n1": "n2", "n2": "n1"} {
		n, err := read.node(self)
		if err != nil {
			t.Fatal(err)
		}
		network := read.network(n)
		if network.Self.Name != self || len(network.Peers) != 1 || network.Peers[0].Name != peer || network.Server != n1.Address {
			t.Errorf("network of %s: %+v", self, network)
		}
		kube := read.kubeNode(files, n)
		if kube.API != n1.Address {
			t.Errorf("node %s looks for the API server at %s", self, kube.API)
		}
		for _, dir := range []string{files.Node(self).Run(), files.Node(self).Logs(), files.ControlPlane(), files.PKI()} {
			if _, err := os.Stat(dir); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := read.node("n3"); err == nil {
		t.Error("there is a node that was not planned")
	}
}
