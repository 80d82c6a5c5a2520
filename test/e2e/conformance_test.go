//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestNodeConformance: the conformance command in the plugin's pod, on a GPU without claims. The
// container runtime gives a partition to a container of the command, although the kubelet ends
// pods that it does not know; and all is as before.
func TestNodeConformance(t *testing.T) {
	uuid := showMachine(t).GPUs[0].UUID
	cmd := exec.CommandContext(t.Context(), "kubectl", "exec", "-n", driverNamespace, driverPod(t, pluginComponent).Name, "--",
		"/usr/bin/gpu-kubelet-plugin", "conformance", "--output=json", "--intrusive", "--gpu="+uuid)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var report struct {
		Results []struct{ Check, Subject, Observed, Verdict, Reason string }
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("%v\n%s%s", err, out, stderr.String())
	}
	held := map[string]int{}
	for _, r := range report.Results {
		switch r.Check {
		case "intrusive.begin", "intrusive.partitions", "intrusive.pod", "intrusive.as-before":
		default:
			continue
		}
		if r.Verdict != "holds" {
			t.Errorf("%+v", r)
			continue
		}
		held[r.Check]++
		if r.Check == "intrusive.pod" {
			t.Log(r.Observed)
		}
	}
	if len(held) != 4 {
		t.Errorf("not all was examined: %v\n%s", held, stderr.String())
	}
	left := filepath.Join(pluginDir, "conformance", "undo.json")
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("there is something to undo in %s: %v", left, err)
	}
	if specs, err := filepath.Glob(filepath.Join(cdiDir, "*partage-conformance*")); err != nil || len(specs) > 0 {
		t.Errorf("CDI specs are left: %v, %v", specs, err)
	}
}
