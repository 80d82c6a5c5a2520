// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/host/hosttest"
)

func TestDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("device nodes need root")
	}
	path := filepath.Join(t.TempDir(), "nvidia0")
	// As a simulated node: there is no driver for it.
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(511, 200))); err != nil {
		t.Skip(err)
	}
	before, err := Devices(os.Getpid())
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
	want := func() {
		t.Helper()
		got, err := Devices(os.Getpid())
		if err != nil || got[unix.Mkdev(511, 200)] != path || got[unix.Mkdev(1, 3)] != os.DevNull {
			t.Errorf("got %v, %v", got, err)
		}
	}
	want()
	if _, err := Devices(1 << 30); err == nil {
		t.Error("no error for a process that does not exist")
	}
	// A file of a server in the network that somebody has stopped holds up who asks for it, and a client may have one.
	hosttest.HungFolder(t)
	want()
	if !HasDevice(os.Getpid(), map[uint64]bool{unix.Mkdev(511, 200): true}) || HasDevice(os.Getpid(), map[uint64]bool{unix.Mkdev(511, 201): true}) {
		t.Error("it has the node, and no other")
	}
	// Any number of other files neither hides it nor takes time.
	for range mostFiles {
		another, err := unix.Dup(int(null.Fd()))
		if err != nil {
			t.Skip(err)
		}
		defer func() { _ = unix.Close(another) }()
	}
	want()
	if HasDevice(os.Getpid(), nil) {
		t.Error("it has none of no devices")
	}
}
