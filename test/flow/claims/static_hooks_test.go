// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestHooksNeedNoLoader checks that the programs that container runtimes run on the host start on
// hosts without a dynamic loader, or with one elsewhere. What they run there is another matter.
func TestHooksNeedNoLoader(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"../../../Makefile", "../../../deployments/container/Dockerfile"} {
		text, err := os.ReadFile(file)
		for _, flags := range []string{"-tags " + harness.StaticTags, harness.StaticLDFlags} {
			if err != nil || !strings.Contains(string(text), flags) {
				t.Errorf("%s: no %q, %v: what is released is not what is tested", file, flags, err)
			}
		}
	}
	hook := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	build := exec.CommandContext(t.Context(), "go", "build", "-tags="+harness.StaticTags, "-ldflags="+harness.StaticLDFlags, "-o", hook,
		"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	n := harness.NewNode(t, "h100x1")
	p := n.Start(t, "--nvidia-cdi-hook="+hook)
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
	container := n.Container(t, p.MustPrepare(t, claim)...)
	folder := filepath.Join(n.PluginsDir, harness.DriverName, "hooks")
	if err := checkHooks(container, folder); err != nil {
		t.Fatal(err)
	}
	// Those of this container, and the one for shares with limits.
	programs, err := filepath.Glob(filepath.Join(folder, "*-hook-*"))
	if err != nil || len(programs) != 2 || !slices.Contains(programs, container.Hooks.CreateContainer[0].Path) {
		t.Fatalf("the hooks are %v, %v", programs, err)
	}
	for _, path := range programs {
		wantStatic(t, path)
	}
	p.MustUnprepare(t, claim)
}

// wantStatic fails unless a program starts without a dynamic loader.
func wantStatic(t *testing.T, path string) {
	t.Helper()
	file, err := elf.Open(path)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if slices.ContainsFunc(file.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Errorf("%s needs the host's dynamic loader", path)
	}
	if libraries, err := file.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("%s needs libraries of the host: %v, %v", path, libraries, err)
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
}
