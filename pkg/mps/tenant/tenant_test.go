// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/host/hosttest"
)

func TestInPod(t *testing.T) {
	const uid, container = "8b3f0e6e-7a59-4c8a-9d3c-2f1f4a1f0b11", "b5d1c8a0f1"
	for text, want := range map[string]bool{
		"0::/kubepods/besteffort/pod" + uid + "/" + container + "\n":                                                                            true,
		"0::/kubepods/pod" + uid + "/" + container + "\n":                                                                                       true,
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8b3f0e6e_7a59_4c8a_9d3c_2f1f4a1f0b11.slice/cri-containerd-a.scope\n": true,
		"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod8b3f0e6e_7a59_4c8a_9d3c_2f1f4a1f0b11.slice/cri-containerd-a.scope\n":      true,
		"0::/kubelet/kubepods/pod" + uid + "/a\n":                                                                                               true,
		"4:memory:/system.slice\n3:pids:/kubepods/burstable/pod" + uid + "/a\n0::/\n":                                                           true,
		"4:memory:/kubepods.slice/kubepods-pod8b3f0e6e_7a59_4c8a_9d3c_2f1f4a1f0b11.slice:cri-containerd:a\n":                                    true,
		"0::/../../pod" + uid + "/a\n":                                true,
		"0::/../../burstable/pod0123456789abcdef0123456789abcdef/a\n": true,
		"0::/system.slice/nvidia-persistenced.service\n":              false,
		"0::/user.slice/user-1000.slice/session-2.scope\n":            false,
		"0::/machine.slice/libpod-b5d1c8a0f1.scope\n":                 false,
		"0::/podman\n":      false,
		"0::/mykubepodsx\n": false,
		"12:kubepods:/\n":   false,
		"0::/\n":            false,
		"":                  false,
	} {
		if got := inPod(text); got != want {
			t.Errorf("%q: got %t", text, got)
		}
	}
	if InPod(1 << 30) {
		t.Error("a process that does not exist is in a pod")
	}
}

func TestPodOf(t *testing.T) {
	const uid, plain = "8b3f0e6e-7a59-4c8a-9d3c-2f1f4a1f0b11", "8b3f0e6e7a594c8a9d3c2f1f4a1f0b11"
	const slice = "/kubepods.slice/kubepods-pod8b3f0e6e_7a59_4c8a_9d3c_2f1f4a1f0b11.slice"
	for text, want := range map[string]Pod{
		"0::/kubepods/besteffort/pod" + uid + "/b5d1\n":         {plain, "/kubepods/besteffort/pod" + uid},
		"0::" + slice + "/cri-containerd-a.scope\n":             {plain, slice},
		"0::" + slice + "/crio-a.scope/container/worker\n":      {plain, slice},
		"4:memory:/kubepods/burstable/pod" + uid + "/a\n0::/\n": {plain, ""},
		"0::/../../pod" + uid + "/a\n":                          {plain, ""},
		// A container that may make cgroups chooses their names.
		"0::/kubepods/pod" + uid + "/b5d1/x..y\n":              {plain, "/kubepods/pod" + uid},
		"0::/kubepods/pod0123456789abcdef0123456789abcdef/a\n": {"0123456789abcdef0123456789abcdef", "/kubepods/pod0123456789abcdef0123456789abcdef"},
		"0::/machine.slice/libpod-b5d1c8a0f1.scope\n":          {},
		"0::/kubepods-x/y\n":                                   {},
		"":                                                     {},
	} {
		got, ok := podOf(text)
		if got != want || ok != (want.UID != "") {
			t.Errorf("%q: got %+v, %t, want %+v", text, got, ok, want)
		}
	}
	if got := PlainUID(uid); got != plain {
		t.Errorf("got %s", got)
	}
	if got, ok := oomKills("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n"); got != 2 || !ok {
		t.Errorf("got %d, %t", got, ok)
	}
	if _, ok := oomKills("low 0\n"); ok {
		t.Error("nothing is said of kills")
	}
}

func TestDeviceNodes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("device nodes need root")
	}
	path := filepath.Join(t.TempDir(), "nvidia0")
	// As a simulated node: there is no driver for it.
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(511, 200))); err != nil {
		t.Skip(err)
	}
	before, err := DeviceNodes(os.Getpid())
	if err != nil || before[unix.Mkdev(511, 200)] != "" {
		t.Fatalf("got %v, %v", before, err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	got, err := DeviceNodes(os.Getpid())
	if err != nil || got[unix.Mkdev(511, 200)] != path || got[unix.Mkdev(1, 3)] != os.DevNull {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := DeviceNodes(1 << 30); err == nil {
		t.Error("no error for a process that does not exist")
	}
}

// A file of a server in the network that somebody has stopped holds up who looks at it, and
// a client may have one.
func TestDeviceNodesBesideHungFileSystem(t *testing.T) {
	hosttest.HungFolder(t)
	looked := make(chan error, 1)
	go func() {
		for range 3 {
			if _, err := DeviceNodes(os.Getpid()); err == nil || !strings.Contains(err.Error(), "does not answer") {
				looked <- fmt.Errorf("got %q, want an error that says what does not answer", fmt.Sprint(err))
				return
			}
		}
		looked <- nil
	}()
	select {
	case err := <-looked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("it hangs")
	}
}
