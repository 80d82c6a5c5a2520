// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package conformance tests the command that examines a node, on simulated machines.
package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/partage-dev/partage/pkg/conformance"
	"github.com/partage-dev/partage/test/flow/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// examine runs the command on the node and returns its report and exit code.
func examine(t *testing.T, n *harness.Node, flags ...string) (*conformance.Report, int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), harness.Built.Driver, append([]string{
		"--node-name=" + harness.NodeName, "--kubeconfig=" + n.Kubeconfig, "--driver-root=" + n.Root,
		"--proc-root=" + n.Root + "/proc", "--sys-root=" + n.Root + "/sys", "--cdi-root=" + n.CDIDir, "--mps-dir=" + n.MPSDir,
		"--kubelet-plugins-dir=" + n.PluginsDir,
		"conformance", "--output=json",
	}, flags...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var report conformance.Report
	if err := json.Unmarshal(stdout.Bytes(), &report); err != nil {
		t.Fatalf("%v\n%s%s", err, stdout.String(), stderr.String())
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s%s", stdout.String(), stderr.String())
		}
	})
	return &report, cmd.ProcessState.ExitCode()
}

// result returns the only result of a check about a subject.
func result(t *testing.T, r *conformance.Report, check, subject string) conformance.Result {
	t.Helper()
	var found []conformance.Result
	for _, result := range r.Results {
		if result.Check == check && result.Subject == subject {
			found = append(found, result)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d results of %s about %q: %+v", len(found), check, subject, found)
	}
	return found[0]
}
