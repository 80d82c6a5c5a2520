// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// socketFolder has a listener at real/control.
func socketFolder(t *testing.T, network string) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "socket") // t.TempDir's may be too long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Mkdir(filepath.Join(dir, "real"), 0o700))
	listener, err := net.Listen(network, filepath.Join(dir, "real/control"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return dir
}

func TestListener(t *testing.T) {
	self, err := Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for _, network := range []string{"unixpacket", "unix"} {
		dir := socketFolder(t, network)
		socket, id, err := Listener(t.Context(), dir, "real/control")
		if err != nil || id != self {
			t.Errorf("%s: got %v, %v, want %v", network, id, err, self)
		}
		if alone, err := IdentifySocket(dir, "real/control"); err != nil || alone != socket || socket == (Socket{}) {
			t.Errorf("%s: got %v, %v, want %v", network, alone, err, socket)
		}
		// A link of it is the same, one that is made in its place is not.
		must(t, errors.Join(os.Link(dir+"/real/control", dir+"/link"), os.Remove(dir+"/real/control")))
		if again, err := net.Listen(network, dir+"/real/control"); err != nil {
			t.Fatal(err)
		} else {
			defer func() { _ = again.Close() }()
		}
		if link, id, err := Listener(t.Context(), dir, "link"); err != nil || link != socket || id != self {
			t.Errorf("%s: the link is %v of %v, %v", network, link, id, err)
		}
		if another, err := IdentifySocket(dir, "real/control"); err != nil || another == socket {
			t.Errorf("%s: the one in its place is %v, %v", network, another, err)
		}
	}
}

func TestListenerRefusals(t *testing.T) {
	dir := socketFolder(t, "unixpacket")
	dead, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: dir + "/dead", Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := errors.Join(dead.Close(), os.WriteFile(dir+"/file", nil, 0o600), os.Symlink("real/control", dir+"/symlink"),
		os.Symlink("real", dir+"/folder"), unix.Mkfifo(dir+"/fifo", 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]error{
		"symlink": unix.ELOOP, "folder/control": unix.ELOOP, "nothing": os.ErrNotExist, "dead": unix.ECONNREFUSED,
		"file": nil, "fifo": nil, "real": nil, "../" + filepath.Base(dir) + "/real/control": unix.EXDEV,
	} {
		_, _, err := Listener(t.Context(), dir, name)
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", name, err, want)
		}
		if _, err := IdentifySocket(dir, name); (err == nil) != (name == "dead") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
