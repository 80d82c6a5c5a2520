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

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

var update = flag.Bool("update", false, "write the golden files")

// gpusim runs the command line and returns what it printed.
func gpusim(args ...string) (string, error) {
	var out strings.Builder
	err := app(&out).Run(context.Background(), append([]string{"gpusim"}, args...))
	return out.String(), err
}

func mustRun(t *testing.T, args ...string) string {
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

// newNode makes a machine that the commands find, and returns its root.
func newNode(t *testing.T, machine string) string {
	t.Helper()
	root := t.TempDir()
	t.Setenv("GPUSIM_ROOT", root)
	mustRun(t, "new", "--machine", machine, "--assets", assets(t))
	return root
}

// refuses wants for arguments of a command the error that says why they are wrong.
func refuses(t *testing.T, command string, args map[string]string) {
	t.Helper()
	for args, want := range args {
		_, err := gpusim(strings.Fields(command + " " + args)...)
		expect.Says(t, err, want, command, args)
	}
}

// assets are files with the right names. Nothing here runs them.
func assets(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{
		"lib/libnvidia-ml.so", "lib/libcuda.so", "bin/nvidia-smi", "bin/nvidia-cuda-mps-control", "bin/nvidia-cuda-mps-server",
	} {
		path := filepath.Join(dir, name)
		must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o600)))
	}
	return dir
}

// change edits a machine's state as the library would.
func change(t *testing.T, root string, f func(m *machine.Machine)) {
	t.Helper()
	s := must.Get(state.Open(sysroot.StatePath(root)))(t)
	defer s.Close()
	must.Do(t, s.Update(func(m *machine.Machine) error { f(m); return nil }))
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
		must.Do(t, errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(path, []byte(got), 0o600)))
	}
	expect.Same(t, got, string(must.Get(os.ReadFile(path))(t)), name, "(-update rewrites it)")
}

func TestDriverContainer(t *testing.T) {
	root := filepath.Join(t.TempDir(), "node")
	mustRun(t, "new", "--machine", "t4x1", "--driver-container", "--assets", assets(t), "--root", root)
	expect.Equal(t, sysroot.DriverRoot(root), filepath.Join(root, "run/nvidia/driver"), "the driver is in")
	expect.Contains(t, mustRun(t, "show", "--root", root), "Tesla T4", "the machine")
}

func TestShow(t *testing.T) {
	root := filepath.Join(t.TempDir(), "node")
	out := mustRun(t, "new", "--machine", "mixed", "--assets", assets(t), "--root", root)
	expect.Equal(t, out, root+": mixed with 6 GPUs, driver 580.95.05\n")
	change(t, root, partition)
	mustRun(t, "proc", "add", "--root", root, "--gpu", "1", "--gi", "7")
	mustRun(t, "proc", "add", "--root", root, "--gpu", "4", "--pid", "99", "--name", "a.out", "--memory", "1024")
	golden(t, "show.txt", mustRun(t, "show", root))
	golden(t, "show.yaml", mustRun(t, "show", "-o", "yaml", "--root", root))

	var s shown
	must.Do(t, json.Unmarshal([]byte(mustRun(t, "show", "-o", "json", root)), &s))
	if len(s.GPUs) != 6 || len(s.GPUs[1].MIG.Instances) != 2 || s.Processes[0].InstanceID != 7 {
		t.Errorf("%+v", s)
	}
}

func TestRootFromEnvironment(t *testing.T) {
	root := t.TempDir()
	t.Setenv("GPUSIM_ROOT", root)
	t.Setenv("GPUSIM_ASSETS", assets(t))
	mustRun(t, "new", "--machine", "l4x2", "--seed", "3")
	before := mustRun(t, "show")
	if !strings.HasPrefix(before, "l4x2, driver") {
		t.Error(before)
	}
	mustRun(t, "sysroot")
	if after := mustRun(t, "show"); after != before {
		t.Errorf("rewriting the files changed the machine: %s", cmp.Diff(before, after))
	}
	mustRun(t, "reboot")
	if after := mustRun(t, "show"); after == before {
		t.Error("a reboot changed nothing")
	}
}

func TestProcesses(t *testing.T) {
	root := newNode(t, "mixed")
	change(t, root, partition)
	refuses(t, "proc add", map[string]string{
		"--gpu 9":               "there is no GPU 9",
		"--gpu 1":               "in MIG mode: say which instance",
		"--gpu 1 --ci 0":        "--ci needs --gi",
		"--gpu 1 --gi 8":        "no GPU instance 8",
		"--gpu 1 --gi 2":        "has no compute instance, nothing can run",
		"--gpu 1 --gi 7 --ci 3": "no compute instance 3",
		"--gpu 0 --gi 7":        "not in MIG mode",
		"--gi 7":                "gpu",
		"--gpu 0 --pid -4":      "not possible or taken",
	})
	expect.Equal(t, mustRun(t, "proc", "add", "--gpu", "1", "--gi", "7", root), "10000\n", "pid")
	expect.Equal(t, mustRun(t, "proc", "add", "--gpu", "0", root), "10001\n", "pid")
	refuses(t, "proc rm", map[string]string{
		"":               "say which process",
		"--all --pid 10": "say which process",
		"--pid 10":       "there is no process 10",
	})
	mustRun(t, "proc", "rm", "--pid", "10000", root)
	if out := mustRun(t, "show", root); strings.Contains(out, "10000") || !strings.Contains(out, "10001") {
		t.Error(out)
	}
	mustRun(t, "proc", "rm", "--all", root)
	if out := mustRun(t, "show", root); strings.Contains(out, "PID") {
		t.Error(out)
	}
}

func TestErrors(t *testing.T) {
	dir := t.TempDir()
	refuses(t, "", map[string]string{
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
	})
}

func TestLists(t *testing.T) {
	golden(t, "machines.txt", mustRun(t, "machines"))
	golden(t, "boards.txt", mustRun(t, "boards"))
}
