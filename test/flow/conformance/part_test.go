// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package conformance tests the command that examines a node, on simulated machines.
package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/conformance"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
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

var update = flag.Bool("update", false, "write the golden reports")

// partReport is what is compared of a report: the results of one part.
type partReport struct {
	Results []outcome `json:"results"`
}

type outcome struct {
	Check    string `json:"check"`
	Subject  string `json:"subject,omitempty"`
	Expected string `json:"expected"`
	Observed string `json:"observed,omitempty"`
	Verdict  string `json:"verdict"`
	Reason   string `json:"reason,omitempty"`
}

// shortDir makes a folder whose name is short enough for sockets, for programs of all users.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "c")
	must.Do(t, errors.Join(err, os.Chmod(dir, 0o755)))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// command is the command for a node's machine. Its limit is for a machine that is busy; tests in which something does
// not answer have one of their own.
func command(t *testing.T, n *harness.Node, args ...string) *exec.Cmd {
	t.Helper()
	all := append([]string{
		"conformance", "--output=json",
		"--driver-root=" + n.Root, "--dev-root=" + n.Root, "--sys-root=" + filepath.Join(n.Root, "sys"), "--proc-root=" + filepath.Join(n.Root, "proc"),
		"--work-dir=" + filepath.Join(shortDir(t), "w"), "--limit=1m", "--timeout=10m", "--pod-uid=" + ownPod, "--kubelet-plugins-dir=" + n.PluginsDir,
		"--cdi-root=" + n.CDIDir, "--nvidia-cdi-hook=" + harness.Built.NVIDIAHook, "--partage-hook=" + harness.Built.Hook,
		"--runtime-endpoint=unix:///proc/no-runtime.sock", // not the machine's; nobody can make a file there
	}, args...)
	return exec.CommandContext(t.Context(), harness.Built.Driver, all...)
}

// run runs the command on a node's machine.
func run(t *testing.T, n *harness.Node, args ...string) (out []byte, code int, stderr string) {
	t.Helper()
	cmd := command(t, n, args...)
	var errorsText bytes.Buffer
	cmd.Stderr = &errorsText
	out, err := cmd.Output()
	must.Do(t, ignoreExit(err))
	return out, cmd.ProcessState.ExitCode(), errorsText.String()
}

// finished runs the command, which comes to its end, and returns the results of a part.
func finished(t *testing.T, n *harness.Node, prefix string, args ...string) partReport {
	t.Helper()
	out, code, stderr := run(t, n, args...)
	if code > 1 {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	return part(t, out, prefix)
}

// during runs the command until a fault strikes, and does something then.
func during(t *testing.T, n *harness.Node, f machine.Fault, do func(cmd *exec.Cmd), args ...string) (out []byte) {
	t.Helper()
	f.Hang, f.Effect = true, machine.Proceed
	fault := n.Inject(t, f)
	cmd := command(t, n, args...)
	var stdout bytes.Buffer
	cmd.Stdout = &stdout
	must.Do(t, cmd.Start())
	must.Do(t, harness.Eventually(t.Context(), fault.CheckStruck))
	do(cmd)
	fault.Remove(t)
	if cmd.ProcessState == nil { // otherwise it was waited for
		must.Do(t, ignoreExit(cmd.Wait()))
	}
	return stdout.Bytes()
}

func ignoreExit(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	return err
}

// part reads the results whose check's name begins with a prefix.
func part(t *testing.T, out []byte, prefix string) partReport {
	t.Helper()
	var r partReport
	must.Do(t, json.Unmarshal(out, &r), string(out))
	r.Results = slices.DeleteFunc(r.Results, func(r outcome) bool { return !strings.HasPrefix(r.Check, prefix) })
	if len(r.Results) == 0 {
		t.Fatalf("no result of %s: %s", prefix, out)
	}
	return r
}

var times = regexp.MustCompile(`\b([0-9]+(\.[0-9]+)?(ms|s|m))+\b`)

// golden compares results with a file, without times.
func golden(t *testing.T, name string, r partReport) {
	t.Helper()
	for i := range r.Results {
		r.Results[i].Observed = times.ReplaceAllString(r.Results[i].Observed, "TIME")
	}
	got := must.Get(json.MarshalIndent(r.Results, "", "  "))(t)
	got = append(got, '\n')
	path := filepath.Join("testdata", name)
	if *update {
		must.Do(t, os.WriteFile(path, got, 0o644))
	}
	expect.Same(t, string(got), string(must.Get(os.ReadFile(path))(t)), path)
}

// replays fails unless a transcript gives the same results as the run that wrote it.
func replays(t *testing.T, n *harness.Node, transcript, prefix string, live partReport) {
	t.Helper()
	expect.Same(t, finished(t, n, prefix, "--replay="+transcript), live, "replayed")
}

// find returns the result of a check about a subject.
func (r partReport) find(t *testing.T, check, subject string) outcome {
	t.Helper()
	i := slices.IndexFunc(r.Results, func(r outcome) bool { return r.Check == check && r.Subject == subject })
	if i < 0 {
		t.Fatalf("no result of %s about %q: %+v", check, subject, r.Results)
	}
	return r.Results[i]
}

// wantHolds fails unless checks of a subject hold.
func (r partReport) wantHolds(t *testing.T, subject string, checks ...string) {
	t.Helper()
	for _, check := range checks {
		if got := r.find(t, check, subject); got.Verdict != "holds" {
			t.Errorf("%+v", got)
		}
	}
}

func (r partReport) count(verdict string) int {
	n := 0
	for _, o := range r.Results {
		if o.Verdict == verdict {
			n++
		}
	}
	return n
}
