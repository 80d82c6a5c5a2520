// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

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

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/flow/harness"
)

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

// command is the command for a node's machine.
func command(t *testing.T, n *harness.Node, args ...string) *exec.Cmd {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "c") // a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil { // for programs of other users
		t.Fatal(err)
	}
	all := append([]string{
		"conformance", "--output=json",
		"--driver-root=" + n.Root, "--dev-root=" + n.Root, "--sys-root=" + filepath.Join(n.Root, "sys"), "--proc-root=" + filepath.Join(n.Root, "proc"),
		"--work-dir=" + filepath.Join(dir, "w"), "--timeout=10m", "--pod-uid=" + kitPod, "--kubelet-plugins-dir=" + n.PluginsDir,
		"--cdi-root=" + n.CDIDir, "--nvidia-cdi-hook=" + harness.Built.NVIDIAHook, "--partage-hook=" + harness.Built.Hook,
		"--runtime-endpoint=unix:///nonexistent/runtime.sock", // not the machine's
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
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out, cmd.ProcessState.ExitCode(), errorsText.String()
}

// part reads the results whose check's name begins with a prefix.
func part(t *testing.T, out []byte, prefix string) partReport {
	t.Helper()
	var r partReport
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
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
	got, err := json.MarshalIndent(r.Results, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s: -want +got:\n%s", path, diff)
	}
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

func (r partReport) count(verdict string) int {
	n := 0
	for _, o := range r.Results {
		if o.Verdict == verdict {
			n++
		}
	}
	return n
}
