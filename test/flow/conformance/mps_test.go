// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// untouched fails if the machine is not as it was.
func untouched(t *testing.T, n *harness.Node, before *machine.Machine) {
	t.Helper()
	after := n.Machine(t)
	if len(after.Processes) > len(before.Processes) {
		t.Errorf("processes are left: %+v", after.Processes)
	}
	expect.Same(t, after.GPUs, before.GPUs, "the GPUs have changed")
}

// TestMPS: the part mps on a machine without troubles, and the same report from its transcript.
func TestMPS(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	before := n.Machine(t)
	transcript := filepath.Join(t.TempDir(), "transcript")
	live := finished(t, n, "mps.", "--mps", "--transcript="+transcript)
	untouched(t, n, before)
	replays(t, n, transcript, "mps.", live)
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
	expect.Equal(t, code, 1, "exit code", stderr)
	r := part(t, out, "mps.")
	r.wantHolds(t, n.Address(t, 1), "mps.start")
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

// TestMPSNothingFree: the part mps leaves GPUs alone that somebody uses, or that are not in
// compute mode DEFAULT, as those of MPS sessions.
func TestMPSNothingFree(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2", func(m *machine.Machine) {
		m.GPUs[0].ComputeMode = 3 // EXCLUSIVE_PROCESS
		m.Processes = append(m.Processes, machine.Process{PID: 4711, Name: "train", GPU: 1, InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30})
	})
	before := n.Machine(t)
	out, code, stderr := run(t, n, "--mps")
	expect.Equal(t, code, exitCode(t, out), "exit code", stderr)
	r := part(t, out, "mps.")
	expect.Equal(t, len(r.Results), r.count("not testable"), "something was examined", r)
	got := r.find(t, "mps.start", "")
	for _, want := range []string{n.Address(t, 0) + " is in compute mode EXCLUSIVE_PROCESS", n.Address(t, 1) + " is used by 1 processes"} {
		expect.Contains(t, got.Reason, want, "reason")
	}
	untouched(t, n, before)
}

// TestMPSServerDoesNotStart: a server that hangs costs one limit, not one for each check,
// and nothing of it stays.
func TestMPSServerDoesNotStart(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	n.Inject(t, machine.Fault{Function: "mps_server_start", GPU: 0, Effect: machine.Proceed, Hang: true})
	before := n.Machine(t)
	out, code, stderr := run(t, n, "--mps", "--limit=2s")
	if code == 0 {
		t.Errorf("exit code 0: %s", stderr)
	}
	r := part(t, out, "mps.")
	expect.Equal(t, r.count("holds"), 0, "results hold", r)
	if got := r.find(t, "mps.start", n.Address(t, 0)); !strings.Contains(got.Reason, "no answer in 2s") {
		t.Errorf("got %+v", got)
	}
	expect.Len(t, leftProcesses(t, n.Root), 0, "processes are left")
	n.Update(t, func(m *machine.Machine) { m.Faults = nil })
	before.Faults = nil
	untouched(t, n, before)
}

// leftProcesses are those whose program is below a root.
func leftProcesses(t *testing.T, root string) []string {
	t.Helper()
	links := must.Get(filepath.Glob("/proc/[0-9]*/exe"))(t)
	return slices.DeleteFunc(links, func(link string) bool {
		program, err := os.Readlink(link)
		return err != nil || !strings.HasPrefix(program, root+"/")
	})
}

// TestMPSClaims: the part mps leaves a GPU alone that a claim has, also while the claim's pod uses
// nothing of it, and all GPUs while a claim's record cannot be read.
func TestMPSClaims(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100-80-sxmx2")
	first, _ := p.NewClaim(t, n, harness.Device{GPU: 0})
	out, _, _ := run(t, n, "--mps")
	part(t, out, "mps.").wantHolds(t, n.Address(t, 1), "mps.start")

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

// TestTwoRuns: a second run that would do more than read says that there is one, and the
// first is not disturbed.
func TestTwoRuns(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2")
	transcript := filepath.Join(t.TempDir(), "transcript")
	must.Do(t, os.WriteFile(transcript, []byte("the first's"), 0o600))
	first := during(t, n, machine.Fault{Function: "mps_client_alloc", GPU: 0, Times: 1}, func(*exec.Cmd) {
		for _, args := range [][]string{{"--mps"}, {"--intrusive", "--gpu=" + n.Machine(t).GPUs[1].UUID}} {
			out, code, stderr := run(t, n, append(args, "--transcript="+transcript)...)
			if code != 2 || len(out) > 0 || !strings.Contains(stderr, "another run with --mps or --intrusive is under way on this node") {
				t.Errorf("%s: exit code %d: %s%s", args, code, out, stderr)
			}
		}
		expect.Equal(t, read(t, transcript), "the first's", "the file of another run")
		if out, code, stderr := run(t, n); code > 1 {
			t.Errorf("the read-only part, which only reads, cannot run meanwhile: exit code %d: %s%s", code, out, stderr)
		}
	}, "--mps", "--limit=5m")
	part(t, first, "mps.").wantHolds(t, n.Address(t, 0), "mps.quit")
}

// TestHiddenFiles: transcript and patch are where the user wants them, also in the folder
// that the tmpfs for MPS hides.
func TestHiddenFiles(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	work := shortDir(t)
	transcript, patch := filepath.Join(work, "transcript"), filepath.Join(work, "patch.yaml")
	finished(t, n, "mps.", "--mps", "--work-dir="+work, "--transcript="+transcript, "--catalogue-patch="+patch)
	for path, want := range map[string]string{transcript: `"mps client"`, patch: "name: h100-80-sxm"} {
		expect.Contains(t, read(t, path), want, path)
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
		expect.Contains(t, got, name+" ("+strconv.Itoa(pid)+")", "among them")
	}
	if not := "(" + strconv.Itoa(p.Cmd.Process.Pid) + ")"; strings.Contains(got, not) {
		t.Errorf("got %q, which has the plugin %s", got, not)
	}
}

// namesake starts a process with the name that has the device node of the first GPU open, and
// returns its PID.
func namesake(t *testing.T, n *harness.Node, name string) int {
	t.Helper()
	sleep := must.Get(exec.LookPath("sleep"))(t)
	path := filepath.Join(t.TempDir(), name)
	// Not written here: what another test starts meanwhile would have it open for writing for a
	// moment, and then it could not be run.
	if out, err := exec.CommandContext(t.Context(), "cp", sleep, path).CombinedOutput(); err != nil {
		t.Fatalf("copy %s: %v: %s", sleep, err, out)
	}
	fd := must.Get(unix.Open(filepath.Join(n.Root, "dev/nvidia0"), unix.O_PATH|unix.O_CLOEXEC, 0))(t)
	node := os.NewFile(uintptr(fd), "nvidia0")
	defer func() { _ = node.Close() }()
	cmd := exec.CommandContext(t.Context(), path, "infinity")
	cmd.ExtraFiles = []*os.File{node}
	must.Do(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// TestCataloguePatch: what all parts measure of a simulated board is what the catalogue has
// and how long its calls take; and the same can be written from the transcript.
func TestCataloguePatch(t *testing.T) {
	t.Parallel()
	const slow = 30 * time.Millisecond
	functions := []string{
		"nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance",
		"nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy", "mps_server_start",
	}
	n := harness.NewNode(t, "h100-80-sxmx1", func(m *machine.Machine) {
		for _, function := range functions {
			m.Latencies = append(m.Latencies, machine.Latency{Function: function, Base: slow})
		}
	})
	dir := t.TempDir()
	transcript, live, replayed := filepath.Join(dir, "transcript"), filepath.Join(dir, "live"), filepath.Join(dir, "replayed")
	finished(t, n, "", "--mps", "--intrusive", "--limit=5m", "--gpu="+n.Machine(t).GPUs[0].UUID, "--transcript="+transcript, "--catalogue-patch="+live)
	finished(t, n, "", "--replay="+transcript, "--catalogue-patch="+replayed)
	patch := read(t, live)
	expect.Same(t, read(t, replayed), patch)
	documents := strings.Split(patch, "---\n")
	if len(documents) != 3 {
		t.Fatalf("got %d documents, want a comment, a board and latencies:\n%s", len(documents), patch)
	}
	checkBoard(t, documents[1])
	profiles := must.Get(catalog.DecodeLatencies([]byte(documents[2])))(t)
	for _, function := range functions {
		i := slices.IndexFunc(profiles["h100-80-sxm"], func(l machine.Latency) bool { return l.Function == function })
		if i < 0 || profiles["h100-80-sxm"][i].Base < slow {
			t.Errorf("got %+v, want %s to take at least %s", profiles, function, slow)
		}
	}
}

// checkBoard compares what the parts mps and intrusive have measured of a board with the catalogue.
func checkBoard(t *testing.T, document string) {
	t.Helper()
	var board catalog.Board
	must.Do(t, yaml.UnmarshalStrict([]byte(document), &board))
	known := must.Get(catalog.Load("h100-80-sxm"))(t)
	want := known.MPS
	want.Tags = catalog.Tags{Source: catalog.Measured}
	expect.Same(t, board.MPS, want, "MPS")
	for _, p := range known.MIG.Profiles {
		i := slices.IndexFunc(board.MIG.Profiles, func(m catalog.Profile) bool { return m.Name == p.Name })
		if i < 0 || !slices.Equal(board.MIG.Profiles[i].InstanceIDs, p.InstanceIDs[:len(p.Placements.Starts)]) {
			t.Errorf("instance IDs of %s: got %+v, want %v", p.Name, board.MIG.Profiles, p.InstanceIDs)
		}
	}
}
