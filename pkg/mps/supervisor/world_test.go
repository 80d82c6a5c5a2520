// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process/keeper"
	"github.com/partage-dev/partage/pkg/util/wait"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// world is a node with a simulated driver.
type world struct {
	*testing.T

	dir, root string
	options   Options
}

const (
	gpuA = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
	gpuB = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
)

// newWorld makes a world. Tests that have one run in parallel: they mostly wait.
func newWorld(t *testing.T, change ...func(*Options)) *world {
	t.Helper()
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	// Not t.TempDir, which makes sockets' paths too long.
	base, err := os.MkdirTemp("/tmp", "mps")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, dir: filepath.Join(base, "d"), root: filepath.Join(base, "r")}
	t.Cleanup(func() {
		w.nothingLeft("")
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(os.Chmod(base, 0o755), os.Mkdir(w.dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	w.install()
	w.script(script{})
	w.options = options(w.dir, w.root)
	for _, do := range change {
		do(&w.options)
	}
	return w
}

// install makes the root of a simulated machine with two GPUs. Its programs are this
// one; there are no libraries.
func (w *world) install() {
	w.Helper()
	m, err := catalog.Machine("h100-80-sxmx2", catalog.Options{})
	if err != nil {
		w.Fatal(err)
	}
	m.GPUs[0].UUID, m.GPUs[1].UUID = gpuA, gpuB
	err = sysroot.Create(w.root, m, sysroot.Assets{NVML: os.DevNull, CUDA: os.DevNull})
	if errors.Is(err, os.ErrPermission) {
		w.Skipf("a simulated machine cannot be made here: %v", err)
	}
	bin := filepath.Join(w.root, "usr/bin")
	if err = errors.Join(err, os.MkdirAll(bin, 0o755)); err != nil {
		w.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		w.Fatal(err)
	}
	for _, name := range []string{programName, serverName, clientName} {
		// A symbolic link would lead out of the root.
		if err := os.Link(self, filepath.Join(bin, name)); err != nil {
			w.Fatal(err)
		}
	}
}

func options(dir, root string) Options {
	return Options{
		Dir: dir, Roots: host.Roots{Driver: root, Dev: host.AutoDev},
		CheckInterval: 50 * time.Millisecond, StartLimit: 2 * time.Minute, CommandLimit: time.Minute, EndLimit: 4 * time.Second,
		FirstPause: 100 * time.Millisecond, LongestPause: 400 * time.Millisecond,
	}
}

// hasty makes a test short in which something does not answer. The others are patient, as the machine may be busy.
func hasty(o *Options) { o.CommandLimit, o.EndLimit = 3*time.Second, 2*time.Second }

func (w *world) supervisor() *Supervisor {
	w.Helper()
	s, err := New(context.Background(), w.options)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		w.script(script{})
		if err := s.Close(context.Background()); err != nil {
			w.Errorf("close: %v", err)
		}
	})
	return s
}

// client starts a CUDA program of a user that connects to a session. It waits for
// nothing.
func (w *world) client(user uint32, session mps.Status) *exec.Cmd {
	w.Helper()
	cmd := exec.Command(filepath.Join(w.root, "usr/bin", clientName), session.PipeDir, session.ShmDir)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	if err := cmd.Start(); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// inPod moves a process into the cgroup of a pod.
func (w *world) inPod(pid int) { w.inCgroup(pid, "kubepods-*") }

// inPodWith moves a process into the cgroup of a pod with this UID.
func (w *world) inPodWith(pid int, uid types.UID) {
	w.inCgroup(pid, "kubepods-*-pod"+strings.ReplaceAll(string(uid), "-", "_")+".slice")
}

// inCgroup moves a process into a cgroup whose name is made as os.MkdirTemp makes it.
func (w *world) inCgroup(pid int, pattern string) {
	w.Helper()
	var errs []error
	// One hierarchy is enough. With version 2 there is only one.
	for _, at := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/freezer"} {
		if _, err := os.Stat(filepath.Join(at, "cgroup.procs")); err != nil {
			continue
		}
		dir, err := os.MkdirTemp(at, pattern)
		if err == nil {
			w.Cleanup(func() {
				// The process may have ended.
				_ = os.WriteFile(filepath.Join(at, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
				eventually(w, "the cgroup to be empty", func() bool { return os.Remove(dir) == nil })
			})
			err = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		}
		if err == nil {
			return
		}
		errs = append(errs, err)
	}
	w.Skipf("no cgroup can be made here: %v", errors.Join(errs...))
}

func (w *world) folder(id string) folder { return folder(filepath.Join(w.dir, id)) }

// logged reports whether the log of a session's daemon contains a text.
func (w *world) logged(id, text string) bool {
	data, err := os.ReadFile(w.folder(id).logs().path("control.log"))
	return err == nil && strings.Contains(string(data), text)
}

// nothingLeft checks that there is no process, mount or folder of a session, or of
// any with "". Folders of sessions that were suspended may stay in that case.
func (w *world) nothingLeft(id string) {
	w.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		w.Fatal(err)
	}
	where := filepath.Join(w.dir, id) + "/"
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, where) {
			w.Errorf("mount left: %s", line)
		}
	}
	entries, err := os.ReadDir(w.dir)
	if err != nil {
		w.Fatal(err)
	}
	for _, entry := range entries {
		if id != "" && entry.Name() != id {
			continue
		}
		if id != "" {
			w.Errorf("left: %s", entry.Name())
		}
		if entry.IsDir() && w.keeps(entry.Name()) {
			w.Errorf("processes left of %s", entry.Name())
		}
	}
	if left := w.driverProcesses(); id == "" && len(left) > 0 {
		w.Errorf("processes left: %v", left)
	}
}

// driverProcesses are the daemons and servers of the simulated driver.
func (w *world) driverProcesses() (found []string) {
	w.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		w.Fatal(err)
	}
	for _, path := range all {
		program, err := os.Readlink(path)
		args, argsErr := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		isClient := strings.Count(string(args), "\x00") == 1 // it is asked something
		if name := filepath.Base(program); err == nil && argsErr == nil && strings.HasPrefix(program, w.root+"/") && (name == serverName || name == programName && !isClient) {
			found = append(found, path+": "+name)
		}
	}
	return found
}

// keeps reports whether a session has a keeper.
func (w *world) keeps(id string) bool {
	w.Helper()
	_, found, err := keeper.Of(w.folder(id).keeper())
	if err != nil {
		w.Error(err)
	}
	return found
}

// eventually waits until a question about the world is answered with yes.
func eventually(t testing.TB, what string, question func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	if wait.Until(ctx, func() (bool, error) { return question(), nil }) != nil {
		t.Fatalf("waited in vain: %s", what)
	}
}

func statusOf(t testing.TB, s *Supervisor, id string) mps.Status {
	t.Helper()
	for _, status := range s.List() {
		if status.Spec.ID == id {
			return status
		}
	}
	t.Fatalf("no session %s", id)
	return mps.Status{}
}

// reaches waits for a session to have a phase and a number of losses.
func reaches(t testing.TB, s *Supervisor, id string, phase mps.Phase, losses int) mps.Status {
	t.Helper()
	var last mps.Status
	eventually(t, fmt.Sprintf("%s to be %s with %d losses", id, phase, losses), func() bool {
		last = statusOf(t, s, id)
		return last.Phase == phase && last.Losses == losses
	})
	return last
}

// clone returns a spec that can be changed.
func clone(s mps.Spec) mps.Spec {
	s.Memory = maps.Clone(s.Memory)
	return s
}

func kill(t testing.TB, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatalf("kill %d: %v", pid, err)
	}
}
