// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"flag"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const (
	uid     = types.UID("7d9a1c1e-3c39-4c0f-9e2f-4b1d8c3a5e60")
	version = "580.95.05"
)

// partition and whole are devices as package claim makes them.
var (
	partition = Device{
		Name: "gpu-0000-1b-00-0-mig-1g10gb-me-4",
		Edits: Edits{
			Nodes: []Node{
				{Path: "/dev/nvidia3", HostPath: "/dev/nvidia3", Major: 195, Minor: 3},
				{Path: "/dev/nvidia-caps/nvidia-cap472", Major: 508, Minor: 472},
				{Path: "/dev/nvidia-caps/nvidia-cap471", Major: 508, Minor: 471},
			},
		},
	}
	whole = Device{
		Name: "gpu-0000-43-00-0",
		Edits: Edits{
			Nodes: []Node{{Path: "/dev/nvidia0", HostPath: "/run/nvidia/dev/nvidia0", Major: 195, Minor: 0}},
			Env:   []string{"B=2", "A=1"},
		},
	}
	share = Device{
		Name: "gpu-0000-52-00-0-mps-8c0d0c8e-6a0e-4c53-9f0e-0d4f4e5b7a11",
		Edits: Edits{
			Nodes: []Node{{Path: "/dev/nvidia1", HostPath: "/dev/nvidia1", Major: 195, Minor: 1}},
			Env:   []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"},
			Mounts: []Mount{
				{HostPath: "/run/partage/mps/gpu-0000-52-00-0/pipe", ContainerPath: "/tmp/nvidia-mps", NoExec: true},
				{HostPath: "/run/partage/mps/gpu-0000-52-00-0/shm", ContainerPath: "/dev/shm", NoExec: true, NoFollow: true},
				{HostPath: "/var/lib/kubelet/plugins/gpu.nvidia.com/list", ContainerPath: "/etc/list", ReadOnly: true},
			},
			Hooks: []Hook{
				{Path: "/var/lib/kubelet/plugins/gpu.nvidia.com/hooks/partage-hook-0123456789ab", Args: []string{"partage-hook", "mps-client"}},
				{Path: "/opt/another", Args: []string{"another"}},
			},
		},
	}
)

func put(t *testing.T, root, path string) {
	t.Helper()
	full := filepath.Join(root, path)
	must.Do(t, os.MkdirAll(filepath.Dir(full), 0o755))
	must.Do(t, os.WriteFile(full, []byte("not a library"), 0o755))
}

func node(t *testing.T, root, path string, major, minor uint32) {
	t.Helper()
	full := filepath.Join(root, path)
	must.Do(t, os.MkdirAll(filepath.Dir(full), 0o755))
	if err := unix.Mknod(full, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); err != nil {
		t.Skipf("cannot make device nodes: %v", err)
	}
	must.Do(t, os.Chmod(full, 0o666))
}

// driver puts a driver of the given version under root. Nothing in it can be
// loaded, so nvcdi uses the file names.
func driver(t *testing.T, root, version string) {
	t.Helper()
	driverIn(t, root, "usr/lib64", version)
	put(t, root, "usr/bin/nvidia-smi")
}

// driverIn puts the driver's libraries into a folder under root.
func driverIn(t *testing.T, root, folder, version string) {
	t.Helper()
	t.Setenv("PATH", "/usr/bin:/bin")
	for _, name := range []string{"libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so"} {
		put(t, root, filepath.Join(folder, name+"."+version))
		link := filepath.Join(root, folder, name+".1")
		if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		must.Do(t, os.Symlink(name+"."+version, link))
	}
}

func makeControlNodes(t *testing.T, root string) {
	t.Helper()
	node(t, root, "dev/nvidiactl", 195, 255)
	node(t, root, "dev/nvidia-modeset", 195, 254)
	node(t, root, "dev/nvidia-uvm", 510, 0)
	node(t, root, "dev/nvidia-uvm-tools", 510, 1)
}

func newSpecs(t *testing.T, roots host.Roots) (*Specs, string) {
	t.Helper()
	folder := filepath.Join(t.TempDir(), "cdi")
	s := must.Get(New(Options{Root: folder, Roots: roots, HookPath: "/opt/partage/nvidia-cdi-hook"}))(t)
	return s, folder
}

func TestGolden(t *testing.T) {
	root := t.TempDir()
	driver(t, root, version)
	makeControlNodes(t, root)
	for name, test := range map[string]struct {
		roots   host.Roots
		devices []Device
	}{
		// One golden file each, without the temporary folder's name in it.
		"partition": {host.Roots{Driver: root, Dev: root, HostDriver: "/", HostDev: "/"}, []Device{partition}},
		"several": {host.Roots{Driver: root, Dev: root, HostDriver: "/run/nvidia/driver", HostDev: "/run/nvidia"},
			[]Device{whole, partition}},
		"share": {host.Roots{Driver: root, Dev: root, HostDriver: "/", HostDev: "/"}, []Device{share}},
	} {
		t.Run(name, func(t *testing.T) {
			s, folder := newSpecs(t, test.roots)
			s.SetDriverVersion(version)
			ids := must.Get(s.Write(t.Context(), uid, test.devices))(t)
			for _, d := range test.devices {
				if want := "k8s.gpu.nvidia.com/claim=" + string(uid) + "-" + d.Name; ids[d.Name] != want {
					t.Errorf("got id %q, want %q", ids[d.Name], want)
				}
			}
			path := filepath.Join(folder, "k8s.gpu.nvidia.com-claim_"+string(uid)+".json")
			golden(t, path, filepath.Join("testdata", name+".json"))
			checkLoads(t, folder, ids)
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("mode: got %v, %v", info.Mode(), err)
			}
		})
	}
}

func golden(t *testing.T, path, want string) {
	t.Helper()
	got := must.Get(os.ReadFile(path))(t)
	if *update {
		must.Do(t, os.MkdirAll(filepath.Dir(want), 0o755))
		must.Do(t, os.WriteFile(want, got, 0o644))
	}
	expected := must.Get(os.ReadFile(want))(t)
	if diff := cmp.Diff(string(expected), string(got)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// checkLoads reads the folder as a container runtime does.
func checkLoads(t *testing.T, folder string, ids map[string]string) {
	t.Helper()
	cache := must.Get(cdiapi.NewCache(cdiapi.WithSpecDirs(folder), cdiapi.WithAutoRefresh(false)))(t)
	if errs := cache.GetErrors(); len(errs) > 0 {
		t.Errorf("the CDI library finds fault: %v", errs)
	}
	for _, id := range ids {
		if cache.GetDevice(id) == nil {
			t.Errorf("device %s cannot be resolved", id)
		}
	}
}

// fixed gives Specs common edits without a driver on disk that nvcdi could read.
func fixed(t *testing.T) (*Specs, string, *int) {
	t.Helper()
	root := t.TempDir()
	driver(t, root, version)
	s, folder := newSpecs(t, host.Roots{Driver: root, Dev: root, HostDriver: "/", HostDev: "/"})
	calls := 0
	s.common.discover = func(context.Context, string, host.DevRoot) (*specs.ContainerEdits, error) {
		calls++
		return completeEdits(root), nil
	}
	return s, folder, &calls
}

func completeEdits(root string) *specs.ContainerEdits {
	library := func(name string) *specs.Mount {
		return &specs.Mount{HostPath: root + "/usr/lib64/" + name, ContainerPath: "/usr/lib64/" + name, Options: []string{"ro"}}
	}
	return &specs.ContainerEdits{
		Env: []string{"NVIDIA_VISIBLE_DEVICES=all"},
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/nvidiactl", HostPath: root + "/dev/nvidiactl", Major: 195, Minor: 255},
			{Path: "/dev/nvidia-uvm", HostPath: root + "/dev/nvidia-uvm", Major: 510},
		},
		Mounts: []*specs.Mount{library("libnvidia-ml.so." + version), library("libcuda.so." + version)},
		Hooks:  []*specs.Hook{{HookName: "createContainer", Path: "/hook", Args: []string{"nvidia-cdi-hook", "update-ldcache"}}},
	}
}

func TestWriteIsIdempotent(t *testing.T) {
	s, folder, calls := fixed(t)
	first := must.Get(s.Write(t.Context(), uid, []Device{whole, partition}))(t)
	before := statOnly(t, folder)
	second := must.Get(s.Write(t.Context(), uid, []Device{partition, whole}))(t)
	if diff := cmp.Diff(first, second); diff != "" {
		t.Errorf("other ids:\n%s", diff)
	}
	if after := statOnly(t, folder); !os.SameFile(before, after) {
		t.Error("the same content was written again")
	}
	must.Get(s.Write(t.Context(), uid, []Device{whole}))(t)
	if after := statOnly(t, folder); os.SameFile(before, after) {
		t.Error("the file was not replaced")
	}
	if *calls != 2 {
		t.Errorf("common edits were looked for %d times, want 2", *calls)
	}
}

// statOnly expects one file in the folder.
func statOnly(t *testing.T, folder string) fs.FileInfo {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil || len(entries) != 1 {
		t.Fatalf("got %v, %v, want one file", entries, err)
	}
	return must.Get(entries[0].Info())(t)
}

func TestMatches(t *testing.T) {
	s, folder, _ := fixed(t)
	check := func(when string, want bool, devices ...Device) {
		t.Helper()
		if got, err := s.Matches(t.Context(), uid, devices); err != nil || got != want {
			t.Errorf("%s: got %v, %v, want %v", when, got, err, want)
		}
	}
	check("without a spec", false, whole)
	must.Get(s.Write(t.Context(), uid, []Device{whole, partition}))(t)
	before := statOnly(t, folder)
	check("with the same devices", true, partition, whole)
	check("with others", false, whole)
	if after := statOnly(t, folder); !os.SameFile(before, after) {
		t.Error("the file was replaced")
	}
	if _, err := s.Matches(t.Context(), "../x", []Device{whole}); err == nil {
		t.Error("a wrong UID is accepted")
	}
}

// TestConformanceIsNoClaim shows that the driver takes the spec of the conformance command, which runs beside it, for none of a
// claim's: it has no record, and would be removed.
func TestConformanceIsNoClaim(t *testing.T) {
	s, folder, _ := fixed(t)
	must.Get(s.Write(t.Context(), Conformance, []Device{whole}))(t)
	if uids, err := s.List(); err != nil || len(uids) > 0 {
		t.Errorf("claims with a spec: %v, %v", uids, err)
	}
	if entries, err := os.ReadDir(folder); err != nil || len(entries) != 1 {
		t.Errorf("the folder has %v, %v", entries, err)
	}
}

// TestRemove: what a process that was killed has begun to write is found by the claim, which may have no record yet, and removed with the
// spec. Specs of other claims stay.
func TestRemove(t *testing.T) {
	s, folder, _ := fixed(t)
	other := types.UID("0b6f4f5e-0000-4000-8000-000000000000")
	for _, u := range []types.UID{other, uid} {
		must.Get(s.Write(t.Context(), u, []Device{whole}))(t)
	}
	for _, left := range []string{"", s.path(uid)} {
		must.Do(t, errors.Join(os.WriteFile(host.TemporaryName(s.path(uid)), nil, 0o600), os.RemoveAll(left)))
		if uids, err := s.List(); err != nil || !slices.Equal(slices.Sorted(slices.Values(uids)), []types.UID{other, uid}) {
			t.Errorf("claims with a spec: %v, %v", uids, err)
		}
	}
	for range 2 {
		if err := s.Remove(uid); err != nil {
			t.Error(err)
		}
	}
	if info := statOnly(t, folder); !strings.Contains(info.Name(), string(other)) {
		t.Errorf("left with %s", info.Name())
	}
}

func TestWriteAfterFolderVanished(t *testing.T) {
	s, folder, _ := fixed(t)
	must.Do(t, os.RemoveAll(folder))
	if err := s.Remove(uid); err != nil {
		t.Error(err)
	}
	if _, err := s.Write(t.Context(), uid, []Device{whole}); err != nil {
		t.Error(err)
	}
}

func TestWriteRefuses(t *testing.T) {
	s, folder, _ := fixed(t)
	for name, test := range map[string]struct {
		uid     types.UID
		devices []Device
		want    string
	}{
		"path in uid":    {"../../etc/x", []Device{whole}, `claim UID "../../etc/x"`},
		"empty uid":      {"", []Device{whole}, "claim UID"},
		"no devices":     {uid, nil, "no devices"},
		"twice":          {uid, []Device{whole, whole}, "device gpu-0000-43-00-0 is listed twice"},
		"no nodes":       {uid, []Device{{Name: "a"}}, "device a has no device nodes"},
		"no number":      {uid, []Device{{Name: "a", Edits: Edits{Nodes: []Node{{Path: "/dev/nvidia0"}}}}}, "node /dev/nvidia0 has no device number"},
		"bad name":       {uid, []Device{{Name: "a b", Edits: Edits{Nodes: whole.Nodes}}}, `a b"`},
		"bad env":        {uid, []Device{{Name: "a", Edits: Edits{Nodes: whole.Nodes, Env: []string{"novalue"}}}}, "novalue"},
		"no path":        {uid, []Device{{Name: "a", Edits: Edits{Nodes: []Node{{Major: 195}}}}}, "path"},
		"bad permission": {uid, []Device{{Name: "a", Edits: Edits{Nodes: []Node{{Path: "/dev/x", Major: 1, Permissions: "x"}}}}}, `"x"`},
		"mount twice": {uid, []Device{{Name: "a", Edits: Edits{Nodes: whole.Nodes, Mounts: []Mount{{HostPath: "/a", ContainerPath: "/m"}, {HostPath: "/b", ContainerPath: "/m"}}}}},
			"device a: two mounts at /m"},
		"relative mount": {uid, []Device{{Name: "a", Edits: Edits{Nodes: whole.Nodes, Mounts: []Mount{{HostPath: "a", ContainerPath: "/m"}}}}}, `mount of "a" at "/m": want an absolute path of the host`},
		"mount in dots":  {uid, []Device{{Name: "a", Edits: Edits{Nodes: whole.Nodes, Mounts: []Mount{{HostPath: "/a", ContainerPath: "/m/.."}}}}}, "want an absolute path in the container"},
		"mount on all":   {uid, []Device{{Name: "a", Edits: Edits{Nodes: whole.Nodes, Mounts: []Mount{{HostPath: "/a", ContainerPath: "/"}}}}}, "want an absolute path in the container"},
		"relative hook":  {uid, []Device{{Name: "a", Edits: Edits{Nodes: whole.Nodes, Hooks: []Hook{{Path: "h", Args: []string{"h"}}}}}}, `hook "h": want an absolute path`},
		"hook, no name":  {uid, []Device{{Name: "a", Edits: Edits{Nodes: whole.Nodes, Hooks: []Hook{{Path: "/h"}}}}}, "hook /h has no arguments"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := s.Write(t.Context(), test.uid, test.devices); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
	if entries, err := os.ReadDir(folder); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
	if err := s.Remove("../x"); err == nil {
		t.Error("Remove accepted a path as UID")
	}
}

// A container may have several devices that bring the same: they are no more than
// one of them.
func TestDevicesOfOneSession(t *testing.T) {
	s, folder, _ := fixed(t)
	other := share
	other.Name = "gpu-0000-53-00-0"
	ids := must.Get(s.Write(t.Context(), uid, []Device{share, other}))(t)
	cache := must.Get(cdiapi.NewCache(cdiapi.WithSpecDirs(folder), cdiapi.WithAutoRefresh(false)))(t)
	container := func(ids ...string) *oci.Spec {
		t.Helper()
		spec := &oci.Spec{}
		if missing, err := cache.InjectDevices(spec, ids...); err != nil || len(missing) > 0 {
			t.Fatalf("%v, missing %v", err, missing)
		}
		return spec
	}
	one, both := container(ids[share.Name]), container(ids[share.Name], ids[other.Name])
	if diff := cmp.Diff(one.Mounts, both.Mounts); diff != "" {
		t.Errorf("mounts of one and of both:\n%s", diff)
	}
	if diff := cmp.Diff(one.Process.Env, both.Process.Env); diff != "" {
		t.Errorf("environment of one and of both:\n%s", diff)
	}
	shm := oci.Mount{Destination: "/dev/shm", Source: share.Mounts[1].HostPath, Options: []string{"bind", "rw", "nosuid", "nodev", "noexec", "nosymfollow"}}
	if !slices.ContainsFunc(both.Mounts, func(m oci.Mount) bool { return cmp.Equal(m, shm) }) {
		t.Errorf("mounts: %+v", both.Mounts)
	}
}

func TestNewRefuses(t *testing.T) {
	for name, o := range map[string]Options{
		"relative root":      {Root: "cdi"},
		"relative hook":      {Root: "/nonexistent/cdi", HookPath: "nvidia-cdi-hook"},
		"relative host root": {Root: "/nonexistent/cdi", Roots: host.Roots{HostDriver: "driver"}},
	} {
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), "must be an absolute path") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// TestHookPrograms: what specs name, whoever wrote them.
func TestHookPrograms(t *testing.T) {
	s, folder, _ := fixed(t)
	want := func(paths ...string) {
		t.Helper()
		programs, err := s.HookPrograms()
		if diff := cmp.Diff(paths, slices.Sorted(maps.Keys(programs))); err != nil || diff != "" {
			t.Errorf("%v, -want +got:\n%s", err, diff)
		}
	}
	want()
	must.Get(s.Write(t.Context(), uid, []Device{whole}))(t)
	want("/hook")
	other := types.UID("0b6f4f5e-0000-4000-8000-000000000000")
	must.Get(s.Write(t.Context(), other, []Device{share}))(t)
	put(t, folder, "nvidia.com-gpu.json") // of somebody else
	put(t, folder, ".k8s.gpu.nvidia.com-claim_x.json.tmp")
	want("/hook", "/opt/another", share.Hooks[0].Path)
	// As an earlier version wrote it.
	old := `{"cdiVersion": "0.5.0", "devices": [{"name": "a", "containerEdits": {"hooks": [{"hookName": "createContainer", "path": "/data/mps-hook"}]}}]}`
	must.Do(t, os.WriteFile(s.path(other), []byte(old), 0o644))
	want("/data/mps-hook", "/hook")
	must.Do(t, os.WriteFile(s.path(other), []byte("{"), 0o644))
	if programs, err := s.HookPrograms(); err == nil || !strings.Contains(err.Error(), s.path(other)) {
		t.Errorf("half of a spec: got %v, %v", programs, err)
	}
	must.Do(t, os.RemoveAll(folder))
	want()
	put(t, filepath.Dir(folder), filepath.Base(folder))
	if programs, err := s.HookPrograms(); err == nil {
		t.Errorf("without a folder: got %v", programs)
	}
}

// TestHookKeepsItsLimits: what a hook brings is added to, not replaced.
func TestHookKeepsItsLimits(t *testing.T) {
	timeout := 5
	h := &specs.Hook{Env: []string{"PATH=/opt", "A=1"}, Timeout: &timeout}
	confine(h)
	if diff := cmp.Diff(&specs.Hook{Env: []string{"PATH=/opt", "A=1"}, Timeout: &timeout}, h); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for name, h := range map[string]*specs.Hook{
		"no environment": {Path: "/h", Timeout: &timeout},
		"no time limit":  {Path: "/h", Env: []string{"A=1"}},
		"a limit of 0":   {Path: "/h", Env: []string{"A=1"}, Timeout: new(int)},
	} {
		if confine(h); !slices.Contains(h.Env, hookPath) || *h.Timeout <= 0 {
			t.Errorf("%s: got %q and %d", name, h.Env, *h.Timeout)
		}
	}
}
