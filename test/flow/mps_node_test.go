// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/pkg/mps"
)

// sessions are the MPS sessions as the supervisor has them, by ID.
func (n *node) sessions(t testing.TB) map[string]mps.Status {
	t.Helper()
	client, err := mps.NewClient(filepath.Join(n.mps, mps.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	all, err := client.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sessions := map[string]mps.Status{}
	for _, s := range all {
		sessions[s.Spec.ID] = s
	}
	return sessions
}

// policy writes a SharingPolicy and returns the flag that names it.
func (n *node) policy(t testing.TB, text string) (flag string) {
	t.Helper()
	path := filepath.Join(filepath.Dir(n.root), "policy.yaml")
	const header = "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n"
	// As the kubelet does it: a reader has the old one or the new one.
	if err := os.WriteFile(path+".new", []byte(header+text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	return "--policy-file=" + path
}

// interposer makes a library as an operator may have one, and returns the flag
// that names it.
func (n *node) interposer(t testing.TB) (flag string) {
	t.Helper()
	path := filepath.Join(filepath.Dir(n.root), "libvgpu.so")
	if err := os.WriteFile(path, []byte("a library\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return "--interposer-library=" + path
}
