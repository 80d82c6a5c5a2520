// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestArguments compiles and runs a C program for what go-nvml cannot pass.
func TestArguments(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	r.update(func(m *machine.Machine) {
		m.Processes = []machine.Process{
			{PID: 4711, Name: "python3", InstanceID: -1, ComputeID: -1, MemoryBytes: 1},
			{PID: 4712, Name: "other", InstanceID: -1, ComputeID: -1, MemoryBytes: 1},
		}
	})
	program := filepath.Join(t.TempDir(), "arguments")
	out, err := exec.CommandContext(t.Context(), "cc", "-std=gnu11", "-Wall", "-Wextra", "-DNVML_NO_UNVERSIONED_FUNC_DEFS",
		"-isystem", nvmlFolder(t), "-o", program, "testdata/arguments.c", library).CombinedOutput()
	if err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	// The program wants the library by its soname.
	libs := t.TempDir()
	if err := os.Symlink(library, filepath.Join(libs, "libnvidia-ml.so.1")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+libs, "GPUSIM_STATE="+r.state())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
