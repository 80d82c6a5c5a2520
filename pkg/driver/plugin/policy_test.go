// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// goodPolicy is a policy file in which everything has n clients.
func goodPolicy(n string) string {
	return "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\ndefault:\n  mps: {clients: " + n + "}\n"
}

// TestPolicyFile follows a file through its life: it may come late, change, be
// wrong and be right again.
func TestPolicyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := NewPolicyFile(path, 0)
	if p, err := f.Read(t.Context()); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("absent file: %v, %v", p, err)
	}
	write(goodPolicy("3"))
	first, err := f.Read(t.Context())
	if err != nil || first.Default.MPS.Clients != 3 {
		t.Fatalf("good file: %+v, %v", first, err)
	}
	if again, err := f.Read(t.Context()); err != nil || again != first {
		t.Errorf("an unchanged file gives another policy: %v, %v", again, err)
	}
	write(goodPolicy("0"))
	for range 2 {
		if p, err := f.Read(t.Context()); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "clients") {
			t.Errorf("wrong file: %v, %v", p, err)
		}
	}
	write("")
	if p, err := f.Read(t.Context()); err == nil {
		t.Errorf("an empty file is taken for %v", p)
	}
	write(goodPolicy("5"))
	if p, err := f.Read(t.Context()); err != nil || p.Default.MPS.Clients != 5 {
		t.Errorf("corrected file: %+v, %v", p, err)
	}
}

func TestNoPolicyFile(t *testing.T) {
	f := NewPolicyFile("", time.Minute)
	first, err := f.Read(t.Context())
	if err != nil || !first.Default.Whole || first.Default.MPS == nil {
		t.Fatalf("without a file: %+v, %v", first, err)
	}
	if again, _ := f.Read(t.Context()); again != first {
		t.Error("the built-in policy is another one every time")
	}
}
