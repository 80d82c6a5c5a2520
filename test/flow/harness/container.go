// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

// containerVariable makes the test program the first process of a container. It
// is the container's bundle, a folder with its config.json.
const containerVariable = "PARTAGE_FLOW_CONTAINER"

// enterContainerIfAsked must be called at the beginning of TestMain. In a
// container it does not return.
func enterContainerIfAsked() {
	bundle := os.Getenv(containerVariable)
	if bundle == "" {
		return
	}
	err := enterContainer(bundle)
	fmt.Fprintln(os.Stderr, "enter the container:", err)
	os.Exit(1)
}

// enterContainer makes the file system of a container, in which everything of
// this machine can be read and what the spec says lies on top, and becomes its
// program.
func enterContainer(bundle string) error {
	data, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return err
	}
	var spec oci.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return err
	}
	root, err := makeRoot(bundle)
	if err != nil {
		return err
	}
	for _, d := range spec.Linux.Devices {
		path := filepath.Join(root, d.Path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(uint32(d.Major), uint32(d.Minor)))); err != nil {
			return fmt.Errorf("make %s: %w", d.Path, err)
		}
	}
	for _, m := range spec.Mounts {
		if err := bind(m.Source, filepath.Join(root, m.Destination), flagsOf(m.Options)); err != nil {
			return err
		}
	}
	for _, step := range []func() error{
		func() error { return unix.Chroot(root) },
		func() error { return unix.Chdir("/") },
		func() error { return unix.Setuid(int(spec.Process.User.UID)) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return unix.Exec(spec.Process.Args[0], spec.Process.Args, spec.Process.Env)
}

func makeRoot(bundle string) (root string, err error) {
	base := filepath.Join(bundle, "fs")
	root = filepath.Join(base, "root")
	type mount struct{ kind, at, data string }
	for _, m := range []mount{
		{"tmpfs", base, ""},
		{"overlay", root, fmt.Sprintf("lowerdir=/,upperdir=%s/upper,workdir=%s/work", base, base)},
		{"proc", root + "/proc", ""},
		{"tmpfs", root + "/dev", ""},
		{"tmpfs", root + "/dev/shm", ""},
		{"tmpfs", root + "/tmp", "mode=1777"},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return "", err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, m.data); err != nil {
			return "", fmt.Errorf("mount %s at %s: %w", m.kind, m.at, err)
		}
		if m.at != base {
			continue
		}
		for _, dir := range []string{"upper", "work"} {
			if err := os.Mkdir(filepath.Join(base, dir), 0o755); err != nil {
				return "", err
			}
		}
	}
	return root, nil
}

// mountFlags are the flags of a mount by the names that container runtimes have for them.
var mountFlags = map[string]uintptr{
	"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC, "nosymfollow": unix.MS_NOSYMFOLLOW,
}

// flagsOf returns the flags that a mount gets. As in runc, one that has any loses those of its source.
func flagsOf(options []string) (flags uintptr) {
	for _, option := range options {
		flags |= mountFlags[option]
	}
	return flags
}

// bind makes the target if it is not there.
func bind(source, target string, flags uintptr) error {
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	dir := target
	if !info.IsDir() {
		dir = filepath.Dir(target)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if !info.IsDir() {
		file, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o755)
		if err != nil {
			return err
		}
		if err := file.Close(); err != nil {
			return err
		}
	}
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s at %s: %w", source, target, err)
	}
	if flags == 0 {
		return nil
	}
	return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|flags, "")
}

// bundle is what a container runtime makes of a spec before it runs hooks.
func (n *Node) bundle(t testing.TB, spec *oci.Spec) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp(filepath.Dir(n.Root), "c"))(t)
	must.Do(t, os.WriteFile(filepath.Join(dir, "config.json"), must.Get(json.Marshal(spec))(t), 0o600))
	return dir
}

// runHooks runs the hooks of a spec as a container runtime does. The error
// is what kubectl describe shows of a container that does not start.
func runHooks(ctx context.Context, spec *oci.Spec, bundle string) error {
	if spec.Hooks == nil {
		return nil
	}
	pid, ended, err := firstProcess(ctx, spec)
	if err != nil {
		return err
	}
	defer ended()
	state, err := json.Marshal(oci.State{Version: oci.Version, ID: "test", Status: oci.StateCreating, Pid: pid, Bundle: bundle})
	if err != nil {
		return err
	}
	for _, h := range slices.Concat(spec.Hooks.CreateRuntime, spec.Hooks.CreateContainer) {
		if h.Timeout == nil || len(h.Env) == 0 {
			return fmt.Errorf("hook %s: it has the environment %q and the time limit %v: want one of each", h.Path, h.Env, h.Timeout)
		}
		cmd := exec.CommandContext(ctx, h.Path)
		cmd.Args, cmd.Env = h.Args, h.Env
		cmd.Stdin = strings.NewReader(string(state))
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("hook %s: %w: %s", filepath.Base(h.Path), err, out)
		}
	}
	return nil
}

// firstProcess is in the container's cgroup while hooks run. A container without one has this process's.
func firstProcess(ctx context.Context, spec *oci.Spec) (pid int, ended func(), err error) {
	if spec.Linux.CgroupsPath == "" {
		return os.Getpid(), func() {}, nil
	}
	cmd := exec.CommandContext(ctx, "sleep", "infinity")
	if err := startIn(cmd, spec.Linux.CgroupsPath); err != nil {
		return 0, nil, err
	}
	return cmd.Process.Pid, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}, nil
}

// startIn starts a process in a cgroup of version 2, or in this process's where that is empty.
func startIn(cmd *exec.Cmd, cgroup string) error {
	if cgroup == "" {
		return cmd.Start()
	}
	folder, err := os.Open(cgroup)
	if err != nil {
		return err
	}
	defer func() { _ = folder.Close() }()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(folder.Fd())
	return cmd.Start()
}

// containerCommand runs the program of a spec in a container. It ends with this
// process.
func containerCommand(bundle string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{containerVariable + "=" + bundle}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	return cmd
}
