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
	"slices"
	"strings"
	"testing"
)

// simulated is the part of `gpusim show -o json` that the tests use.
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
		Instances []struct{ ID, Start int }
	}
}

// deviceName returns the name of the GPU's device, with which the names of its partitions, shares and MPS sessions begin.
func (g simulatedGPU) deviceName() string {
	return "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(g.PCIAddress)
}

// showMachine returns the simulated machine as it is now.
func showMachine(t *testing.T) simulated {
	t.Helper()
	m, err := readMachine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func readMachine(ctx context.Context) (simulated, error) {
	out, err := gpusim(ctx, "show", "-o", "json", "--root", machineRoot)
	if err != nil {
		return simulated{}, err
	}
	return decodeMachine(out)
}

func decodeMachine(out []byte) (simulated, error) {
	var m simulated
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

// checkNothingLeft waits until nothing outlives the claims of the node: no GPU instance, no changed
// mode of a GPU, no MPS session, mount, CDI spec or journal file.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, "nothing left on the node", func(ctx context.Context) (bool, string) {
		return nothing(leftOnNode(ctx))
	})
}

// nothing is the condition that a list of leftovers is empty.
func nothing(left []string, err error) (bool, string) {
	if err != nil {
		return false, err.Error()
	}
	return len(left) == 0, strings.Join(left, "; ")
}

// leftOnNode names what is left of any claim.
func leftOnNode(ctx context.Context) ([]string, error) {
	machine, err := readMachine(ctx)
	if err != nil {
		return nil, err
	}
	left := slices.Concat(changedModes(machine.GPUs), mountsBelow(mpsDir), filesIn(cdiDir), filesIn(limitsDir), records())
	return append(left, mpsSessions()...), nil
}

// leftBy names what is left of claims, by UID, and on the GPUs that they used.
func leftBy(ctx context.Context, gpus []simulatedGPU, claims []string) ([]string, error) {
	machine, err := readMachine(ctx)
	if err != nil {
		return nil, err
	}
	used := slices.DeleteFunc(machine.GPUs, func(g simulatedGPU) bool {
		return !slices.ContainsFunc(gpus, func(own simulatedGPU) bool { return own.UUID == g.UUID })
	})
	left := changedModes(used)
	for _, path := range slices.Concat(filesIn(cdiDir), filesIn(limitsDir), records()) {
		if slices.ContainsFunc(claims, func(uid string) bool { return strings.Contains(path, uid) }) {
			left = append(left, path)
		}
	}
	for _, path := range append(mpsSessions(), mountsBelow(mpsDir)...) {
		if slices.ContainsFunc(used, func(g simulatedGPU) bool { return strings.Contains(path, g.deviceName()) }) {
			left = append(left, path)
		}
	}
	return left, nil
}

// released is in files that say only when a claim was released.
const released = " state=released "

// records lists the files of records, without those.
func records() []string {
	return slices.DeleteFunc(filesIn(recordsDir), func(path string) bool {
		content, err := os.ReadFile(path)
		return os.IsNotExist(err) || strings.Contains(string(content), released)
	})
}

// mpsSessions lists the folders of MPS sessions. The files beside them are the supervisor's own.
func mpsSessions() []string {
	return slices.DeleteFunc(filesIn(mpsDir), func(path string) bool {
		info, err := os.Stat(path)
		return err == nil && !info.IsDir()
	})
}

// changedModes names the GPUs that are not as an unused GPU is.
func changedModes(gpus []simulatedGPU) []string {
	var changed []string
	for _, g := range gpus {
		// On Ampere the MIG mode is the administrator's.
		if g.MIG != nil && (g.MIG.Enabled != migAtStart[g.PCIAddress] || len(g.MIG.Instances) > 0) {
			changed = append(changed, fmt.Sprintf("GPU %s: MIG mode %v, %d instances", g.PCIAddress, g.MIG.Enabled, len(g.MIG.Instances)))
		}
		if g.ComputeMode != "DEFAULT" || g.TimeSlice != "default" {
			changed = append(changed, fmt.Sprintf("GPU %s: compute mode %s, time slice %s", g.PCIAddress, g.ComputeMode, g.TimeSlice))
		}
	}
	return changed
}

// filesIn lists the files of a folder, which may be absent.
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
