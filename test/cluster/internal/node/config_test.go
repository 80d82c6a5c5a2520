// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files")

func TestConfig(t *testing.T) {
	n := Node{
		Name: "n1", Address: netip.MustParseAddr("10.91.0.1"), Pods: netip.MustParsePrefix("10.92.0.0/24"),
		DNS: netip.MustParseAddr("10.96.0.10"), PKI: "/c/pki", Bin: "/c/bin", CNI: "/c/bin/cni",
	}
	kubelet, err := n.kubeletConfig()
	if err != nil {
		t.Fatal(err)
	}
	network, err := n.networkConfig()
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string][]byte{"kubelet.json": kubelet, "network.json": network, "containerd.toml": n.containerdConfig()} {
		t.Run(name, func(t *testing.T) {
			golden := filepath.Join("testdata", name)
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("-want +got (go test -update writes it):\n%s", diff)
			}
		})
	}
}
