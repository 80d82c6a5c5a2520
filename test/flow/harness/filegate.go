// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// FileGate holds those who open files until the test lets them go, as a kernel module or a file server does that does not
// answer. The kernel asks the gate about every open. This process is not held, nor are stat and readlink, nor is the
// simulator, whose state is beside the libraries and, as the same file, in a folder of its own: NVML would hang.
type FileGate struct {
	events *os.File

	mu   sync.Mutex
	held []heldOpen
}

// heldOpen is an open that waits. file is what was opened, in this process.
type heldOpen struct {
	path string
	file int32
}

// HoldFiles holds whoever opens one of these files, or of these folders and all that is in them, until the test ends. What
// takes a file's place later is not held.
func HoldFiles(t testing.TB, paths ...string) *FileGate {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	must.Do(t, err, "hold opened files, which needs root and a kernel with CONFIG_FANOTIFY_ACCESS_PERMISSIONS")
	g := &FileGate{events: os.NewFile(uintptr(fd), "fanotify")}
	t.Cleanup(g.Open)
	go g.listen()
	for _, path := range paths {
		must.Do(t, mark(fd, path), "hold", path)
	}
	return g
}

// mark asks for the events of a file, or of a folder and all that is in it.
func mark(fd int, path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	masks := map[string]uint64{}
	err = filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir():
			masks[path] = unix.FAN_OPEN_PERM | unix.FAN_ONDIR | unix.FAN_EVENT_ON_CHILD
		case entry.Type().IsRegular():
			masks[path] = unix.FAN_OPEN_PERM
		}
		return nil
	})
	for path, mask := range masks {
		err = errors.Join(err, unix.FanotifyMark(fd, unix.FAN_MARK_ADD, mask, unix.AT_FDCWD, path))
	}
	return err
}

// HoldProc holds whoever opens what /proc has of a GPU.
func (n *GPUs) HoldProc(t testing.TB, gpu int) *FileGate {
	t.Helper()
	return HoldFiles(t, filepath.Join(n.Root, "proc/driver/nvidia/gpus", n.Address(t, gpu)))
}

// HoldLibraries holds whoever opens the folder of the NVIDIA driver's libraries, or one of them.
func (n *GPUs) HoldLibraries(t testing.TB) *FileGate {
	t.Helper()
	return HoldFiles(t, sysroot.LibraryDir(n.Root))
}

// listen keeps the opens that the kernel asks about, until the gate is open.
func (g *FileGate) listen() {
	const size = int(unsafe.Sizeof(unix.FanotifyEventMetadata{}))
	buffer := make([]byte, 64*size)
	for {
		n, err := g.events.Read(buffer)
		if err != nil {
			return // it was closed
		}
		for events := buffer[:n]; len(events) >= size; {
			length := binary.NativeEndian.Uint32(events)
			var e unix.FanotifyEventMetadata
			if _, err := binary.Decode(events[:size], binary.NativeEndian, &e); err != nil || length < uint32(size) {
				return
			}
			events = events[length:]
			g.take(e)
		}
	}
}

func (g *FileGate) take(e unix.FanotifyEventMetadata) {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", e.Fd))
	if err != nil {
		path = err.Error()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = append(g.held, heldOpen{path, e.Fd})
	if int(e.Pid) == os.Getpid() || strings.Contains(filepath.Base(path), "gpusim") || strings.HasSuffix(path, "/gpusim/state") {
		g.letGo(len(g.held) - 1)
	}
}

// letGo lets one go on, by its place in the list.
func (g *FileGate) letGo(i int) {
	answer := binary.NativeEndian.AppendUint32(nil, uint32(g.held[i].file))
	answer = binary.NativeEndian.AppendUint32(answer, unix.FAN_ALLOW)
	_, _ = g.events.Write(answer) // fails for a process that was killed
	_ = unix.Close(int(g.held[i].file))
	g.held = append(g.held[:i], g.held[i+1:]...)
}

// Held are the files that somebody waits to open, in the order in which they came.
func (g *FileGate) Held() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var paths []string
	for _, h := range g.held {
		paths = append(paths, h.path)
	}
	return paths
}

// CheckHeld fails unless a number of opens, or more, are held.
func (g *FileGate) CheckHeld(count int) error {
	if held := g.Held(); len(held) < count {
		return fmt.Errorf("%d opens are held, want %d: %v", len(held), count, held)
	}
	return nil
}

// UntilHeld waits until a number of opens, or more, are held.
func (g *FileGate) UntilHeld(t testing.TB, count int) {
	t.Helper()
	must.Do(t, Eventually(t.Context(), func() error { return g.CheckHeld(count) }))
}

// LetGo lets those go on that came first, which are held. Those that come later are held.
func (g *FileGate) LetGo(t testing.TB, count int) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.held) < count {
		t.Fatalf("%d opens are held, not %d", len(g.held), count)
	}
	for range count {
		g.letGo(0)
	}
}

// Open lets all go on, and holds nobody any more. It may be called again.
func (g *FileGate) Open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for len(g.held) > 0 {
		g.letGo(0)
	}
	_ = g.events.Close() // the kernel lets those go that were not read yet
}
