// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

var update = flag.Bool("update", false, "write the golden files")

// gpusim runs the command line and returns what it printed.
func gpusim(args ...string) (string, error) {
	var out strings.Builder
	err := app(&out).Run(context.Background(), append([]string{"gpusim"}, args...))
	return out.String(), err
}

func must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := gpusim(args...)
	if errors.Is(err, unix.EPERM) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatalf("gpusim %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// assets are files with the right names. Nothing here runs them.
func assets(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{
		"lib/libnvidia-ml.so", "lib/libcuda.so", "bin/nvidia-smi", "bin/nvidia-cuda-mps-control", "bin/nvidia-cuda-mps-server",
	} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// change edits a machine's state as the library would.
func change(t *testing.T, root string, f func(m *machine.Machine)) {
	t.Helper()
	s, err := state.Open(sysroot.StatePath(root))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Update(func(m *machine.Machine) error { f(m); return nil }); err != nil {
		t.Fatal(err)
	}
}

// partition puts a GPU instance with a compute instance, and one without, on
// the H100 of the mixed machine.
func partition(m *machine.Machine) {
	mig := m.GPUs[1].MIG
	mig.Current, mig.Pending = true, true
	mig.Instances = []machine.GPUInstance{
		{ID: 7, ProfileID: 19, Placement: machine.Placement{Start: 0, Size: 1}, Compute: []machine.ComputeInstance{
			{ID: 0, ProfileID: 0, Placement: machine.Placement{Start: 0, Size: 1}, UUID: "MIG-11111111-2222-5333-8444-555555555555"},
		}},
		{ID: 2, ProfileID: 9, Placement: machine.Placement{Start: 4, Size: 4}},
	}
	m.GPUs[0].MIG.Pending = true
	m.GPUs[3].ComputeMode, m.GPUs[3].TimeSlice = 3, 1
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(path, []byte(got), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-update rewrites it): %s", name, d)
	}
}

func TestDriverContainer(t *testing.T) {
	root := filepath.Join(t.TempDir(), "node")
	must(t, "new", "--machine", "t4x1", "--driver-container", "--assets", assets(t), "--root", root)
	if want := filepath.Join(root, "run/nvidia/driver"); sysroot.DriverRoot(root) != want {
		t.Errorf("the driver is in %s, want %s", sysroot.DriverRoot(root), want)
	}
	if out := must(t, "show", "--root", root); !strings.Contains(out, "Tesla T4") {
		t.Errorf("the machine is %s", out)
	}
}

func TestShow(t *testing.T) {
	root := filepath.Join(t.TempDir(), "node")
	out := must(t, "new", "--machine", "mixed", "--assets", assets(t), "--root", root)
	if want := root + ": mixed with 6 GPUs, driver 580.95.05\n"; out != want {
		t.Errorf("got %q, want %q", out, want)
	}
	change(t, root, partition)
	must(t, "proc", "add", "--root", root, "--gpu", "1", "--gi", "7")
	must(t, "proc", "add", "--root", root, "--gpu", "4", "--pid", "99", "--name", "a.out", "--memory", "1024")
	golden(t, "show.txt", must(t, "show", root))
	golden(t, "show.yaml", must(t, "show", "-o", "yaml", "--root", root))

	var s shown
	if err := json.Unmarshal([]byte(must(t, "show", "-o", "json", root)), &s); err != nil {
		t.Fatal(err)
	}
	if len(s.GPUs) != 6 || len(s.GPUs[1].MIG.Instances) != 2 || s.Processes[0].InstanceID != 7 {
		t.Errorf("%+v", s)
	}
}

func TestRootFromEnvironment(t *testing.T) {
	root := t.TempDir()
	t.Setenv("GPUSIM_ROOT", root)
	t.Setenv("GPUSIM_ASSETS", assets(t))
	must(t, "new", "--machine", "l4x2", "--seed", "3")
	before := must(t, "show")
	if !strings.HasPrefix(before, "l4x2, driver") {
		t.Error(before)
	}
	must(t, "sysroot")
	if after := must(t, "show"); after != before {
		t.Errorf("rewriting the files changed the machine: %s", cmp.Diff(before, after))
	}
	must(t, "reboot")
	if after := must(t, "show"); after == before {
		t.Error("a reboot changed nothing")
	}
}

func TestProcesses(t *testing.T) {
	root := t.TempDir()
	must(t, "new", "--machine", "mixed", "--assets", assets(t), root)
	change(t, root, partition)
	for args, want := range map[string]string{
		"--gpu 9":               "there is no GPU 9",
		"--gpu 1":               "in MIG mode: say which instance",
		"--gpu 1 --ci 0":        "--ci needs --gi",
		"--gpu 1 --gi 8":        "no GPU instance 8",
		"--gpu 1 --gi 2":        "has no compute instance, nothing can run",
		"--gpu 1 --gi 7 --ci 3": "no compute instance 3",
		"--gpu 0 --gi 7":        "not in MIG mode",
		"--gi 7":                "gpu",
		"--gpu 0 --pid -4":      "not possible or taken",
	} {
		_, err := gpusim(append([]string{"proc", "add", "--root", root}, strings.Fields(args)...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("proc add %s: got error %v, want one with %q", args, err, want)
		}
	}
	if pid := must(t, "proc", "add", "--gpu", "1", "--gi", "7", root); pid != "10000\n" {
		t.Errorf("pid %q", pid)
	}
	if pid := must(t, "proc", "add", "--gpu", "0", root); pid != "10001\n" {
		t.Errorf("pid %q", pid)
	}
	for args, want := range map[string]string{
		"":               "say which process",
		"--all --pid 10": "say which process",
		"--pid 10":       "there is no process 10",
	} {
		_, err := gpusim(append([]string{"proc", "rm", "--root", root}, strings.Fields(args)...)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("proc rm %s: got error %v, want one with %q", args, err, want)
		}
	}
	must(t, "proc", "rm", "--pid", "10000", root)
	if out := must(t, "show", root); strings.Contains(out, "10000") || !strings.Contains(out, "10001") {
		t.Error(out)
	}
	must(t, "proc", "rm", "--all", root)
	if out := must(t, "show", root); strings.Contains(out, "PID") {
		t.Error(out)
	}
}

func TestErrors(t *testing.T) {
	dir := t.TempDir()
	for args, want := range map[string]string{
		"explode":                   `no command "explode"`,
		"show":                      "GPUSIM_ROOT",
		"show " + dir:               "no simulated machine in",
		"show a b":                  "one root at a time",
		"show --root a b":           "--root says a, the argument b",
		"show -o xml " + dir:        "none of table, json, yaml",
		"show --color " + dir:       "color",
		"new " + dir:                "machine",
		"new --machine cray " + dir: "unknown machine",
		"new --machine l4x1 --assets " + dir + " " + dir + "/x": "say where they are by --assets",
		"reboot " + dir:                  "not the root of a simulated machine",
		"sysroot --assets " + dir + " /": "say where they are by --assets",
	} {
		if _, err := gpusim(strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("gpusim %s: got error %v, want one with %q", args, err, want)
		}
	}
}

func TestLists(t *testing.T) {
	golden(t, "machines.txt", must(t, "machines"))
	golden(t, "boards.txt", must(t, "boards"))
}
