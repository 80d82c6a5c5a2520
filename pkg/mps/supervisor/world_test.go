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
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/cgroup"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
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
	base := must.Get(os.MkdirTemp("/tmp", "mps"))(t)
	w := &world{T: t, dir: filepath.Join(base, "d"), root: filepath.Join(base, "r")}
	t.Cleanup(func() {
		w.nothingLeft("")
		expect.Do(t, os.RemoveAll(base))
	})
	must.Do(t, errors.Join(os.Chmod(base, 0o755), os.Mkdir(w.dir, 0o755)))
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
	must.Do(w, err)
	m.GPUs[0].UUID, m.GPUs[1].UUID = gpuA, gpuB
	err = sysroot.Create(w.root, m, sysroot.Assets{NVML: os.DevNull, CUDA: os.DevNull})
	if errors.Is(err, os.ErrPermission) {
		w.Skipf("a simulated machine cannot be made here: %v", err)
	}
	bin := filepath.Join(w.root, "usr/bin")
	must.Do(w, errors.Join(err, os.MkdirAll(bin, 0o755)))
	self := must.Get(os.Executable())(w)
	for _, name := range []string{programName, serverName, clientName} {
		// A symbolic link would lead out of the root.
		must.Do(w, os.Link(self, filepath.Join(bin, name)))
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
	s := must.Get(New(context.Background(), w.options))(w)
	w.Cleanup(func() {
		w.script(script{})
		expect.Do(w, s.Close(context.Background()), "close")
	})
	return s
}

// supervised is a world with a supervisor.
func supervised(t *testing.T, change ...func(*Options)) (*world, *Supervisor) {
	t.Helper()
	w := newWorld(t, change...)
	return w, w.supervisor()
}

// client starts a CUDA program of a user that connects to a session. It waits for
// nothing.
func (w *world) client(user uint32, session mps.Status) *exec.Cmd {
	w.Helper()
	cmd := exec.Command(filepath.Join(w.root, "usr/bin", clientName), session.PipeDir, session.ShmDir)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	w.runs(cmd)
	return cmd
}

// runs starts a program that ends with the test.
func (w *world) runs(cmd *exec.Cmd) {
	w.Helper()
	must.Do(w, cmd.Start())
	w.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
}

// inPod moves a process into the cgroup of a pod.
func (w *world) inPod(pid int) { cgroup.InPod(w, pid, "") }

// inPodWith moves a process into the cgroup of a pod with this UID.
func (w *world) inPodWith(pid int, uid types.UID) { cgroup.InPod(w, pid, string(uid)) }

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
	mounts := must.Get(os.ReadFile("/proc/self/mountinfo"))(w)
	where := filepath.Join(w.dir, id) + "/"
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, where) {
			w.Errorf("mount left: %s", line)
		}
	}
	for _, entry := range must.Get(os.ReadDir(w.dir))(w) {
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
	for _, path := range must.Get(filepath.Glob("/proc/[0-9]*/exe"))(w) {
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
	expect.Do(w, err)
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

// locked returns a session that nothing is done with until its lock is released.
func locked(t testing.TB, s *Supervisor, id string) *session {
	t.Helper()
	sess := s.sessions[id]
	must.Do(t, sess.lock.Acquire(t.Context(), 1))
	return sess
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
	must.Do(t, unix.Kill(pid, unix.SIGKILL), "kill", pid)
}
