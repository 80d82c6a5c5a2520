// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package hardware tests the script for machines with a real GPU, on simulated ones.
package hardware

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

func TestMain(m *testing.M) {
	harness.Main(m)
}

const root = "../../.."

// built is the bundle, made once by the script that users make it with.
var built = sync.OnceValues(func() (string, error) {
	folder := filepath.Join(filepath.Dir(harness.Built.Driver), "hardware")
	cmd := exec.CommandContext(context.Background(), filepath.Join(root, "test/hardware/build"), filepath.Dir(harness.Built.Driver), folder)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the bundle: %w: %s", err, out)
	}
	return filepath.Abs(folder)
})

func bundleFolder(t *testing.T) string {
	t.Helper()
	return must.Get(built())(t)
}

// run is one run of the script on a node's machine.
type run struct {
	*exec.Cmd

	// out is the folder for the archive, temporary the only one for other files.
	out, temporary string
	output         strings.Builder
}

// script prepares a run. What it leaves in its temporary folder, or of processes and mounts,
// fails the test.
func script(t *testing.T, n *harness.Node, bundle string, args ...string) *run {
	t.Helper()
	temporary := must.Get(os.MkdirTemp("/tmp", "h"))(t) // paths of sockets are short
	t.Cleanup(func() { _ = os.RemoveAll(temporary) })
	if err := os.Chmod(temporary, 0o755); err != nil { // for programs of other users
		t.Fatal(err)
	}
	r := &run{out: t.TempDir(), temporary: temporary}
	r.Cmd = exec.CommandContext(t.Context(), filepath.Join(root, "test/hardware/run"), append([]string{
		"--driver-root=" + n.Root, "--dev-root=" + n.Root, "--proc-root=" + n.Root + "/proc", "--sys-root=" + n.Root + "/sys",
		"--kubelet-plugins-dir=" + filepath.Join(n.Root, "no-kubelet"),
	}, args...)...)
	r.Env = []string{"PATH=" + os.Getenv("PATH"), "PARTAGE_HARDWARE=" + bundle, "OUT=" + r.out, "TMPDIR=" + temporary, "USER=" + userName, "HOME=/home/" + userName}
	r.Stdout, r.Stderr = &r.output, &r.output
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%v", r.output.String())
		}
	})
	return r
}

// userName is who works on the machine.
const userName = "maximiliane"

// finish returns the exit code, and fails if anything is left of the run.
func (r *run) finish(t *testing.T, n *harness.Node, err error) int {
	t.Helper()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	expect.Len(t, must.Get(os.ReadDir(r.temporary))(t), 0, "files are left")
	for _, link := range must.Get(filepath.Glob("/proc/[0-9]*/exe"))(t) {
		program, err := os.Readlink(link)
		if err == nil && strings.HasPrefix(program, n.Root+"/") {
			t.Errorf("%s goes on as %s", program, link)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), r.temporary) || strings.Contains(string(mounts), "partage-hardware") {
		t.Errorf("mounts are left: %v\n%s", err, mounts)
	}
	return r.ProcessState.ExitCode()
}

// find returns the process of the run that is this program with this argument.
func (r *run) find(t *testing.T, program, argument string) int {
	t.Helper()
	for _, path := range must.Get(filepath.Glob("/proc/[0-9]*/cmdline"))(t) {
		text, err := os.ReadFile(path)
		args := strings.Split(string(text), "\x00")
		if err != nil || filepath.Base(args[0]) != program || !slices.Contains(args, argument) || !strings.Contains(string(text), r.temporary) {
			continue
		}
		return must.Get(strconv.Atoi(filepath.Base(filepath.Dir(path))))(t)
	}
	t.Fatalf("there is no process %s %s", program, argument)
	return 0
}

// archive returns the files of the only archive, by name. It is nil where there is none.
func (r *run) archive(t *testing.T) map[string]string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(r.out, "*"))
	if err != nil || len(found) > 1 {
		t.Fatalf("got %v, %v: want one archive", found, err)
	}
	if len(found) == 0 {
		return nil
	}
	file := must.Get(os.Open(found[0]))(t)
	defer func() { _ = file.Close() }()
	unpacked := must.Get(gzip.NewReader(file))(t)
	files := map[string]string{}
	for archive := tar.NewReader(unpacked); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must.Do(t, err)
		text := must.Get(io.ReadAll(archive))(t)
		files[strings.TrimPrefix(header.Name, "partage-hardware/")] = string(text)
	}
}
