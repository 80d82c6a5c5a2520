// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// TestMPSClaims: part B leaves a GPU alone that a claim has, also while the claim's pod uses
// nothing of it, and all GPUs while a claim's record cannot be read.
func TestMPSClaims(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	p := n.Start(t)
	first := n.Allocate(t, []harness.Device{{GPU: 0}})
	p.MustPrepare(t, first)
	out, _, stderr := run(t, n, "--mps")
	if got := part(t, out, "mps.").find(t, "mps.start", n.Address(t, 1)); got.Verdict != "holds" {
		t.Errorf("got %+v: %s", got, stderr)
	}

	before := n.Machine(t)
	out, _, _ = run(t, n, "--mps", "--gpu="+before.GPUs[0].UUID)
	want := "has a device that is prepared for claim default/" + first.GetName()
	if got := part(t, out, "mps.").find(t, "mps.start", ""); got.Verdict != "not testable" || !strings.Contains(got.Reason, want) {
		t.Errorf("got %+v, want no result because %q", got, want)
	}
	p.MustUnprepare(t, first)

	recordClaim(t, n)
	out, _, _ = run(t, n, "--mps")
	want = n.Address(t, 1) + " may be that of claim 0af2, whose record cannot be read"
	if got := part(t, out, "mps.").find(t, "mps.start", ""); !strings.Contains(got.Reason, want) {
		t.Errorf("got %+v, want %q", got, want)
	}
	untouched(t, n, before)
}

// TestMPSLive: while part B uses the GPU, the plugin of the node prepares no claim on it, and
// goes on afterwards.
func TestMPSLive(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	p := n.Start(t)
	claim := n.Allocate(t, []harness.Device{{GPU: 0}})
	fault := n.Inject(t, machine.Fault{Function: "mps_client_alloc", GPU: 0, Times: 1, Hang: true, Effect: machine.Proceed})
	cmd := command(t, n, "--mps", "--limit=5m")
	var stdout bytes.Buffer
	cmd.Stdout = &stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := harness.Eventually(t.Context(), fault.CheckStruck); err != nil {
		t.Fatal(err)
	}
	if ids, err := p.TryPrepare(t.Context(), claim, time.Second); err == nil {
		t.Errorf("a claim was prepared meanwhile: %v", ids)
	}
	fault.Remove(t)
	if err := ignoreExit(cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	if got := part(t, stdout.Bytes(), "mps.").find(t, "mps.quit", n.Address(t, 0)); got.Verdict != "holds" {
		t.Errorf("%+v", got)
	}
	p.MustPrepare(t, claim)
	p.MustUnprepare(t, claim)
}

// TestTwoRuns: a second run that would do more than read says that there is one, and the
// first is not disturbed.
func TestTwoRuns(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	fault := n.Inject(t, machine.Fault{Function: "mps_client_alloc", GPU: 0, Times: 1, Hang: true, Effect: machine.Proceed})
	first := command(t, n, "--mps", "--limit=5m")
	var stdout bytes.Buffer
	first.Stdout = &stdout
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	if err := harness.Eventually(t.Context(), fault.CheckStruck); err != nil {
		t.Fatal(err)
	}
	transcript := filepath.Join(t.TempDir(), "transcript")
	if err := os.WriteFile(transcript, []byte("the first's"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--mps"}, {"--intrusive", "--gpu=" + n.Machine(t).GPUs[1].UUID}} {
		out, code, stderr := run(t, n, append(args, "--transcript="+transcript)...)
		if code != 2 || len(out) > 0 || !strings.Contains(stderr, "another run with --mps or --intrusive is under way on this node") {
			t.Errorf("%s: exit code %d: %s%s", args, code, out, stderr)
		}
	}
	if data, err := os.ReadFile(transcript); err != nil || string(data) != "the first's" {
		t.Errorf("the file of another run has now %q, %v", data, err)
	}
	if out, code, stderr := run(t, n); code > 1 {
		t.Errorf("part A, which only reads, cannot run meanwhile: exit code %d: %s%s", code, out, stderr)
	}
	fault.Remove(t)
	if err := ignoreExit(first.Wait()); err != nil {
		t.Fatal(err)
	}
	if got := part(t, stdout.Bytes(), "mps.").find(t, "mps.quit", n.Address(t, 0)); got.Verdict != "holds" {
		t.Errorf("the first run: %+v", got)
	}
}

// TestIntrusiveExchanged: what a run has changed of a GPU is not undone on another one that
// is in its place now.
func TestIntrusiveExchanged(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	old := n.Machine(t).GPUs[0].UUID
	n.Update(t, func(m *machine.Machine) {
		state.AddFault(m, machine.Fault{Function: "nvmlComputeInstanceDestroy", GPU: 0, Effect: machine.KillBefore, Times: 1})
	})
	if _, code, stderr := run(t, n, "--intrusive", "--gpu="+old); code != -1 {
		t.Fatalf("it was not killed: exit code %d: %s", code, stderr)
	}
	const other = "GPU-0e0e0e0e-0000-4000-8000-0123456789ab"
	n.Update(t, func(m *machine.Machine) { m.Faults, m.GPUs[0].UUID = nil, other })
	before := n.Machine(t)
	for _, gpu := range []string{other, before.GPUs[1].UUID} {
		out, _, stderr := run(t, n, "--intrusive", "--gpu="+gpu)
		got := part(t, out, "intrusive.").find(t, "intrusive.begin", gpu)
		for _, want := range []string{old, other, n.Address(t, 0), undoFile(n)} {
			if got.Verdict != "differs" || !strings.Contains(got.Observed, want) {
				t.Errorf("got %+v, want a difference with %q: %s", got, want, stderr)
			}
		}
		if diff := cmp.Diff(before.GPUs, n.Machine(t).GPUs); diff != "" {
			t.Errorf("the GPUs have changed: -before +after:\n%s", diff)
		}
	}
	if _, err := os.Stat(undoFile(n)); err != nil {
		t.Errorf("what to undo is forgotten: %v", err)
	}
}

// TestHiddenFiles: transcript and patch are where the user wants them, also in the folder
// that the tmpfs for MPS hides.
func TestHiddenFiles(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	work := shortDir(t)
	transcript, patch := filepath.Join(work, "transcript"), filepath.Join(work, "patch.yaml")
	_, code, stderr := run(t, n, "--mps", "--work-dir="+work, "--transcript="+transcript, "--catalogue-patch="+patch)
	if code > 1 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	for path, want := range map[string]string{transcript: `"mps client"`, patch: "name: h100-80-sxm"} {
		if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data), want) {
			t.Errorf("%s lacks %q: %v: %.200s", path, want, err, data)
		}
	}
}

// TestNamesakes: the plugin of the node is nobody to wonder about, while another process of
// the same name is.
func TestNamesakes(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1", persistent)
	p := n.Start(t)
	stranger := namesake(t, n, "gpu-kubelet-plugin")
	persistence := namesake(t, n, "nvidia-persistenced")
	report, _ := examine(t, n)
	got := result(t, report, "holders.others", n.Address(t, 0)).Observed
	for name, pid := range map[string]int{"gpu-kubelet-plu": stranger, "nvidia-persiste": persistence} {
		if want := name + " (" + strconv.Itoa(pid) + ")"; !strings.Contains(got, want) {
			t.Errorf("got %q, want %s among them", got, want)
		}
	}
	if not := "(" + strconv.Itoa(p.Cmd.Process.Pid) + ")"; strings.Contains(got, not) {
		t.Errorf("got %q, which has the plugin %s", got, not)
	}
}

// namesake starts a process with the name that has the device node of the first GPU open, and
// returns its PID.
func namesake(t *testing.T, n *harness.Node, name string) int {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	// Not written here: what another test starts meanwhile would have it open for writing for a
	// moment, and then it could not be run.
	if out, err := exec.CommandContext(t.Context(), "cp", sleep, path).CombinedOutput(); err != nil {
		t.Fatalf("copy %s: %v: %s", sleep, err, out)
	}
	fd, err := unix.Open(filepath.Join(n.Root, "dev/nvidia0"), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	node := os.NewFile(uintptr(fd), "nvidia0")
	defer func() { _ = node.Close() }()
	cmd := exec.CommandContext(t.Context(), path, "infinity")
	cmd.ExtraFiles = []*os.File{node}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}
