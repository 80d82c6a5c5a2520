// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestSymbols: go-nvml ends the process at the first call of a function that
// the library does not export.
func TestSymbols(t *testing.T) {
	exported := map[string]bool{}
	for _, s := range symbols(t, library) {
		exported[s] = true
	}
	names := bound(t)
	if len(names) < 400 {
		t.Errorf("go-nvml binds only %d functions: the search is wrong", len(names))
	}
	for _, name := range names {
		if !exported[name] {
			t.Errorf("go-nvml binds %s, which the library does not export", name)
		}
		delete(exported, name)
	}
	for name := range exported {
		if !strings.HasPrefix(name, "nvml") {
			t.Errorf("the library exports %s", name)
		}
	}
}

func symbols(t *testing.T, path string) []string {
	t.Helper()
	f := must.Get(elf.Open(path))(t)
	defer f.Close()
	all := must.Get(f.DynamicSymbols())(t)
	var names []string
	for _, s := range all {
		if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			names = append(names, s.Name)
		}
	}
	return names
}

// nvmlFolder holds go-nvml's sources, nvml.h among them.
func nvmlFolder(t *testing.T) string {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	must.Do(t, err)
	return filepath.Join(strings.TrimSpace(string(dir)), "pkg/nvml")
}

// bound is every C function that go-nvml calls.
func bound(t *testing.T) []string {
	t.Helper()
	files := must.Get(filepath.Glob(filepath.Join(nvmlFolder(t), "*.go")))(t)
	call := regexp.MustCompile(`\bC\.(nvml\w+)\(`)
	var names []string
	for _, file := range files {
		text := must.Get(os.ReadFile(file))(t)
		for _, m := range call.FindAllSubmatch(text, -1) {
			names = append(names, string(m[1]))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// TestLinkage: names that loaders look for, and no dependence on a C library
// newer than those in old containers.
func TestLinkage(t *testing.T) {
	for file, want := range map[string]string{"libnvidia-ml.so": "libnvidia-ml.so.1", "libcuda.so": "libcuda.so.1"} {
		f := must.Get(elf.Open(filepath.Join(filepath.Dir(library), file)))(t)
		defer f.Close()
		soname, err := f.DynString(elf.DT_SONAME)
		if err != nil || len(soname) != 1 || soname[0] != want {
			t.Errorf("%s: soname %v, %v", file, soname, err)
		}
		for _, s := range must.Get(f.ImportedSymbols())(t) {
			version, found := strings.CutPrefix(s.Version, "GLIBC_2.")
			if found && len(strings.SplitN(version, ".", 2)[0]) == 2 && version > "31" {
				t.Errorf("%s needs %s of glibc 2.%s, newer than 2.31", file, s.Name, version)
			}
		}
	}
	if got := symbols(t, filepath.Join(filepath.Dir(library), "libcuda.so")); !slices.Contains(got, "cuInit") {
		t.Errorf("libcuda.so exports %v", got)
	}
}

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
	must.Do(t, err, "compile", string(out))
	// The program wants the library by its soname.
	libs := t.TempDir()
	must.Do(t, os.Symlink(library, filepath.Join(libs, "libnvidia-ml.so.1")))
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+libs, "GPUSIM_STATE="+r.state())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
