// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
)

// Spec is what the inside of a node's namespaces looks like.
type Spec struct {
	Scratch string // folder on the machine for what the node writes to its disks; emptied by the caller
	Groups  cgroup.Groups
	Network Network
}

// Setup makes the namespaces into a node. It is called once by the first process, before anything else runs in them.
func Setup(s Spec) error {
	steps := []struct {
		what string
		do   func() error
	}{
		{"separate the mounts", separateMounts},
		{"set the host name", func() error { return unix.Sethostname([]byte(s.Network.Self.Name)) }},
		{"make private folders", s.folders},
		{"mount the control groups", s.cgroups},
		{"make the network", s.Network.setup},
		{"name the nodes", s.hosts},
	}
	for _, step := range steps {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

// separateMounts keeps our mounts from reaching the machine, and lets containers share theirs with the node.
func separateMounts() error {
	if err := mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return err
	}
	if err := mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	// A proc of our own shows our processes, a sysfs of our own our network devices. The machine's are detached with all that
	// is mounted below them: programs look for control groups in the list of mounts, covered ones included.
	for _, kind := range []string{"proc", "sys"} {
		dir := "/" + kind
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: not a mount
			return fmt.Errorf("detach the machine's %s: %w", dir, err)
		}
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := mount("proc", "/proc", "proc", flags, ""); err != nil {
		return err
	}
	return mount("sysfs", "/sys", "sysfs", flags, "")
}

// overlayMagic is what statfs(2) says of an overlay.
const overlayMagic = 0x794c7630

// folders puts private, standard folders over the machine's, so that nothing lands there.
func (s Spec) folders() error {
	if err := os.MkdirAll(s.Scratch, 0o755); err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(s.Scratch, &fs); err != nil {
		return fmt.Errorf("look at the file system of %s: %w", s.Scratch, err)
	}
	if fs.Type == overlayMagic { // as in a container: overlays do not stack as upper layers, memory does
		if err := mount("tmpfs", s.Scratch, "tmpfs", 0, "mode=755"); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/etc", "/var/lib"} {
		if err := s.overlay(dir); err != nil {
			return err
		}
	}
	// Devices are allowed on /run: the simulated machine keeps its device nodes there.
	if err := mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	// containerd's snapshots are overlays, so they need a plain file system too.
	for _, dir := range []string{"/var/lib/kubelet", "/var/lib/containerd", "/var/log"} {
		from := filepath.Join(s.Scratch, "bind", dir)
		if err := errors.Join(os.MkdirAll(from, 0o755), os.MkdirAll(dir, 0o755)); err != nil {
			return err
		}
		if err := mount(from, dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	if err := mount("", "/var/lib/kubelet", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return err
	}
	for _, dir := range append(runFolders, "/etc/cdi", "/etc/cni/net.d") {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// runFolders are those of /run that programs expect.
var runFolders = []string{"/run/lock", "/run/netns", "/run/cdi"}

func (s Spec) overlay(dir string) error {
	base := filepath.Join(s.Scratch, "overlay", strings.ReplaceAll(strings.Trim(dir, "/"), "/", "-"))
	upper, work := filepath.Join(base, "upper"), filepath.Join(base, "work")
	if err := errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o755)); err != nil {
		return err
	}
	return mount("overlay", dir, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", dir, upper, work))
}

func (s Spec) hosts() error {
	f, err := os.OpenFile("/etc/hosts", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	lines := "\n"
	for _, h := range append([]Host{s.Network.Self}, s.Network.Peers...) {
		lines += fmt.Sprintf("%s\t%s\n", h.Address, h.Name)
	}
	if _, err = f.WriteString(lines); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

// cgroups mounts the machine's layout again; in our control group namespace each tree begins at our own folder.
func (s Spec) cgroups() error {
	const root = "/sys/fs/cgroup"
	if len(s.Groups) == 1 && s.Groups[0].V2 {
		if err := mount("cgroup2", root, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return err
		}
		// A folder that holds processes cannot give controllers to children.
		leaf := filepath.Join(root, "init")
		if err := os.Mkdir(leaf, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte("0"), 0o644); err != nil { //nolint:gosec // a kernel file
			return err
		}
		return cgroup.Delegate(root)
	}
	if err := mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"); err != nil {
		return err
	}
	for _, g := range s.Groups {
		if err := mountTree(root, g.Hierarchy); err != nil {
			return err
		}
	}
	return nil
}

func mountTree(root string, h cgroup.Hierarchy) error {
	dir := filepath.Join(root, h.Name())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	switch {
	case h.V2:
		return mount("cgroup2", dir, "cgroup2", flags, "")
	case strings.HasPrefix(h.Options, "name="):
		return mount("cgroup", dir, "cgroup", flags, "none,"+h.Options)
	}
	// Two controllers in one tree are also known by each one's name.
	if controllers := strings.Split(h.Options, ","); len(controllers) > 1 {
		for _, c := range controllers {
			if err := os.Symlink(h.Name(), filepath.Join(root, c)); err != nil && !errors.Is(err, os.ErrExist) {
				return err
			}
		}
	}
	return mount("cgroup", dir, "cgroup", flags, h.Options)
}

func mount(source, target, kind string, flags uintptr, options string) error {
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		what := kind
		if what == "" {
			what = "flags"
		}
		hint := ""
		if errors.Is(err, unix.ENODEV) {
			hint = " (this kernel has no " + kind + ")"
		}
		return fmt.Errorf("mount %s on %s: %w%s", what, target, err, hint)
	}
	return nil
}
