// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// intrude runs the intrusive part on a GPU of the node.
func intrude(t *testing.T, n *harness.Node, gpu int, args ...string) partReport {
	t.Helper()
	return finished(t, n, "intrusive.", append([]string{"--intrusive", "--gpu=" + n.Machine(t).GPUs[gpu].UUID}, args...)...)
}

// undoFile is how a GPU was, while the intrusive part changes it.
func undoFile(n *harness.Node) string {
	return filepath.Join(n.PluginsDir, harness.DriverName, "conformance/undo.json")
}

// asBefore fails if the intrusive part has left something.
func asBefore(t *testing.T, n *harness.Node, before *machine.Machine) {
	t.Helper()
	untouched(t, n, before)
	if _, err := os.Stat(undoFile(n)); !os.IsNotExist(err) {
		t.Errorf("there still is something to undo: %v", err)
	}
}

// TestIntrusive: the intrusive part on a GPU whose MIG mode follows the claims, and the same report
// from its transcript.
func TestIntrusive(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	before := n.Machine(t)
	transcript := filepath.Join(t.TempDir(), "transcript")
	live := intrude(t, n, 1, "--transcript="+transcript)
	asBefore(t, n, before)
	replays(t, n, transcript, "intrusive.", live)
	golden(t, "intrusive.json", live)
}

// recordClaim makes a record of a claim, as the driver has of those that it prepares.
func recordClaim(t *testing.T, n *harness.Node) {
	t.Helper()
	must.Do(t, os.MkdirAll(n.RecordsDir(), 0o700))
	must.Do(t, os.WriteFile(filepath.Join(n.RecordsDir(), "0af2."+n.Machine(t).BootID), []byte("{}"), 0o600))
}

// exitCode is what a report wants where nothing could be decided of one of the parts.
func exitCode(t *testing.T, out []byte) int {
	t.Helper()
	if part(t, out, "").count("differs") > 0 {
		return 1
	}
	return 2
}

// TestIntrusiveRefuses: a GPU that somebody uses, or a node with claims, is not changed.
func TestIntrusiveRefuses(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		prepare func(t *testing.T, n *harness.Node)
		want    string
		typo    string
	}{
		"no such GPU": {func(*testing.T, *harness.Node) {}, "there is no GPU GPU-", "0"},
		"processes": {func(t *testing.T, n *harness.Node) {
			n.Update(t, func(m *machine.Machine) {
				m.Processes = append(m.Processes, machine.Process{PID: 4711, Name: "train", GPU: 0, InstanceID: -1, ComputeID: -1})
			})
		}, "the GPU is used by 1 processes", ""},
		"claims": {func(t *testing.T, n *harness.Node) {
			recordClaim(t, n)
		}, "1 claims are prepared on this node, the first is 0af2: drain it", ""},
		"a compute mode": {func(t *testing.T, n *harness.Node) {
			n.Update(t, func(m *machine.Machine) { m.GPUs[0].ComputeMode = 3 })
		}, "the GPU is in compute mode EXCLUSIVE_PROCESS", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100-80-sxmx1")
			test.prepare(t, n)
			before := n.Machine(t)
			out, code, stderr := run(t, n, "--intrusive", "--gpu="+before.GPUs[0].UUID+test.typo)
			expect.Equal(t, code, exitCode(t, out), "exit code", stderr)
			r := part(t, out, "intrusive.")
			if r.count("not testable") != len(r.Results) || !strings.Contains(r.Results[0].Reason, test.want) {
				t.Errorf("got %+v, want no result and %q", r, test.want)
			}
			asBefore(t, n, before)
		})
	}
}

// TestIntrusiveTroubles: a profile that cannot be made is a difference, and nothing of the
// attempt stays.
func TestIntrusiveTroubles(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	before := n.Machine(t)
	n.Inject(t, machine.Fault{Function: "nvmlGpuInstanceCreateComputeInstance", GPU: 0, Effect: machine.Fail, Code: 23, Times: 1}) // insufficient resources
	r := intrude(t, n, 0)
	expect.Equal(t, r.count("differs"), 1, "differences", r)
	r.wantHolds(t, n.Address(t, 0), "intrusive.as-before")
	n.Update(t, func(m *machine.Machine) { m.Faults = nil })
	asBefore(t, n, before)
}
