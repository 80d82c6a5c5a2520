// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

// common makes Specs whose common edits are found by a function, and counts the times
// that they are looked for.
type common struct {
	*Specs
	t     *testing.T
	root  string
	clock *clocktesting.FakePassiveClock
	more  []*specs.Mount
	calls int
}

func newCommon(t *testing.T) *common {
	t.Helper()
	s, _, _ := fixed(t)
	c := &common{Specs: s, t: t, root: s.common.roots.Driver, clock: clocktesting.NewFakePassiveClock(time.Now())}
	c.common.clock = c.clock
	c.common.discover = func(context.Context, string, host.DevRoot) (*specs.ContainerEdits, error) {
		c.calls++
		edits := completeEdits(c.root)
		edits.Mounts = append(edits.Mounts, c.more...)
		return edits, nil
	}
	return c
}

// want fails unless containers get a library, and have cost as many discoveries.
func (c *common) want(library string, calls int) {
	c.t.Helper()
	edits, err := c.common.get(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	if !slices.ContainsFunc(edits.Mounts, func(m *specs.Mount) bool { return strings.Contains(m.ContainerPath, library) }) {
		c.t.Errorf("containers lack %s", library)
	}
	if c.calls != calls {
		c.t.Errorf("common edits were looked for %d times, want %d", c.calls, calls)
	}
}

// find adds a library to what is found. It need not be on disk.
func (c *common) find(library string) {
	c.more = append(c.more, &specs.Mount{HostPath: c.root + "/usr/lib64/" + library, ContainerPath: "/usr/lib64/" + library})
}

// install puts a file into a folder, again and again until the time of the folder's change is
// another one: many kernels have one time for some milliseconds.
func (c *common) install(file string) {
	c.t.Helper()
	folder := filepath.Join(c.root, filepath.Dir(file))
	before, err := stat(folder)
	for now := before; err == nil && now == before; now, err = stat(folder) {
		_ = os.Remove(filepath.Join(c.root, file))
		put(c.t, c.root, file)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func TestCacheFollowsTheDriver(t *testing.T) {
	c := newCommon(t)
	// What was found counts once it was found twice.
	c.want("libcuda.so", 1)
	c.want("libcuda.so", 2)
	c.want("libcuda.so", 2)
	c.SetDriverVersion(version) // what the file name said before
	c.want("libcuda.so", 2)

	// Another driver is installed over it.
	driver(t, c.root, "590.10.01")
	c.SetDriverVersion("590.10.01")
	if _, err := c.common.get(t.Context()); err == nil || !strings.Contains(err.Error(), "libcuda.so.590.10.01 is missing") {
		t.Errorf("got %v", err)
	}
	if c.calls != 3 {
		t.Errorf("common edits were looked for %d times, want 3", c.calls)
	}
}

// The first claims come while the driver is still being installed.
func TestHalfInstalledDriver(t *testing.T) {
	t.Run("between two claims", func(t *testing.T) {
		c := newCommon(t)
		c.want("libcuda.so", 1)
		c.find("libnvidia-ptxjitcompiler.so." + version)
		c.want("ptxjitcompiler", 2)
		c.want("ptxjitcompiler", 3)
		c.want("ptxjitcompiler", 3)
	})
	t.Run("into the folder of the libraries", func(t *testing.T) {
		c := newCommon(t)
		c.want("libcuda.so", 1)
		c.want("libcuda.so", 2)
		c.install("usr/lib64/libnvidia-nvvm.so." + version)
		c.find("libnvidia-nvvm.so." + version)
		c.want("nvvm", 3)
		c.want("nvvm", 4)
		c.want("nvvm", 4)
	})
	t.Run("elsewhere", func(t *testing.T) {
		c := newCommon(t)
		c.want("libcuda.so", 1)
		c.want("libcuda.so", 2)
		c.find("nvoptix.bin")
		c.want("libcuda.so", 2)
		c.clock.SetTime(c.clock.Now().Add(maxAge))
		c.want("nvoptix.bin", 3)
	})
}

// The kernel may give a module another major number when it is loaded again.
func TestControlNodesChange(t *testing.T) {
	c := newCommon(t)
	path := filepath.Join(c.root, "dev/nvidia-uvm")
	must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
	calls := 0
	for _, device := range []string{"/dev/null", "/dev/zero", ""} {
		err := os.RemoveAll(path)
		if device != "" {
			err = errors.Join(err, os.Symlink(device, path))
		}
		if err != nil {
			t.Fatal(err)
		}
		c.want("libcuda.so", calls+1)
		c.want("libcuda.so", calls+2)
		c.want("libcuda.so", calls+2)
		calls += 2
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
		"no nvidiactl":  {drop("/dev/nvidiactl"), "the device node nvidiactl is not in /dev on this node"},
		"no nvidia-uvm": {drop("/dev/nvidia-uvm"), "the device node nvidia-uvm is not in /dev on this node (file does not exist): nvidia-modprobe -u -c=0"},
		"no mounts":     {func(e *specs.ContainerEdits) { e.Mounts = nil }, "the library libnvidia-ml.so.580.95.05 is missing"},
		"no cuda":       {func(e *specs.ContainerEdits) { e.Mounts = e.Mounts[:1] }, "the library libcuda.so.580.95.05 is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			s, folder, _ := fixed(t)
			edits := completeEdits(s.common.roots.Driver)
			test.change(edits)
			s.common.discover = func(context.Context, string, host.DevRoot) (*specs.ContainerEdits, error) { return edits, nil }
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

// TestDriverContainerComes: the nodes of a driver container that comes later, or comes
// back, are those of the next claim.
func TestDriverContainerComes(t *testing.T) {
	if _, err := os.Stat("/dev/nvidia-uvm"); err == nil {
		t.Skip("this machine has the nodes itself")
	}
	root := t.TempDir()
	driver(t, root, version)
	roots := host.Roots{Driver: root, Dev: host.AutoDev, HostDriver: "/run/nvidia/driver"}
	s, _ := newSpecs(t, roots)
	if _, err := s.Write(t.Context(), uid, []Device{whole}); err == nil || !strings.Contains(err.Error(),
		"the device node nvidia-uvm is neither in /run/nvidia/driver/dev nor in /dev on this node") {
		t.Errorf("without nodes: got %v", err)
	}
	node(t, root, "dev/nvidiactl", 195, 255)
	node(t, root, "dev/nvidia-uvm", 510, 0)
	edits := must.Get(s.common.get(t.Context()))(t)
	for _, n := range edits.DeviceNodes {
		if n.HostPath != "/run/nvidia/driver"+n.Path {
			t.Errorf("%s is taken from %q", n.Path, n.HostPath)
		}
	}
	must.Do(t, os.Rename(filepath.Join(root, "dev"), filepath.Join(root, "dev.away")))
	if _, err := s.common.get(t.Context()); err == nil {
		t.Error("the nodes of a container that has ended are still handed out")
	}
}

// TestDriverInFolderOfNVIDIA: Container-Optimized OS keeps the driver's libraries where neither a
// system's loader nor nvcdi looks.
func TestDriverInFolderOfNVIDIA(t *testing.T) {
	const folder = "/usr/local/nvidia/lib64"
	root := t.TempDir()
	driverIn(t, root, folder, version)
	node(t, root, "dev/nvidiactl", 195, 255)
	node(t, root, "dev/nvidia-uvm", 510, 0)
	s, _ := newSpecs(t, host.Roots{Driver: root, Dev: root, HostDriver: "/var/lib/driver", HostDev: "/"})
	edits := must.Get(s.common.get(t.Context()))(t)
	for _, name := range []string{"libcuda.so.", "libnvidia-ml.so.", "libnvidia-ptxjitcompiler.so."} {
		path := filepath.Join(folder, name+version)
		if !slices.ContainsFunc(edits.Mounts, func(m *specs.Mount) bool {
			return m.HostPath == "/var/lib/driver"+path && m.ContainerPath == path
		}) {
			t.Errorf("containers lack %s: %+v", path, edits.Mounts)
		}
	}
	// So that a container's loader finds them.
	if !slices.ContainsFunc(edits.Hooks, func(h *specs.Hook) bool {
		return slices.Contains(h.Args, "update-ldcache") && slices.Contains(h.Args, folder)
	}) {
		t.Errorf("no hook tells the loader of %s: %+v", folder, edits.Hooks)
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

// TestCommonEditsAreShared: what the spec of one claim leaves out stays in those of all others.
func TestCommonEditsAreShared(t *testing.T) {
	hook := func(args ...string) *specs.Hook {
		return &specs.Hook{HookName: "createContainer", Path: "/h", Args: args, Env: []string{"PATH=/"}}
	}
	common := specs.ContainerEdits{Hooks: []*specs.Hook{hook("h", forwardCompatibility), hook("h", "update-ldcache")}}
	before := slices.Clone(common.Hooks)
	edits := Edits{NodesLibrary: true, Nodes: []Node{{Path: "/dev/nvidia0", Major: 195}}}
	spec, _, err := build("u", common, []Device{{Name: "d", Edits: edits}})
	if err != nil || len(spec.ContainerEdits.Hooks) != 1 {
		t.Errorf("spec %+v: %v", spec, err)
	}
	if !slices.Equal(before, common.Hooks) {
		t.Errorf("the common edits have changed: %v", common.Hooks)
	}
}
