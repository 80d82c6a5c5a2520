// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// leftRoom is what a tenant may keep of the node's memory with a folder of an ended claim, charged to nobody.
const leftRoom = 64 << 10

// TestKeptFolder: a pod that has passed on an open folder or file of its claim, to a pod without one, has passed on no memory:
// after the claim's end next to nothing is in that file system, and next to nothing can be written.
func TestKeptFolder(t *testing.T) {
	for name, device := range map[string]harness.Device{
		"shared memory of MPS":       {Kind: harness.MPS},
		"folders of software limits": {Kind: harness.TimeSlice, Memory: 4 << 30, Percent: 50},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "l4x1", named)
			n.StartSupervisor(t)
			p := n.Start(t, n.Interposer(t))
			c := n.Allocate(t, []harness.Device{device})
			folders := keepFolders(t, n.Container(t, p.MustPrepare(t, c)...))
			p.MustUnprepare(t, c)
			p.UntilClean(t, n)
			for _, folder := range folders {
				if held := writeInto(t, folder); held > leftRoom {
					t.Errorf("whoever kept %s of an ended claim holds %d KiB of the node's memory, charged to nobody", folder.Name(), held>>10)
				}
			}
		})
	}
}

// keepFolders opens the folders that a container can write to, and in each a file with some content.
func keepFolders(t *testing.T, spec *oci.Spec) (folders []*os.File) {
	t.Helper()
	for _, m := range spec.Mounts {
		if slices.Contains(m.Options, "ro") {
			continue
		}
		folder := must.Get(os.Open(m.Source))(t)
		t.Cleanup(func() { _ = folder.Close() })
		file, err := os.Create(filepath.Join(m.Source, "content"))
		if err == nil {
			_, err = file.Write(make([]byte, 4*leftRoom))
		}
		must.Do(t, err)
		t.Cleanup(func() { _ = file.Close() })
		folders = append(folders, folder)
	}
	if len(folders) == 0 {
		t.Fatalf("a container can write to nothing: %v", spec.Mounts)
	}
	return folders
}

// writeInto writes files through an open folder, and returns how many bytes that file system has then.
func writeInto(t *testing.T, folder *os.File) (held uint64) {
	t.Helper()
	for i := range 64 {
		fd, err := unix.Openat(int(folder.Fd()), fmt.Sprintf("file%d", i), unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err == nil {
			_, err = unix.Write(fd, make([]byte, leftRoom))
			_ = unix.Close(fd)
		}
		if err != nil {
			break
		}
	}
	var room unix.Statfs_t
	must.Do(t, unix.Fstatfs(int(folder.Fd()), &room))
	return (room.Blocks - room.Bfree) * uint64(room.Bsize)
}

// passedClient runs a program with the folders of a container that a pod has passed on, and returns what it prints.
func passedClient(t *testing.T, n *harness.Node, folders []*os.File) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), harness.Built.Client, "info", "--shm", "/proc/self/fd/4")
	cmd.ExtraFiles = folders
	cmd.Env = []string{"GPUSIM_STATE=" + sysroot.StatePath(n.Root), "CUDA_MPS_PIPE_DIRECTORY=/proc/self/fd/3"}
	out, _ := cmd.CombinedOutput() // it may fail
	return string(out)
}

// passOn opens the folders that containers have at these places.
func passOn(t *testing.T, spec *oci.Spec, at ...string) (folders []*os.File) {
	t.Helper()
	for _, path := range at {
		i := slices.IndexFunc(spec.Mounts, func(m oci.Mount) bool { return m.Destination == path })
		if i < 0 {
			t.Fatalf("a container has nothing at %s: %v", path, spec.Mounts)
		}
		folder := must.Get(os.Open(spec.Mounts[i].Source))(t)
		t.Cleanup(func() { _ = folder.Close() })
		folders = append(folders, folder)
	}
	return folders
}

// TestKeptPipe: a process that was passed the folder with the daemon's socket reaches no daemon with it after the end of the session. Until
// then it can be a client, if it has the GPU's nodes: docs/reference/security-tests.md says so.
func TestKeptPipe(t *testing.T) {
	n := harness.NewNode(t, "h100x1", named)
	n.StartSupervisor(t)
	p := n.Start(t)
	first, beside, later := n.Allocate(t, []harness.Device{{Kind: harness.MPS}}), n.Allocate(t, []harness.Device{{Kind: harness.MPS}}),
		n.Allocate(t, []harness.Device{{Kind: harness.MPS}})
	passed := passOn(t, n.Container(t, p.MustPrepare(t, first)...), "/tmp/nvidia-mps", "/dev/shm")
	p.MustPrepare(t, beside)
	p.MustUnprepare(t, first)
	if out := passedClient(t, n, passed); !strings.Contains(out, "as a client") {
		t.Fatalf("before the end of the session it is no client: %s", out)
	}
	p.MustUnprepare(t, beside)
	p.UntilClean(t, n)
	ids := p.MustPrepare(t, later)
	wantOutput(t, n, n.Container(t, ids...), []string{"as a client"}, "info")
	if out := passedClient(t, n, passed); strings.Contains(out, "as a client") {
		t.Errorf("a process without a claim is a client of the daemon through the folder of a session that has ended: %s", out)
	}
}

// TestLinksInSharedMemory: a program follows no symbolic link in the /dev/shm that it shares with other tenants, who may have
// put it there. The session's own mount forbids it, and so must that of a container.
func TestLinksInSharedMemory(t *testing.T) {
	n, ids := shareOf(t, named)
	spec := n.Container(t, ids...)
	link := filepath.Join(passOn(t, spec, "/dev/shm")[0].Name(), "link")
	must.Do(t, os.Symlink(".", link))
	wantOutput(t, n, n.Container(t, ids...), []string{"as a client"}, "info", "--shm=/dev/shm/.")
	if out, err := n.RunProgram(t, spec, "info", "--shm=/dev/shm/link"); err == nil {
		t.Errorf("a program follows a symbolic link that another tenant may have put into the shared /dev/shm: %s", out)
	}
}
