// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/cluster/internal/pki"
)

// Every file of keys that a component is told of must be one that Keys makes.
func TestArgsNameKeysThatExist(t *testing.T) {
	dir := t.TempDir()
	c := ControlPlane{Address: netip.MustParseAddr("10.91.0.1"), PKI: filepath.Join(dir, "pki"), Data: filepath.Join(dir, "data")}
	a, err := pki.New(c.PKI)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Keys(a, filepath.Join(dir, "admin")); err != nil {
		t.Fatal(err)
	}
	for name, args := range c.args() {
		for _, arg := range args {
			_, value, _ := strings.Cut(arg, "=")
			if !strings.HasPrefix(value, c.PKI) {
				continue
			}
			if _, err := os.Stat(value); err != nil {
				t.Errorf("%s %s: %v", name, arg, err)
			}
		}
	}
}

func TestFeatureGatesReachAllOfKubernetes(t *testing.T) {
	c := ControlPlane{FeatureGates: "A=true", RuntimeConfig: "x/v1=true"}
	for name, args := range c.args() {
		if got, want := slices.Contains(args, "--feature-gates=A=true"), name != etcd; got != want {
			t.Errorf("%s has the gates: %v, want %v", name, got, want)
		}
		if got, want := slices.Contains(args, "--runtime-config=x/v1=true"), name == apiserver; got != want {
			t.Errorf("%s has the runtime config: %v, want %v", name, got, want)
		}
	}
}
