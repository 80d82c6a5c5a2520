// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// untouched fails if the machine is not as it was.
func untouched(t *testing.T, n *harness.Node, before *machine.Machine) {
	t.Helper()
	after := n.Machine(t)
	if len(after.Processes) > len(before.Processes) {
		t.Errorf("processes are left: %+v", after.Processes)
	}
	if diff := cmp.Diff(before.GPUs, after.GPUs); diff != "" {
		t.Errorf("the GPUs have changed: -before +after:\n%s", diff)
	}
}

// TestMPS: part B on a machine without troubles, and the same report from its transcript.
func TestMPS(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	before := n.Machine(t)
	transcript := filepath.Join(t.TempDir(), "transcript")
	out, code, stderr := run(t, n, "--mps", "--transcript="+transcript)
	if code > 1 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	live := part(t, out, "mps.")
	untouched(t, n, before)

	replayed, _, stderr := run(t, n, "--replay="+transcript)
	if diff := cmp.Diff(live, part(t, replayed, "mps.")); diff != "" {
		t.Errorf("replayed: -live +replayed:\n%s%s", diff, stderr)
	}
	golden(t, "mps.json", live)
}

// TestMPSTroubles: what goes wrong is found where it is, and everything else still is
// examined.
func TestMPSTroubles(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2", func(m *machine.Machine) {
		m.Processes = append(m.Processes, machine.Process{PID: 4711, Name: "train", GPU: 0, InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30})
		m.MPS.NoPriorities = true
	})
	for _, f := range []machine.Fault{
		{Function: "mps_terminate_client", GPU: 1, Effect: machine.Fail},
		{Function: "mps_get_client_list", GPU: 1, Effect: machine.Fail, Times: 1},
	} {
		n.Update(t, func(m *machine.Machine) { state.AddFault(m, f) })
	}
	before := n.Machine(t)
	out, code, stderr := run(t, n, "--mps")
	if code != 1 {
		t.Errorf("exit code %d, want 1: %s", code, stderr)
	}
	r := part(t, out, "mps.")
	if got := r.find(t, "mps.start", n.Address(t, 1)); got.Verdict != "holds" {
		t.Errorf("started on another GPU than the one that nobody uses: %+v", got)
	}
	for _, want := range []struct{ check, subject, text string }{
		{"mps.client-priority", "", "Unknown command: get_default_client_priority"},
		{"mps.answers", "get_client_list SERVER", "Failed to execute get_client_list"},
		{"mps.ends", "terminate_client, then SIGKILL", "Failed to execute terminate_client"},
	} {
		if got := r.find(t, want.check, want.subject); got.Verdict != "differs" || !strings.Contains(got.Observed, want.text) {
			t.Errorf("got %+v, want a difference with %q", got, want.text)
		}
	}
	if got := r.find(t, "mps.ends", "SIGKILL in the middle of its work"); got.Verdict == "not testable" {
		t.Errorf("what came after the fault was not examined: %+v", got)
	}
	untouched(t, n, before)
}

// TestMPSNothingFree: part B leaves GPUs alone that somebody uses, or that are not in
// compute mode DEFAULT, as those of MPS sessions.
func TestMPSNothingFree(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2", func(m *machine.Machine) {
		m.GPUs[0].ComputeMode = 3 // EXCLUSIVE_PROCESS
		m.Processes = append(m.Processes, machine.Process{PID: 4711, Name: "train", GPU: 1, InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30})
	})
	before := n.Machine(t)
	out, code, stderr := run(t, n, "--mps")
	if want := exitCode(t, out); code != want {
		t.Errorf("exit code %d, want %d: %s", code, want, stderr)
	}
	r := part(t, out, "mps.")
	if len(r.Results) != r.count("not testable") {
		t.Errorf("something was examined: %+v", r)
	}
	got := r.find(t, "mps.start", "")
	for _, want := range []string{n.Address(t, 0) + " is in compute mode EXCLUSIVE_PROCESS", n.Address(t, 1) + " is used by 1 processes"} {
		if !strings.Contains(got.Reason, want) {
			t.Errorf("reason %q lacks %q", got.Reason, want)
		}
	}
	untouched(t, n, before)
}

// TestMPSServerDoesNotStart: a server that hangs costs one limit, not one for each check,
// and nothing of it stays.
func TestMPSServerDoesNotStart(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	n.Update(t, func(m *machine.Machine) {
		state.AddFault(m, machine.Fault{Function: "mps_server_start", GPU: 0, Effect: machine.Proceed, Hang: true})
	})
	before := n.Machine(t)
	out, code, stderr := run(t, n, "--mps", "--limit=2s")
	if code == 0 {
		t.Errorf("exit code 0: %s", stderr)
	}
	r := part(t, out, "mps.")
	if got := r.count("holds"); got != 0 {
		t.Errorf("%d results hold: %+v", got, r)
	}
	if got := r.find(t, "mps.start", n.Address(t, 0)); !strings.Contains(got.Reason, "no answer in 2s") {
		t.Errorf("got %+v", got)
	}
	if left := leftProcesses(t, n.Root); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	n.Update(t, func(m *machine.Machine) { m.Faults = nil })
	before.Faults = nil
	untouched(t, n, before)
}

// leftProcesses are those whose program is below a root.
func leftProcesses(t *testing.T, root string) []string {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(links, func(link string) bool {
		program, err := os.Readlink(link)
		return err != nil || !strings.HasPrefix(program, root+"/")
	})
}
