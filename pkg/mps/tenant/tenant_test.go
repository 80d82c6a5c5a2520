// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/host/hosttest"
	"github.com/partage-dev/partage/pkg/wait"
)

func TestNoSuchProcess(t *testing.T) {
	if InPod(1 << 30) {
		t.Error("a process that does not exist is in a pod")
	}
	if pod, ok := PodOf(1 << 30); ok {
		t.Errorf("a process that does not exist is in %+v", pod)
	}
}

func TestOOMKills(t *testing.T) {
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
	t.Cleanup(func() {
		// When the folder is gone the look that waits for it ends, which the next test would share.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if err := wait.Until(ctx, func() (bool, error) {
			_, err := DeviceNodes(os.Getpid())
			return err == nil, nil
		}); err != nil {
			t.Error("it still hangs")
		}
	})
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
