// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/edit"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/cuda"
	gpusim "github.com/partage-dev/partage/test/gpusim/mps"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// containerCommand makes the test program the root user of a container.
const containerCommand = "container"

// What a tenant's container has beside the mounts of its share.
const (
	pipeInContainer    = "/tmp/nvidia-mps"
	machineInContainer = "/machine"
)

// container is a process of the root user in a container: with a file system that has
// what the container edits of an MPS share mount, the driver, and nothing else.
type container struct {
	*testing.T

	cmd     *exec.Cmd
	orders  io.Writer
	answers *bufio.Scanner
}

// container starts a container for a session.
func (w *world) container(session mps.Status) *container {
	w.Helper()
	edits, err := edit.MPSClient{
		Session: session.Spec.ID, PipeDir: session.PipeDir, ShmDir: session.ShmDir, Hook: "/hook", Owner: "u1/r0",
	}.Edits()
	must.Do(w, err)
	mounts := append(edits.Mounts, cdi.Mount{HostPath: w.root, ContainerPath: machineInContainer})
	return w.containerWith(mounts)
}

func (w *world) containerWith(mounts []cdi.Mount) *container {
	w.Helper()
	root := must.Get(os.MkdirTemp(filepath.Dir(w.root), "c"))(w)
	self := must.Get(os.Executable())(w)
	text := must.Get(json.Marshal(mounts))(w)
	t := &container{T: w.T, cmd: exec.Command(self, containerCommand, root, string(text))}
	t.cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	t.cmd.Stderr = os.Stderr
	input := must.Get(t.cmd.StdinPipe())(w)
	output := must.Get(t.cmd.StdoutPipe())(w)
	t.orders, t.answers = input, bufio.NewScanner(output)
	must.Do(w, t.cmd.Start())
	w.Cleanup(t.end)
	return t
}

// end ends the container. It is idempotent.
func (t *container) end() {
	_ = t.cmd.Process.Kill()
	_ = t.cmd.Wait()
}

// does has the tenant do something and returns what became of it, by what it tried.
// What succeeded has no text.
func (t *container) does(order string) map[string]string {
	t.Helper()
	must.Get(fmt.Fprintln(t.orders, order))(t)
	if !t.answers.Scan() {
		t.Fatalf("the container has ended: %v", t.answers.Err())
	}
	var results map[string]string
	must.Do(t, json.Unmarshal(t.answers.Bytes(), &results))
	return results
}

// connects checks that a new CUDA program in the container is a client of MPS.
func (t *container) connects() {
	t.Helper()
	expect.Equal(t, t.does("connect")["connect"], "", "a program in the container does not reach MPS")
}

// runContainer is the program of a container. It obeys until its input ends.
func runContainer(root, text string) error {
	var mounts []cdi.Mount
	if err := json.Unmarshal([]byte(text), &mounts); err != nil {
		return err
	}
	if err := enterContainer(root, mounts); err != nil {
		return fmt.Errorf("enter the container: %w", err)
	}
	var clients []*gpusim.Client
	defer func() {
		for _, c := range clients {
			c.Close()
		}
	}()
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		results := map[string]string{}
		switch order := orders.Text(); order {
		case "connect":
			client, err := connectInContainer()
			clients = append(clients, client)
			results[order] = textOf(err)
		case "attack":
			for name, attack := range attacks {
				results[name] = textOf(attack())
			}
		case "list":
			entries, err := os.ReadDir(pipeInContainer)
			results[order] = textOf(err)
			for _, entry := range entries {
				results[entry.Name()] = ""
			}
		default:
			results[order] = "there is no such order"
		}
		if err := json.NewEncoder(os.Stdout).Encode(results); err != nil {
			return err
		}
	}
	return nil
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// enterContainer makes the file system of the container, as a runtime does, and leaves
// nothing else within reach.
func enterContainer(root string, mounts []cdi.Mount) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return err
	}
	if err := unix.Mount("container", root, "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, m := range append(mounts, cdi.Mount{HostPath: "/proc", ContainerPath: "/proc"}) {
		at := filepath.Join(root, m.ContainerPath)
		if err := errors.Join(os.MkdirAll(at, 0o755), unix.Mount(m.HostPath, at, "", unix.MS_BIND|unix.MS_REC, "")); err != nil {
			return err
		}
		if !m.ReadOnly {
			continue
		}
		if err := unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
			return err
		}
	}
	old := filepath.Join(root, "old")
	if err := errors.Join(os.Mkdir(old, 0o700), unix.PivotRoot(root, old), os.Chdir("/")); err != nil {
		return err
	}
	return errors.Join(unix.Unmount("/old", unix.MNT_DETACH), os.Remove("/old"))
}

func connectInContainer() (*gpusim.Client, error) {
	m, err := sysroot.Load(machineInContainer)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return gpusim.Connect(ctx, gpusim.ClientOptions{
		Pipe: pipeInContainer, Shared: "/dev/shm", Here: cuda.Here(m, machineInContainer), Root: machineInContainer,
	})
}

// attacks are what root in a container may try in order to come between the
// supervisor, or another container, and the daemon.
var attacks = map[string]func() error{
	"rename":  func() error { return os.Rename(inPipe("control"), inPipe("c")) },
	"remove":  func() error { return os.Remove(inPipe("control")) },
	"chmod":   func() error { return os.Chmod(inPipe("control"), 0) },
	"chown":   func() error { return os.Chown(inPipe("control"), 1, 1) },
	"link":    func() error { return os.Link(inPipe("control"), inPipe("l")) },
	"symlink": func() error { return os.Symlink("/proc/self/root", inPipe("s")) },
	"file":    func() error { return os.WriteFile(inPipe("f"), nil, 0o600) },
	"folder":  func() error { return os.Mkdir(inPipe("d"), 0o700) },
	"mode of the folder": func() error {
		return os.Chmod(pipeInContainer, 0o777)
	},
	"listen": func() error {
		l, err := net.Listen("unixpacket", inPipe("new"))
		if err != nil {
			return err
		}
		return l.Close()
	},
	// The proxy that answers what the supervisor wants to hear.
	"proxy": func() error {
		if err := os.Rename(inPipe("control"), inPipe("real")); err != nil {
			return err
		}
		_, err := net.Listen("unixpacket", inPipe("control"))
		return err
	},
	"the socket for commands": func() error { return dialInContainer("control_privileged") },
	"another folder's":        func() error { return dialInContainer("../daemon/control_privileged") },
	"its lock":                func() error { return exists(inPipe("control_lock")) },
	"its log":                 func() error { return exists(inPipe("log")) },
	"commands": func() error {
		return gpusim.Control(context.Background(), pipeInContainer, strings.NewReader("quit -t 0\n"), io.Discard)
	},
	"a symlink in shm": func() error {
		// What a root daemon would create, or write, through it.
		if err := os.Symlink("/proc/self/cmdline", "/dev/shm/mps.shm"); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		_, err := os.ReadFile("/dev/shm/mps.shm")
		return err
	},
}

func inPipe(name string) string { return filepath.Join(pipeInContainer, name) }

func exists(path string) error {
	_, err := os.Lstat(path)
	return err
}

func dialInContainer(name string) error {
	c, err := net.Dial("unixpacket", inPipe(name))
	if err != nil {
		return err
	}
	return c.Close()
}
