// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/flow/harness"
)

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
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
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
