// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/hardware/bundle"
	"github.com/partage-dev/partage/test/must"
)

// TestOtherMachine: programs that do not start are named, with why, before anything else.
func TestOtherMachine(t *testing.T) {
	t.Parallel()
	here := bundle.Here(t.Context())
	for name, test := range map[string]struct {
		spoil func(t *testing.T, folder string)
		want  string
	}{
		"newer glibc": {
			func(t *testing.T, folder string) {
				t.Helper()
				replace(t, filepath.Join(folder, "cuda-probe"), "GLIBC_"+bundle.Oldest, "GLIBC_9.99")
			},
			"cuda-probe does not start: it needs glibc 9.99, this machine has " + here,
		},
		"a program is missing": {
			func(t *testing.T, folder string) {
				t.Helper()
				must.Do(t, os.Remove(filepath.Join(folder, "cuda-probe")))
			},
			"cuda-probe is not in the bundle",
		},
		"other processor": {
			func(t *testing.T, folder string) {
				t.Helper()
				must.Do(t, os.WriteFile(filepath.Join(folder, "architecture"), []byte("riscv64\n"), 0o600))
			},
			"the programs are for riscv64",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, aMachine)
			folder := t.TempDir()
			must.Do(t, os.CopyFS(folder, os.DirFS(bundleFolder(t))))
			test.spoil(t, folder)
			r := script(t, n, folder)
			if code := r.finish(t, n, r.Run()); code != 2 || !strings.Contains(r.output.String(), test.want) {
				t.Errorf("exit code %d, want 2 and %q", code, test.want)
			}
			if r.archive(t) != nil {
				t.Error("there is an archive")
			}
		})
	}
}

// TestBuiltForOldMachines: a bundle is not made where a program would not start on some nodes.
func TestBuiltForOldMachines(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	must.Do(t, os.CopyFS(folder, os.DirFS(bundleFolder(t))))
	const most = 60 << 20
	expect.Do(t, bundle.CheckBuilt(t.Context(), folder, most), "the bundle")
	for _, program := range []string{"cuda-probe", "gpu-kubelet-plugin"} { // hardware-run is static
		if needed, err := bundle.Needs(filepath.Join(folder, program)); err != nil || needed == "" {
			t.Errorf("%s loads NVIDIA's libraries and needs glibc %q, %v", program, needed, err)
		}
	}
	replace(t, filepath.Join(folder, "cuda-probe"), "GLIBC_"+bundle.Oldest, "GLIBC_2.35")
	const want = "cuda-probe needs glibc 2.35: want 2.34 or older"
	expect.Says(t, bundle.CheckBuilt(t.Context(), folder, most), want)
}

// replace changes a text in a program to another one of the same length.
func replace(t *testing.T, path, old, other string) {
	t.Helper()
	data := must.Get(os.ReadFile(path))(t)
	changed := bytes.ReplaceAll(data, []byte(old+"\x00"), []byte(other+"\x00"))
	if len(changed) != len(data) || bytes.Equal(changed, data) {
		t.Fatalf("%s has no %s", path, old)
	}
	must.Do(t, os.WriteFile(path, changed, 0o755))
}
