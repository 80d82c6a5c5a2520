// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/host"
)

func TestCacheFollowsTheDriver(t *testing.T) {
	s, _, calls := fixed(t)
	write := func(want int) {
		t.Helper()
		if _, err := s.Write(t.Context(), uid, []Device{whole}); err != nil {
			t.Fatal(err)
		}
		if *calls != want {
			t.Errorf("common edits were made %d times, want %d", *calls, want)
		}
	}
	write(1)
	s.SetDriverVersion(version) // what the file name said before
	write(1)

	// Another driver is installed over it.
	root := s.common.roots.Driver
	driver(t, root, "590.10.01")
	s.SetDriverVersion("590.10.01")
	if _, err := s.Write(t.Context(), uid, []Device{whole}); err == nil || !strings.Contains(err.Error(), "libcuda.so.590.10.01 is missing") {
		t.Errorf("got %v", err)
	}
	if *calls != 2 {
		t.Errorf("common edits were made %d times, want 2", *calls)
	}
}

// What is handed out, and what nvcdi gave, is never the cached value.
func TestCacheIsNotShared(t *testing.T) {
	s, _, _ := fixed(t)
	found := completeEdits(s.common.roots.Driver)
	s.common.discover = func(context.Context, string) (*specs.ContainerEdits, error) { return found, nil }
	spoil := func(e *specs.ContainerEdits) {
		e.Env[0] = "SPOILT=1"
		e.DeviceNodes[0].Path = "/spoilt"
		e.Mounts[0].Options[0] = "spoilt"
		e.Mounts = append(e.Mounts[:1], e.Mounts[2:]...)
		e.Hooks[0].Args[0] = "spoilt"
	}
	first, err := s.common.get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := clone(&first)
	spoil(&first)
	spoil(found)
	second, err := s.common.get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, second); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestIncompleteDriver(t *testing.T) {
	drop := func(node string) func(*specs.ContainerEdits) {
		return func(e *specs.ContainerEdits) {
			e.DeviceNodes = slices.DeleteFunc(e.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == node })
		}
	}
	for name, test := range map[string]struct {
		change func(*specs.ContainerEdits)
		want   string
	}{
		"no nvidiactl":  {drop("/dev/nvidiactl"), "the device node /dev/nvidiactl is missing"},
		"no nvidia-uvm": {drop("/dev/nvidia-uvm"), "load the nvidia-uvm kernel module"},
		"no mounts":     {func(e *specs.ContainerEdits) { e.Mounts = nil }, "the library libnvidia-ml.so.580.95.05 is missing"},
		"no cuda":       {func(e *specs.ContainerEdits) { e.Mounts = e.Mounts[:1] }, "the library libcuda.so.580.95.05 is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			s, folder, _ := fixed(t)
			edits := completeEdits(s.common.roots.Driver)
			test.change(edits)
			s.common.discover = func(context.Context, string) (*specs.ContainerEdits, error) { return edits, nil }
			if _, err := s.Write(t.Context(), uid, []Device{whole}); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			if entries, _ := os.ReadDir(folder); len(entries) != 0 {
				t.Errorf("left behind: %v", entries)
			}
			// It is not remembered.
			edits = completeEdits(s.common.roots.Driver)
			if _, err := s.Write(t.Context(), uid, []Device{whole}); err != nil {
				t.Errorf("once complete: %v", err)
			}
		})
	}
}

func TestNoDriver(t *testing.T) {
	s, _ := newSpecs(t, host.Roots{Driver: t.TempDir()})
	if _, err := s.Write(t.Context(), uid, []Device{whole}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if err := s.Remove(uid); err != nil {
		t.Errorf("Remove: %v", err)
	}
}

func TestRebase(t *testing.T) {
	for _, test := range []struct{ file, from, to, want string }{
		{"/driver-root/usr/lib/x", "/driver-root", "/", "/usr/lib/x"},
		{"/driver-root/usr/lib/x", "/driver-root", "/run/nvidia/driver", "/run/nvidia/driver/usr/lib/x"},
		{"/usr/lib/x", "/", "/run/nvidia/driver", "/run/nvidia/driver/usr/lib/x"},
		{"/driver-root2/x", "/driver-root", "/", "/driver-root2/x"},
		{"/elsewhere", "/driver-root", "/", "/elsewhere"},
		{"/driver-root/..data/x", "/driver-root", "/h", "/h/..data/x"},
		{"/a/b", "/a", "/a", "/a/b"},
	} {
		if got := rebase(test.file, test.from, test.to); got != test.want {
			t.Errorf("rebase(%s, %s, %s): got %s, want %s", test.file, test.from, test.to, got, test.want)
		}
	}
}
