//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestNeighboursSuites applies manifests of the suites of NVIDIA's DRA driver, unmodified, and looks at what those suites look at: that the
// pods become ready, and how many devices their containers see.
func TestNeighboursSuites(t *testing.T) {
	if suite != neighboursSuite {
		t.Skip("needs the sources of suite " + neighboursSuite)
	}
	ns := reserveNode(t)
	manifests := []struct {
		file    string
		devices int
	}{
		{"gpu-simple-full", 1},
		{"gpu-1pod-2cnt-1gpu", 1},
		{"gpu-2pods-1gpu", 1},
		{"gpu-2pods-2gpus", 2},
		{"gpu-two-claims-one-pod", 2},
		{"gpu-timeslicing", 1},
		{"gpu-mps", 1},
		{"gpu-anymig", 1},
		{"gpu-simple-mig", 1},
		{"gpu-simple-mig-ts", 1},
		{"gpu-multiple-mig", 2},
	}
	for _, test := range manifests {
		file := filepath.Join(repoRoot, neighboursDir, "src/dra-driver-nvidia-gpu/tests/bats/specs", test.file+".yaml")
		kubectl(t, "apply", "--namespace", ns, "--filename", file)
		kubectl(t, "wait", "--namespace", ns, "--for", "condition=Ready", "pods", "--all", "--timeout", waitLimit.String())
		out, err := exec.CommandContext(t.Context(), "kubectl", "logs", "--namespace", ns, "--selector", "env=batssuite", "--all-containers").Output()
		if err != nil {
			t.Fatalf("logs of %s: %v", test.file, err)
		}
		seen := migUUID.FindAllString(string(out), -1)
		if strings.Contains(test.file, "mig") == (len(seen) == 0) {
			t.Errorf("%s: containers see\n%s", test.file, out)
		}
		if len(seen) == 0 {
			seen = gpuUUID.FindAllString(string(out), -1)
		}
		slices.Sort(seen)
		if seen = slices.Compact(seen); len(seen) != test.devices {
			t.Errorf("%s: containers see the devices %q, want %d", test.file, seen, test.devices)
		}
		removePods(t, ns)
		kubectl(t, "delete", "--namespace", ns, "--filename", file, "--ignore-not-found")
		untilDeallocated(t, ns)
	}
	record(t, "NVIDIA DRA driver, manifests of its suites", fmt.Sprintf("%d of them run as they are: whole GPUs, time-slicing, MPS and partitions", len(manifests)))
}
