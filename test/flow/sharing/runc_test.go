// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// image is what an image sets, by accident or not.
var image = []string{"LOG_LEVEL=info", "HEALTH_SOCKET=x", "CHECK_INTERVAL=y", "LD_PRELOAD=/evil.so", "GODEBUG=madvdontneed=1"}

// TestHooksInOldRunc runs containers with runc 1.2, which gives a hook that has no
// environment that of the container. Those of newer versions get none.
func TestHooksInOldRunc(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	n.StartSupervisor(t)
	p := n.Start(t, n.Interposer(t))
	mps := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS}}))
	limited := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 1, Kind: harness.TimeSlice, Memory: 10 << 30}}))
	runc := newRunc(t)

	starts := func(t *testing.T, spec *oci.Spec) {
		t.Helper()
		if out, err := runc.run(t, spec); err != nil || !strings.Contains(out, "the program") {
			t.Errorf("the container says %q: %v", out, err)
		}
	}
	refused := func(t *testing.T, spec *oci.Spec, want string) {
		t.Helper()
		if out, err := runc.run(t, spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the container says %q, %v, want %q", out, err, want)
		}
	}
	for name, ids := range map[string][]string{"MPS": mps, "software limits": limited} {
		t.Run(name, func(t *testing.T) {
			starts(t, runc.container(t, n, ids))
			// A pod can set this, too. It ends every Go program that gets it.
			spec := runc.container(t, n, ids)
			spec.Process.Env = append(spec.Process.Env, "GOMEMLIMIT=bogus")
			starts(t, spec)
		})
	}
	for name, test := range map[string]struct {
		change func(*oci.Spec) *oci.Spec
		leaks  bool
	}{
		"a hook sees its own environment only": {func(spec *oci.Spec) *oci.Spec { return spec }, false},
		"a hook with an older spec sees all":   {older, true},
	} {
		t.Run(name, func(t *testing.T) {
			seen := filepath.Join(t.TempDir(), "environment")
			spec := runc.container(t, n, mps)
			if len(spec.Hooks.CreateRuntime) == 0 || len(spec.Hooks.CreateContainer) == 0 {
				t.Fatalf("hooks: %+v", spec.Hooks)
			}
			spec = test.change(spec)
			for _, hook := range hooks(spec) {
				hook.Path, hook.Args = "/bin/sh", []string{"sh", "-c", `/usr/bin/env >>"$0"`, seen}
			}
			starts(t, spec)
			text, err := os.ReadFile(seen)
			if err != nil || !test.leaks && !strings.Contains(string(text), "PATH=/usr/sbin") {
				t.Errorf("%v: the hooks see %s", err, text)
			}
			for _, v := range image {
				expect.Equal(t, strings.Contains(string(text), v+"\n"), test.leaks, "a hook sees", v)
			}
		})
	}
	// As it was with the specs of earlier versions: all hooks were createContainer hooks
	// without an environment, and the supervisor was one.
	t.Run("the supervisor with an older spec", func(t *testing.T) {
		spec := older(runc.container(t, n, limited))
		for _, hook := range hooks(spec) {
			hook.Path, hook.Args = harness.Built.Supervisor, []string{"mps-supervisor", "version"}
		}
		refused(t, spec, "from environment variable")
	})
	t.Run("the hook with an older spec", func(t *testing.T) {
		starts(t, older(runc.container(t, n, limited)))
		spec := older(runc.container(t, n, limited))
		spec.Process.Env = append(spec.Process.Env, "GOMEMLIMIT=bogus")
		refused(t, spec, "GOMEMLIMIT")
	})
	t.Run("links in the shared /dev/shm", func(t *testing.T) {
		n, ids := shareOf(t, named)
		spec := runc.container(t, n, ids)
		must.Do(t, os.Symlink(".", filepath.Join(passOn(t, spec, "/dev/shm")[0].Name(), "link")))
		spec.Process.Args[2] = "ls /dev/shm/ && ! ls /dev/shm/link/ && echo the program"
		starts(t, spec)
	})
	t.Run("a hook that hangs", func(t *testing.T) {
		spec := runc.container(t, n, mps)
		second := 1
		hook := hooks(spec)[0]
		hook.Path, hook.Args, hook.Timeout = "/bin/sh", []string{"sh", "-c", "exec sleep infinity"}, &second
		refused(t, spec, "ran past specified timeout")
	})
}

// hooks returns all hooks of a container.
func hooks(spec *oci.Spec) (all []*oci.Hook) {
	for _, list := range [][]oci.Hook{spec.Hooks.CreateRuntime, spec.Hooks.CreateContainer} {
		for i := range list {
			all = append(all, &list[i])
		}
	}
	return all
}

// older makes the hooks those of earlier versions.
func older(spec *oci.Spec) *oci.Spec {
	for _, hook := range hooks(spec) {
		hook.Env, hook.Timeout = nil, nil
	}
	spec.Hooks.CreateContainer = slices.Concat(spec.Hooks.CreateContainer, spec.Hooks.CreateRuntime)
	spec.Hooks.CreateRuntime = nil
	return spec
}

// oldRunc is the runc of the module test/runc.
type oldRunc struct{ program, state string }

func newRunc(t *testing.T) *oldRunc {
	t.Helper()
	harness.SkipWithoutMounts(t)
	dir := must.Get(filepath.Abs("../../runc"))(t)
	// It stays, so that it is not linked again.
	program := filepath.Join(filepath.Dir(harness.Built.Driver), "runc-1.2")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/opencontainers/runc")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=1", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build runc: %v: %s", err, out)
	}
	return &oldRunc{program: program, state: t.TempDir()}
}

// container is the configuration of a container with CDI devices and the environment of
// an image. Its program prints a line.
func (r *oldRunc) container(t *testing.T, n *harness.Node, ids []string) *oci.Spec {
	t.Helper()
	spec := n.Container(t, ids...)
	spec.Version = "1.2.0"
	spec.Root = &oci.Root{Path: "rootfs"}
	spec.Process.Cwd, spec.Process.Args = "/", []string{"/bin/sh", "-c", "echo the program"}
	spec.Process.Env = slices.Concat(spec.Process.Env, image)
	spec.Mounts = slices.Concat([]oci.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc"},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
	}, spec.Mounts)
	for _, dir := range []string{"/bin", "/lib", "/lib64", "/usr"} {
		if _, err := os.Stat(dir); err == nil {
			spec.Mounts = append(spec.Mounts, oci.Mount{Destination: dir, Source: dir, Type: "bind", Options: []string{"rbind", "ro"}})
		}
	}
	spec.Linux.Namespaces = []oci.LinuxNamespace{{Type: oci.MountNamespace}, {Type: oci.PIDNamespace}, {Type: oci.IPCNamespace}, {Type: oci.UTSNamespace}}
	return spec
}

// run runs a container to its end.
func (r *oldRunc) run(t *testing.T, spec *oci.Spec) (out string, err error) {
	t.Helper()
	bundle := t.TempDir()
	data, err := json.Marshal(spec)
	if err = errors.Join(err, os.Mkdir(filepath.Join(bundle, "rootfs"), 0o755),
		os.WriteFile(filepath.Join(bundle, "config.json"), data, 0o600)); err != nil {
		t.Fatal(err)
	}
	id := strings.ToLower(filepath.Base(filepath.Dir(bundle)) + filepath.Base(bundle))
	cmd := exec.CommandContext(t.Context(), r.program, "--rootless", "true", "--root", r.state, "run", "--bundle", bundle, id)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%w: %s", err, stderr.String())
	}
	return stdout.String(), nil
}

// TestUserNamespaces runs containers with a user namespace of their own, as those of a pod
// with hostUsers: false. There a runtime cannot make device nodes: it binds what the host
// has at the same path, and does not look at the numbers in the CDI spec.
func TestUserNamespaces(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	n.StartSupervisor(t)
	p := n.Start(t)
	shared := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS}}))
	whole := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 1}}))
	runc := newRunc(t)
	container := func(ids []string) *oci.Spec {
		spec := runc.container(t, n, ids)
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, oci.LinuxNamespace{Type: oci.UserNamespace})
		same := []oci.LinuxIDMapping{{Size: 65536}}
		spec.Linux.UIDMappings, spec.Linux.GIDMappings = same, same
		return spec
	}
	// As where the driver is installed on the host: the nodes are at the container's paths.
	onHost := func(spec *oci.Spec) {
		for i := range spec.Linux.Devices {
			spec.Linux.Devices[i].Path = filepath.Join(n.Root, spec.Linux.Devices[i].Path)
		}
	}

	t.Run("client of MPS", func(t *testing.T) {
		spec := container(shared)
		onHost(spec)
		if out, err := runc.run(t, spec); err == nil || !strings.Contains(err.Error(), "hostUsers: false") {
			t.Errorf("the container says %q: %v", out, err)
		}
	})
	t.Run("whole GPU", func(t *testing.T) {
		spec := container(whole)
		onHost(spec)
		path := filepath.Join(n.Root, "dev/nvidia1")
		spec.Process.Args = []string{"/bin/sh", "-c", `stat -c %t:%T "$0" && echo the program`, path}
		var st unix.Stat_t
		must.Do(t, unix.Stat(path, &st))
		want := fmt.Sprintf("%x:%x\nthe program", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		if out, err := runc.run(t, spec); err != nil || !strings.Contains(out, want) {
			t.Errorf("the container says %q: %v, want %q", out, err, want)
		}
	})
	// As with a driver container: they are below its root only.
	t.Run("nodes that the host does not have", func(t *testing.T) {
		out, err := runc.run(t, container(whole))
		if err == nil || !strings.Contains(err.Error(), "no such file or directory") || !strings.Contains(err.Error(), "/dev/nvidia") {
			t.Errorf("the container says %q: %v", out, err)
		}
	})
}
