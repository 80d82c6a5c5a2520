// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/partage-dev/partage/test/flow/harness"
)

// checkHooks fails unless the hooks of a container are copies of programs in this
// folder, with an environment and a time limit.
func checkHooks(spec *oci.Spec, folder string) error {
	if spec.Hooks == nil || len(spec.Hooks.CreateContainer) == 0 {
		return errors.New("no hook")
	}
	copies := regexp.MustCompile("^" + regexp.QuoteMeta(folder) + "/(nvidia-cdi|partage)-hook-[0-9a-f]{12}$")
	for _, h := range spec.Hooks.CreateContainer {
		if !copies.MatchString(h.Path) || len(h.Env) == 0 || h.Timeout == nil {
			return fmt.Errorf("hook %s has the environment %q and the time limit %v", h.Path, h.Env, h.Timeout)
		}
		if _, err := os.Stat(h.Path); err != nil {
			return err
		}
	}
	return nil
}

// TestUpgradeOfHooks checks that a claim which another version has prepared gets a spec
// with the hooks of this one, and that those which a spec may have named until then are
// still there.
func TestUpgradeOfHooks(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
	ids := p.MustPrepare(t, claim)
	data := filepath.Join(n.PluginsDir, harness.DriverName)
	if err := checkHooks(n.Container(t, ids...), filepath.Join(data, "hooks")); err != nil {
		t.Fatal(err)
	}
	p.Stop(t)

	// The spec and the hook of a version without hashes.
	spec := filepath.Join(n.CDIDir, n.CDISpecs(t)[0])
	text, err := os.ReadFile(spec)
	if err != nil {
		t.Fatal(err)
	}
	hooks, err := os.ReadDir(filepath.Join(data, "hooks"))
	if err != nil || len(hooks) != 2 {
		t.Fatalf("the hooks are %v, %v", hooks, err)
	}
	old := string(text)
	for _, hook := range hooks {
		old = strings.ReplaceAll(old, "/hooks/"+hook.Name(), "/nvidia-cdi-hook")
	}
	old = strings.ReplaceAll(old, `"timeout": 60`, `"timeout": 0`)
	earlier := filepath.Join(data, "nvidia-cdi-hook")
	if err := errors.Join(os.WriteFile(spec, []byte(old), 0o644), os.WriteFile(earlier, []byte("#!/bin/sh\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	if checkHooks(n.Container(t, ids...), filepath.Join(data, "hooks")) == nil {
		t.Fatal("the spec is not that of an earlier version")
	}

	// This version, and then a later one.
	for _, flags := range [][]string{nil, {"--nvidia-cdi-hook=" + laterHook(t)}} {
		before, err := os.ReadDir(filepath.Join(data, "hooks"))
		if err != nil {
			t.Fatal(err)
		}
		named := n.Container(t, ids...).Hooks.CreateContainer[0].Path
		p = n.Start(t, append(flags, harness.Frequent...)...)
		p.Until(t, "a spec with the hooks of this version", func(context.Context) error {
			container := n.Container(t, ids...)
			if container.Hooks.CreateContainer[0].Path == named {
				return fmt.Errorf("the spec still names %s", named)
			}
			return checkHooks(container, filepath.Join(data, "hooks"))
		})
		for _, path := range []string{earlier, named} {
			if _, err := os.Stat(path); err != nil {
				t.Errorf("a container that is being made may need it: %v", err)
			}
		}
		after, err := os.ReadDir(filepath.Join(data, "hooks"))
		if err != nil || len(after) != len(before)+len(flags) {
			t.Errorf("the hooks are %v, %v; before: %v", after, err, before)
		}
		p.Stop(t)
	}
	p = n.Start(t)
	p.MustUnprepare(t, claim)
	p.UntilClean(t, n)
}

// laterHook is a program like NVIDIA's hook, with another content.
func laterHook(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n# later\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}
