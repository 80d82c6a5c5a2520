// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestSymlinksInShm: no process that has the shared memory of a session, the daemon
// least of all, is led elsewhere by what a client made there.
func TestSymlinksInShm(t *testing.T) {
	w, s, status := started(t)
	secret := filepath.Join(w.root, "secret")
	must.Do(t, errors.Join(os.WriteFile(secret, nil, 0o600), os.Symlink(secret, filepath.Join(status.ShmDir, "link"))))
	for _, dir := range []string{status.ShmDir, filepath.Join("/proc", strconv.Itoa(daemonOf(t, s, one.ID)), "root/dev/shm")} {
		for _, name := range []string{"link", "link/x"} {
			if _, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE, 0o600); !errors.Is(err, unix.ELOOP) {
				t.Errorf("%s in %s: got %v", name, dir, err)
			}
		}
	}
	c := w.container(status)
	if got := c.does("attack")["a symlink in shm"]; got == "" {
		t.Error("the container follows it")
	}
}

// TestForgedClients: a session whose daemon does not answer is not kept dead by the
// PID of a process that has nothing to do with it.
func TestForgedClients(t *testing.T) {
	t.Parallel()
	for name, forged := range map[string]func(t *testing.T, w *world, s mps.Status) int{
		"the node's init": func(*testing.T, *world, mps.Status) int { return 1 },
		"in another pod": func(_ *testing.T, w *world, _ mps.Status) int {
			id := w.process(nil)
			w.inPod(id.PID)
			return id.PID
		},
		// Such as one that watches GPUs.
		"a process of the host with the GPU": func(_ *testing.T, w *world, s mps.Status) int {
			return w.client(0, s).Process.Pid
		},
		"a process that has ended": func(_ *testing.T, w *world, _ mps.Status) int {
			id := w.process(nil)
			kill(w, id.PID)
			eventually(w, "it to end", func() bool { return !id.Alive() })
			return id.PID
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, s, before := started(t, hasty)
			daemon, pid := daemonOf(t, s, one.ID), forged(t, w, before)
			w.script(script{Clients: []int{pid}})
			eventually(t, "the lie", func() bool { return slices.Contains(statusOf(t, s, one.ID).Clients, pid) })
			must.Do(t, unix.Kill(daemon, unix.SIGSTOP))
			eventually(t, "another daemon", func() bool {
				r, err := s.folder(one.ID).load()
				return err == nil && r.Daemon != nil && r.Daemon.PID != daemon
			})
			w.script(script{})
			reaches(t, s, one.ID, mps.Running, 1)
		})
	}
}

// TestCredible: a CUDA program in a pod, with this session's GPU, is a client.
func TestCredible(t *testing.T) {
	w, s, status := started(t)
	other := must.Get(s.Ensure(t.Context(), mps.Spec{ID: "gpu-1", Devices: []string{gpuB}}))(t)
	client, ofAnother, server := w.client(0, status).Process.Pid, w.client(0, other).Process.Pid, w.process(nil).PID
	for id, pid := range map[string]int{one.ID: client, "gpu-1": ofAnother} {
		eventually(t, "a client", func() bool { return slices.Contains(statusOf(t, s, id).Clients, pid) })
	}
	sess := locked(t, s, one.ID)
	defer sess.lock.Release(1)
	pids := []int{0, 1, client, ofAnother, server}
	expect.Len(t, credible(pids, sess.record.Servers), 0, "none of", pids, "is in a pod")
	for _, pid := range []int{client, ofAnother, server} {
		w.inPod(pid)
	}
	expect.Same(t, credible(pids, sess.record.Servers), []int{client}, "of", pids)
}

func TestDistinctive(t *testing.T) {
	const ctl, uvm, gpu, other, monitor, instance, compute = 1, 2, 3, 4, 5, 6, 7
	nodes := map[uint64]string{
		ctl: "/dev/nvidiactl", uvm: "/dev/nvidia-uvm", gpu: "/run/nvidia/driver/dev/nvidia0", other: "/dev/nvidia12",
		monitor: "/dev/nvidia-caps/nvidia-cap2", instance: "/dev/nvidia-caps/nvidia-cap3", compute: "/dev/nvidia-caps/nvidia-cap138",
	}
	for name, test := range map[string]struct{ opened, want []uint64 }{
		"GPUs":                                  {[]uint64{ctl, uvm, gpu, other}, []uint64{gpu, other}},
		"a GPU of which partitions can be seen": {[]uint64{ctl, gpu, monitor}, []uint64{gpu}},
		"a partition":                           {[]uint64{ctl, gpu, instance, compute}, []uint64{instance, compute}},
		"a partition without its capabilities":  {[]uint64{ctl, gpu}, []uint64{gpu}},
		"nothing yet":                           {[]uint64{ctl, uvm}, nil},
	} {
		opened := map[uint64]string{}
		for _, number := range test.opened {
			opened[number] = nodes[number]
		}
		expect.Same(t, slices.Sorted(maps.Keys(distinctive(opened))), test.want, name)
	}
}

// TestFaultThatDoesNotPass: a client that does not end after a fault keeps others out
// for a limited time.
func TestFaultThatDoesNotPass(t *testing.T) {
	w, s, before := started(t, func(o *Options) { o.FaultLimit = time.Second / 2 })
	client := w.client(0, before)
	eventually(t, "a client", func() bool { return slices.Contains(statusOf(t, s, one.ID).Clients, client.Process.Pid) })
	w.script(script{State: "FAULT"})
	eventually(t, "the server to be replaced", func() bool {
		r, err := s.folder(one.ID).load()
		return err == nil && !slices.Equal(process.PIDs(r.Servers), before.Servers)
	})
	w.script(script{})
	after := reaches(t, s, one.ID, mps.Running, 1)
	if after.Servers[0] == before.Servers[0] || !strings.Contains(after.LastLoss, "fault") {
		t.Errorf("got %v", after)
	}
	w.container(after).connects()
}
