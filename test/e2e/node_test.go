//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// simulated is the part of `gpusim show -o json` that the tests look at.
type simulated struct {
	BootID string
	GPUs   []simulatedGPU
}

type simulatedGPU struct {
	PCIAddress  string
	UUID        string
	Minor       int
	ComputeMode string
	TimeSlice   string
	MIG         *struct {
		Enabled   bool
		Instances []struct{ ID int }
	}
}

func showMachine(t *testing.T) simulated {
	t.Helper()
	m, err := readMachine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func readMachine(ctx context.Context) (simulated, error) {
	var m simulated
	out, err := gpusim(ctx, "show", "-o", "json", "--root", machineRoot)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(out, &m); err != nil {
		return m, fmt.Errorf("decoding the output of gpusim show: %w\n%s", err, out)
	}
	return m, nil
}

func gpusim(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(repoRoot, "bin", "gpusim"), args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("gpusim %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return out, nil
}

// checkNothingLeft asserts that nothing outlives the claims: no GPU instance, no
// mode of a GPU, no MPS session, mount, CDI spec or journal file.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, "nothing left on the node", func(context.Context) (bool, string) {
		left := append(leftOnGPUs(t), mountsBelow(mpsDir)...)
		for _, dir := range []string{cdiDir, journalDir} {
			left = append(left, filesIn(dir)...)
		}
		for _, path := range filesIn(mpsDir) {
			// What is not a session is the supervisor's own.
			if info, err := os.Stat(path); err == nil && info.IsDir() {
				left = append(left, path)
			}
		}
		return len(left) == 0, strings.Join(left, "; ")
	})
}

func leftOnGPUs(t *testing.T) []string {
	t.Helper()
	var left []string
	for _, g := range showMachine(t).GPUs {
		// On Ampere the mode is the administrator's.
		if g.MIG != nil && (g.MIG.Enabled != migAtStart[g.PCIAddress] || len(g.MIG.Instances) > 0) {
			left = append(left, fmt.Sprintf("GPU %s: MIG mode %v, %d instances", g.PCIAddress, g.MIG.Enabled, len(g.MIG.Instances)))
		}
		if g.ComputeMode != "DEFAULT" || g.TimeSlice != "default" {
			left = append(left, fmt.Sprintf("GPU %s: compute mode %s, time slice %s", g.PCIAddress, g.ComputeMode, g.TimeSlice))
		}
	}
	return left
}

// filesIn lists a folder that may be absent.
func filesIn(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		return []string{err.Error()}
	}
	paths := make([]string, len(entries))
	for i, e := range entries {
		paths[i] = filepath.Join(dir, e.Name())
	}
	return paths
}

// mountsBelow lists the mount points below a folder of the node.
func mountsBelow(dir string) []string {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	var points []string
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			points = append(points, "mount "+fields[4])
		}
	}
	return points
}
