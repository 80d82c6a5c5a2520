//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// usualMachine is the machine of demos that do not name another.
const usualMachine = "dgx-h100"

// demoMachine returns the machine of this cluster; demo/run reads the same variable.
func demoMachine() string { return cmp.Or(os.Getenv("DEMO_MACHINE"), usualMachine) }

// TestDemosOneByOne runs every demo for this machine by itself, compares what the containers print with the demo's expected output, and
// checks that nothing is left when the demo is deleted. It is for `make test-all`: TestDemosTogether has the same demos.
func TestDemosOneByOne(t *testing.T) {
	if os.Getenv("PARTAGE_TEST_ALL") == "" {
		t.Skip("only with PARTAGE_TEST_ALL=1")
	}
	for _, path := range demoManifests(t) {
		folder := filepath.Dir(path)
		name := filepath.Base(folder)
		t.Run(name, func(t *testing.T) {
			if want := demoFile(t, folder, "machine", usualMachine); want != demoMachine() {
				t.Skipf("it is for machine %s", want)
			}
			cmd := demoRun(t, name)
			cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
			runErr := cmd.Run()
			if out, err := exec.Command("kubectl", "delete", "-f", path, "--timeout="+waitLimit.String()).CombinedOutput(); err != nil {
				t.Errorf("deleting the demo: %v\n%s", err, out)
			}
			if runErr != nil {
				t.Errorf("demo/run %s: %v", name, runErr)
			}
			checkNothingLeft(t)
		})
	}
}

// demoManifests returns the manifests of all demos.
func demoManifests(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(repoRoot, "demo", "*", "demo.yaml"))
	if err != nil || len(found) < 8 {
		t.Fatalf("expected at least 8 demos, found %v (%v)", found, err)
	}
	return found
}

// demoFile returns what a file of a demo's folder says, and otherwise when it is not there.
func demoFile(t *testing.T, folder, name, otherwise string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return cmp.Or(strings.TrimSpace(string(content)), otherwise)
}

// TestDemosTogether runs all demos for this machine at once, as `make demo` does, and checks that nothing is left when they are deleted.
func TestDemosTogether(t *testing.T) {
	reserveNode(t)
	out, runErr := demoRun(t).CombinedOutput()
	if out, err := demoRun(t, "-d").CombinedOutput(); err != nil {
		t.Errorf("demo/run -d: %v\n%s", err, out)
	}
	if runErr != nil {
		t.Errorf("demo/run: %v\n%s", runErr, out)
	}
}

// demoRun returns the command demo/run, with a limit that a busy machine does not reach.
func demoRun(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(repoRoot, "demo", "run"), args...)
	cmd.Env = append(os.Environ(), fmt.Sprintf("DEMO_READY_TIMEOUT=%.0f", waitLimit.Seconds()),
		"DEMO_OUTPUT_TIMEOUT=60", fmt.Sprintf("DEMO_DELETE_TIMEOUT=%.0f", waitLimit.Seconds()))
	return cmd
}
