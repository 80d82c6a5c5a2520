// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestClaimsInUse: the exit code and the output are what the chart's guard goes by.
func TestClaimsInUse(t *testing.T) {
	const used = `{"metadata": {"namespace": "team", "name": "training"}, "status": {
		"allocation": {"devices": {"results": [{"request": "gpu", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0000-1b-00-0"}]}},
		"reservedFor": [{"resource": "pods", "name": "training-0", "uid": "1"}]}}`
	for name, test := range map[string]struct {
		items, stdout, stderr string
		code                  int
	}{
		"none": {},
		"one": {
			items: used, code: 1, stderr: "gpu-kubelet-plugin: claims are in use\n",
			stdout: "claims with devices of gpu.nvidia.com that are in use: 1\n" +
				"  node n1: claim team/training has gpu-0000-1b-00-0, used by pod training-0\n" +
				"Delete the pods that use them first: a pod that ends while no plugin runs on its node stays in Terminating.\nTo uninstall all the same: …\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/apis/resource.k8s.io/v1/resourceclaims" {
					t.Errorf("asked for %s", r.URL)
				}
				w.Header().Set("Content-Type", "application/json")
				_, _ = fmt.Fprintf(w, `{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimList", "items": [%s]}`, test.items)
			}))
			defer server.Close()
			kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
			content := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "c", "cluster": {"server": %q}}],
				"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`, server.URL)
			if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			var stdout, stderr strings.Builder
			code := run([]string{name, "claims-in-use", "--kubeconfig", kubeconfig, "--advice", "To uninstall all the same: …"}, &stdout, &stderr)
			if code != test.code || stdout.String() != test.stdout || stderr.String() != test.stderr {
				t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout.String(), stderr.String())
			}
		})
	}
}
