// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNewer(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want bool
	}{
		{"2.34", "", true},
		{"2.34", "2.34", false},
		{"2.4", "2.34", false},
		{"2.36", "2.34", true},
		{"2.3.4", "2.3", true},
		{"2.3", "2.3.4", false},
		{"3.0", "2.99", true},
	} {
		if got := Newer(test.a, test.b); got != test.want {
			t.Errorf("Newer(%q, %q) is %t", test.a, test.b, got)
		}
	}
}

// TestNeeds: a program of the system asks for a version, and this machine has it.
func TestNeeds(t *testing.T) {
	needed, err := Needs("/bin/ls")
	here := Here(t.Context())
	if err != nil || needed == "" || here == "" || Newer(needed, here) {
		t.Errorf("/bin/ls needs %q, %v, and this machine has %q", needed, err, here)
	}
	if _, err := Needs("/etc/passwd"); err == nil {
		t.Error("/etc/passwd is no program")
	}
}

// TestCheck: all that does not start is named.
func TestCheck(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{"gpu-kubelet-plugin": "#!/bin/sh\necho too old\nexit 1\n", "hardware-run": "#!/bin/sh\n"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	err := Check(t.Context(), folder)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"gpu-kubelet-plugin does not start: exit status 1: too old", "cuda-probe is not in the bundle"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "hardware-run") {
		t.Errorf("hardware-run starts: %v", err)
	}
	if err := CheckBuilt(t.Context(), folder, 10); err == nil || !strings.Contains(err.Error(), "want at most 10") {
		t.Errorf("a bundle that is too large: got %v", err)
	}
}
