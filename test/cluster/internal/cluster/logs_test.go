// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

func TestFindLog(t *testing.T) {
	c, err := layout.Repo{Root: t.TempDir()}.Cluster("a")
	if err != nil {
		t.Fatal(err)
	}
	for _, log := range []string{c.Log("etcd"), c.Node("n1").Log("kubelet"), c.Node("n2").Log("kubelet"), c.Node("n1").Log("gpusim")} {
		if err := os.MkdirAll(filepath.Dir(log), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(log, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct{ node, component, want, err string }{
		{"", "etcd", c.Log("etcd"), ""},
		{"", "gpusim", c.Node("n1").Log("gpusim"), ""},
		{"n2", "kubelet", c.Node("n2").Log("kubelet"), ""},
		{"", "n2/kubelet", c.Node("n2").Log("kubelet"), ""},
		{"", "kubelet", "", "n1/kubelet, n2/kubelet"},
		{"n2", "gpusim", "", "no log"},
		{"n1", "etcd", "", "no log"},
		{"", "none", "", "etcd"},
	} {
		got, err := FindLog(c, tc.node, tc.component)
		if got != tc.want || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("log of %q on node %q: %s, %v; want %s, %q", tc.component, tc.node, got, err, tc.want, tc.err)
		}
	}
}
