// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/podcgroup"
)

// owners tells to which memory cgroup the content of files is charged.
type owners struct {
	// at is when they were looked up.
	at time.Time
	// live are the inode numbers of the cgroups of all processes, and of all pods: what an
	// ended container of a pod left is that of the pod, which may have no process at times.
	live map[uint64]bool
	// others are those of the host's other cgroups that could be above a pod's. What a pod
	// that has ended left is charged to one of them, but not at once: the kernel passes it
	// on a while after a cgroup's folder has gone.
	others map[uint64]bool
	// pages has the place of this process's pages in memory, cgroups the cgroup that
	// each place is charged to.
	pages, cgroups *os.File
}

// owners returns an error if there is any doubt about who lives.
func (l *leftover) owners() (*owners, error) {
	o := &owners{at: l.now(), live: map[uint64]bool{}, others: map[uint64]bool{}}
	processes, err := l.processes()
	if err != nil {
		return nil, err
	}
	if o.cgroups, err = os.Open(filepath.Join(l.proc, "kpagecgroup")); err != nil {
		return nil, fmt.Errorf("this kernel does not tell: %w", err)
	}
	if o.pages, err = os.Open("/proc/self/pagemap"); err == nil {
		err = o.find(l.proc, processes)
	}
	if err != nil {
		o.close()
		return nil, err
	}
	return o, nil
}

func (o *owners) close() { _, _ = o.pages.Close(), o.cgroups.Close() }

// goneCgroup ends the path of a cgroup that is gone. Only a process that has ended can be
// in one, and is for as long as nobody waits for it.
const goneCgroup = " (deleted)\n"

// find finds the cgroups of processes and pods.
func (o *owners) find(proc string, processes []string) error {
	roots := cgroupRoots(proc)
	if err := o.check(roots, proc); err != nil {
		return err
	}
	o.addExisting(roots)
	known := map[string]bool{}
	for _, process := range processes {
		data, err := os.ReadFile(filepath.Join(process, "cgroup"))
		if err != nil || known[string(data)] {
			continue // it has ended
		}
		if err := o.add(roots, string(data)); err != nil {
			now, gone := os.ReadFile(filepath.Join(process, "cgroup"))
			if gone != nil || bytes.Contains(now, []byte(goneCgroup)) {
				continue
			}
			return fmt.Errorf("find the memory cgroup of %s: %w", process, err)
		}
		known[string(data)] = true
	}
	return nil
}

// check makes sure that what is found for this process is what its memory is charged to.
func (o *owners) check(roots map[string]string, proc string) error {
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("get a page of memory: %w", err)
	}
	defer func() { _ = unix.Munmap(page) }()
	page[0] = 1
	charged, err := o.charged(page)
	if err != nil {
		return err
	}
	description, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(os.Getpid()), "cgroup"))
	if err != nil {
		return fmt.Errorf("find this process's memory cgroup: %w", err)
	}
	alone := owners{live: map[uint64]bool{}}
	if err := alone.add(roots, string(description)); err != nil {
		return fmt.Errorf("find this process's memory cgroup: %w", err)
	}
	if !alone.live[charged] {
		return fmt.Errorf("this process's memory is charged to cgroup %d, which is none of those in %q", charged, description)
	}
	return nil
}

// processes returns the folders of all processes. A procfs that does not have this one is
// not that of the processes that may have files open.
func (l *leftover) processes() ([]string, error) {
	if _, err := os.Stat(filepath.Join(l.proc, strconv.Itoa(os.Getpid()))); err != nil {
		return nil, fmt.Errorf("this process is not in the host's procfs: %w", err)
	}
	return filepath.Glob(filepath.Join(l.proc, "[0-9]*"))
}

// cgroupRoots returns where the host has the hierarchy of memory cgroups: by the name of
// the controller, which is empty for the second version. A container may have a part of
// it only.
func cgroupRoots(proc string) map[string]string {
	base := filepath.Join(proc, "1/root/sys/fs/cgroup")
	if _, err := os.Stat(base); err != nil {
		base = "/sys/fs/cgroup"
	}
	return map[string]string{"memory": filepath.Join(base, "memory"), "": base}
}

// add adds the memory cgroup that a process's file describes, and that of its pod.
func (o *owners) add(roots map[string]string, description string) error {
	path, root := "", ""
	for controllers, at := range podcgroup.Lines(description) {
		switch {
		case slices.Contains(strings.Split(controllers, ","), "memory"):
			root, path = roots["memory"], at
		case controllers == "" && root == "":
			root, path = roots[""], at
		}
	}
	if root == "" || !podcgroup.FromRoot(path) {
		return fmt.Errorf("%q has no path from the root", description)
	}
	for _, path := range podcgroup.UpToPod(path) {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(root, path), &st); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(root, path), err)
		}
		o.live[st.Ino] = true
	}
	return nil
}

// podDepth is how many folders above its own the cgroup of a pod has, at most.
const podDepth = 6

// addExisting adds the cgroups of all pods, and those above them. The kubelet removes that of
// a pod that has ended.
func (o *owners) addExisting(roots map[string]string) {
	root := roots["memory"]
	if _, err := os.Stat(root); err != nil {
		root = roots[""]
	}
	// Cgroups come and go.
	_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil //nolint:nilerr // it is as if it was not there
		}
		known, isPod := o.others, podcgroup.Is(entry.Name())
		if isPod {
			known = o.live
		}
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil {
			known[st.Ino] = true
		}
		switch {
		case isPod:
			return fs.SkipDir
		case strings.Count(strings.TrimPrefix(path, root), "/") >= podDepth:
			return fs.SkipDir
		}
		return nil
	})
}

// hasEnded reports whether what is charged to a cgroup was that of a pod that has ended.
func (o *owners) hasEnded(cgroup uint64) bool { return o.others[cgroup] && !o.live[cgroup] }

// errNoContent: a file has nothing but holes and room that was set aside.
var errNoContent = errors.New("no content")

// of returns the inode number of the cgroup that the start of a file's content is charged
// to, 0 if that is not known. The file may be cut at any time, so its content is touched
// by system calls only.
func (o *owners) of(file *os.File) (uint64, error) {
	at, err := unix.Seek(int(file.Fd()), 0, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return 0, errNoContent
	}
	if err != nil {
		return 0, fmt.Errorf("look for the content of a file: %w", err)
	}
	size := os.Getpagesize()
	page, err := unix.Mmap(int(file.Fd()), at/int64(size)*int64(size), size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, nil // it is being changed
	}
	defer func() { _ = unix.Munmap(page) }()
	if unix.Madvise(page, unix.MADV_POPULATE_READ) != nil {
		return 0, nil // cut meanwhile, or Linux before 5.14
	}
	return o.charged(page)
}

// charged returns the inode number of the cgroup that a page of this process is charged
// to, 0 if that is not known.
func (o *owners) charged(page []byte) (uint64, error) {
	//nolint:gosec // the address is only looked up
	index := uintptr(unsafe.Pointer(unsafe.SliceData(page))) / uintptr(os.Getpagesize())
	before, err := readUint64(o.pages, index)
	if err != nil {
		return 0, fmt.Errorf("find a page in memory: %w", err)
	}
	const present, frame = 1 << 63, 1<<55 - 1
	if before&present == 0 || before&frame == 0 {
		return 0, nil
	}
	cgroup, err := readUint64(o.cgroups, uintptr(before&frame))
	if err != nil {
		return 0, fmt.Errorf("find what a page is charged to: %w", err)
	}
	// It may have been moved, and its place be that of another.
	if after, err := readUint64(o.pages, index); err != nil || after != before {
		return 0, err
	}
	return cgroup, nil
}

// readUint64 reads a number from a table of them.
func readUint64(table *os.File, index uintptr) (uint64, error) {
	var data [8]byte
	if _, err := table.ReadAt(data[:], int64(index)*8); err != nil {
		return 0, err
	}
	return binary.NativeEndian.Uint64(data[:]), nil
}
