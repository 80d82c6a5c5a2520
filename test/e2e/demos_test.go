//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// usualMachine is the one of demos that do not name another.
const usualMachine = "dgx-h100"

// demoMachine is the machine of this cluster; demo/run reads the same variable.
func demoMachine() string { return cmp.Or(os.Getenv("DEMO_MACHINE"), usualMachine) }

// TestDemos runs every demo for this machine the way a newcomer does and compares
// what the containers printed with the demo's expected output. Deleting the demo
// must leave the node as it was.
func TestDemos(t *testing.T) {
	found, err := filepath.Glob(filepath.Join(repoRoot, "demo", "*", "demo.yaml"))
	if err != nil || len(found) < 8 {
		t.Fatalf("expected at least 8 demos, found %v (%v)", found, err)
	}
	for _, path := range found {
		folder := filepath.Dir(path)
		name := filepath.Base(folder)
		t.Run(name, func(t *testing.T) {
			machine, err := os.ReadFile(filepath.Join(folder, "machine"))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			if want := cmp.Or(strings.TrimSpace(string(machine)), usualMachine); want != demoMachine() {
				t.Skipf("it is for machine %s", want)
			}
			cmd := exec.CommandContext(t.Context(), filepath.Join(repoRoot, "demo", "run"), name)
			cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
			runErr := cmd.Run()
			if out, err := exec.Command("kubectl", "delete", "-f", path, "--timeout=60s").CombinedOutput(); err != nil {
				t.Errorf("deleting the demo: %v\n%s", err, out)
			}
			if runErr != nil {
				t.Errorf("demo/run %s: %v", name, runErr)
			}
			checkNothingLeft(t)
		})
	}
}

// TestDemosTogether runs all demos at once, as `make demo` does.
func TestDemosTogether(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), filepath.Join(repoRoot, "demo", "run"))
	out, runErr := cmd.CombinedOutput()
	if out, err := exec.Command(filepath.Join(repoRoot, "demo", "run"), "-d").CombinedOutput(); err != nil {
		t.Errorf("demo/run -d: %v\n%s", err, out)
	}
	if runErr != nil {
		t.Errorf("demo/run: %v\n%s", runErr, out)
	}
	checkNothingLeft(t)
}
