// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/host/hosttest"
	"github.com/partage-dev/partage/test/must"
)

const (
	pci       = "0000:1b:00.0"
	podUID    = "3f2a1b4c-0000-4000-8000-0123456789ab"
	container = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
)

// finder returns one for a GPU with minor 2, on which GPU instance 7 has the capability
// 336, on a node without processes.
func finder(t *testing.T) *Finder {
	t.Helper()
	roots, proc := t.TempDir(), t.TempDir()
	write(t, roots, "driver/nvidia/gpus/"+pci+"/information", "Device Minor: \t 2\n")
	write(t, roots, "driver/nvidia/capabilities/gpu2/mig/gi7/access", "DeviceFileMinor: 336\n")
	return &Finder{Roots: host.Roots{Proc: roots, Dev: "/run/nvidia/driver"}, Proc: proc}
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	path := filepath.Join(dir, name)
	must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)))
}

// run adds a process that has these files open. Its ID is one that the kernel gives to no
// process (they are below 4194304): the process with the ID of the test itself is left out.
func (f *Finder) run(t *testing.T, pid int, name, cgroup string, open ...string) {
	t.Helper()
	dir := filepath.Join(f.Proc, strconv.Itoa(pid))
	write(t, dir, "comm", name+"\n")
	write(t, dir, "cgroup", cgroup+"\n")
	must.Do(t, os.Mkdir(filepath.Join(dir, "fd"), 0o755))
	for i, path := range open {
		must.Do(t, os.Symlink(path, filepath.Join(dir, "fd", strconv.Itoa(i))))
	}
}

const inPodCgroup = "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod3f2a1b4c_0000_4000_8000_0123456789ab.slice/cri-containerd-" + container + ".scope"

// TestFileCalledLikeNode: anybody can make a file that is called like the node of a GPU, and keep it open.
func TestFileCalledLikeNode(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	write(t, root, "dev/nvidia2", "")
	write(t, root, "dev/nvidia-caps/nvidia-cap336", "")
	must.Do(t, os.Symlink("/dev/null", filepath.Join(root, "dev/nvidia3")))
	f := finder(t)
	f.run(t, 5000009, "a", inPodCgroup, filepath.Join(root, "dev/nvidia2"), filepath.Join(root, "dev/nvidia-caps/nvidia-cap336"), filepath.Join(root, "dev/nvidia3"))
	f.run(t, 5000010, "b", inPodCgroup, "/dev/nvidia2")
	must.Do(t, os.Symlink(root, filepath.Join(f.Proc, "5000009/root")))
	open, err := f.Openers(t.Context(), pci, time.Minute, true)
	if err != nil || len(open) != 1 || open[0].PID != 5000010 {
		t.Errorf("openers: %+v, %v", open, err)
	}
	if got := f.proc().nodes(5000009); len(got) > 0 {
		t.Errorf("nodes: %q", got)
	}
}

func TestDescribe(t *testing.T) {
	t.Parallel()
	train := func(t *testing.T, f *Finder) { f.run(t, 5004711, "train", "0::/user.slice") }
	tests := map[string]struct {
		processes func(t *testing.T, f *Finder)
		instance  int
		listed    []gpu.Process
		want      string
	}{
		"listed by the driver": {
			processes: train, instance: 7, listed: []gpu.Process{{PID: 5004711, InstanceID: 7}, {PID: 5000005, InstanceID: 8}}, want: "process 5004711 (train)",
		},
		"listed and gone": {instance: 7, listed: []gpu.Process{{PID: 5004711, InstanceID: 7}}, want: "process 5004711 (has ended, its memory is still held)"},
		"in a pod, with nodes": {
			processes: func(t *testing.T, f *Finder) {
				f.run(t, 5004711, "train", inPodCgroup, "/dev/null", "/dev/nvidiactl", "/dev/nvidia2", "/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap337")
			},
			instance: 7, listed: []gpu.Process{{PID: 5004711, InstanceID: 7}},
			want: "process 5004711 (train, pod with UID " + podUID + ", container 0123456789abc, has /dev/nvidia-caps/nvidia-cap337 and /dev/nvidia2 open)",
		},
		"not listed, with the capability": {
			processes: func(t *testing.T, f *Finder) {
				f.run(t, 5000009, "dcgm", "0::/system.slice", "/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap336")
				f.run(t, 5000010, "neighbour", "0::/system.slice", "/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap345")
			},
			instance: 7, want: "process 5000009 (dcgm, has /dev/nvidia-caps/nvidia-cap336 and /dev/nvidia2 open)",
		},
		"not listed, below another root": {
			processes: func(t *testing.T, f *Finder) {
				f.run(t, 5000008, "dcgm", "0::/", "/run/nvidia/driver/dev/nvidia2")
				f.run(t, 5000009, "neighbour", "0::/", "/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap345")
				f.run(t, 5000010, "other", "0::/", "/dev/nvidia20", "/data/nvidia2", "/dev/nvidia-caps/nvidia-cap3", "/data/dev/nvidia2")
				f.run(t, 5000011, "chroot", "0::/", "/srv/dev/nvidia2")
				must.Do(t, os.Symlink("/srv", filepath.Join(f.Proc, "5000011/root")))
			},
			instance: 7, want: "process 5000008 (dcgm, has /dev/nvidia2 open), process 5000011 (chroot, has /dev/nvidia2 open)",
		},
		"the whole GPU": {
			processes: func(t *testing.T, f *Finder) {
				f.run(t, 5000030, "b", "0::/", "/dev/nvidia-caps/nvidia-cap345")
				f.run(t, 5000020, "a", "0::/", "/dev/nvidia2")
				f.run(t, 5000040, "c", "0::/", "/dev/nvidia3")
			},
			instance: -1, listed: []gpu.Process{{PID: 5000030, InstanceID: 8}, {PID: 5000050, InstanceID: -1}},
			want: "process 5000020 (a, has /dev/nvidia2 open), process 5000030 (b, has /dev/nvidia-caps/nvidia-cap345 open), process 5000050 (has ended, its memory is still held)",
		},
		"a name that lies": {
			processes: func(t *testing.T, f *Finder) { f.run(t, 5004711, "x), all is well\x1b[2J", "") },
			instance:  7, listed: []gpu.Process{{PID: 5004711, InstanceID: 7}},
			want: `process 5004711 ("x), all is well\x1b[2J")`,
		},
		"a path that lies": {
			processes: func(t *testing.T, f *Finder) { f.run(t, 5000009, "a", "0::/", "/tmp/\nheld by nobody/dev/nvidia2") },
			instance:  -1, want: nobody,
		},
		"many nodes": {
			processes: func(t *testing.T, f *Finder) {
				f.run(t, 5000009, "a", "0::/", "/dev/nvidia2", "/dev/nvidia-caps/nvidia-cap336", "/dev/nvidia-caps/nvidia-cap337",
					"/dev/nvidia-caps/nvidia-cap338", "/dev/nvidia-caps/nvidia-cap339")
			},
			instance: -1,
			want: "process 5000009 (a, has /dev/nvidia-caps/nvidia-cap336 and /dev/nvidia-caps/nvidia-cap337 and " +
				"/dev/nvidia-caps/nvidia-cap338 and 2 more open)",
		},
		"nobody": {instance: 7, want: nobody},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := finder(t)
			if test.processes != nil {
				test.processes(t, f)
			}
			if got := f.Describe(t.Context(), pci, test.instance, test.listed); got != test.want {
				t.Errorf("got  %s\nwant %s", got, test.want)
			}
		})
	}
}

// The pod's name is said where it is known, and no message gets long.
func TestPodNameAndMany(t *testing.T) {
	t.Parallel()
	f := finder(t)
	f.PodName = func(uid string) string { return map[string]string{podUID: "team-a/train-0"}[uid] }
	for pid := 5000100; pid < 5000200; pid++ {
		f.run(t, pid, "worker", inPodCgroup, "/dev/nvidia2")
	}
	got := f.Describe(t.Context(), pci, -1, nil)
	if !strings.HasPrefix(got, "process 5000100 (worker, pod team-a/train-0, container 0123456789abc, has /dev/nvidia2 open), process 5000101 ") ||
		!strings.HasSuffix(got, ", and 95 more") || len(got) > 700 {
		t.Errorf("got %s", got)
	}
}

// What cannot be read is said; what is known stays.
func TestMinorUnknown(t *testing.T) {
	t.Parallel()
	f := finder(t)
	f.run(t, 5004711, "train", "")
	for listed, want := range map[int]string{5004711: "process 5004711 (train), (who has its device node open is not known", 0: nobody + ", (who has"} {
		var processes []gpu.Process
		if listed > 0 {
			processes = []gpu.Process{{PID: listed, InstanceID: -1}}
		}
		if got := f.Describe(t.Context(), "0000:ff:00.0", -1, processes); !strings.HasPrefix(got, want) {
			t.Errorf("got %s, want %s…", got, want)
		}
	}
}

// Files of a server that does not answer hold up nobody: they are not looked at.
func TestBesideHungFileSystem(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	f := finder(t)
	f.run(t, 5000009, "a", "", hosttest.HungFolder(t), "/dev/nvidia2")
	described := make(chan string, 1)
	go func() { described <- f.Describe(t.Context(), pci, -1, nil) }()
	select {
	case got := <-described:
		if !strings.HasPrefix(got, "process 5000009 (a, has /dev/nvidia2 open") {
			t.Errorf("got %s", got)
		}
	case <-time.After(time.Minute):
		t.Error("it hangs")
	}
}

// A tenant may have so many descriptors open that they cannot be read in time: then it is not known who has the node open.
func TestOpenersInTime(t *testing.T) {
	t.Parallel()
	f := finder(t)
	f.run(t, 5004711, "train", inPodCgroup, "/dev/nvidia2")
	f.run(t, 5004712, "other", inPodCgroup, "/dev/nvidia-caps/nvidia-cap336")
	f.run(t, 5004713, "nvidia-persistenced", "0::/system.slice/nvidia-persistenced.service", "/dev/nvidia2")
	if open, err := f.Openers(t.Context(), pci, time.Minute, true); err != nil || len(open) != 1 || open[0].PID != 5004711 {
		t.Errorf("in pods: got %+v, %v", open, err)
	}
	if open, err := f.Openers(t.Context(), pci, time.Minute, false); err != nil || len(open) != 2 {
		t.Errorf("got %+v, %v", open, err)
	}
	started, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	go func() {
		_, _ = f.all.do(time.Hour, func() ([]Process, error) {
			close(started)
			<-release
			return nil, nil
		})
	}()
	<-started
	if open, err := f.Openers(t.Context(), pci, time.Second, false); err == nil || !strings.Contains(err.Error(), "could not be read in time") {
		t.Errorf("got %+v, %v", open, err)
	}
}

// TestReads: a read that does not end holds up the first who asks for the limit, and others no longer.
func TestReads(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r reads[int]
		stuck := make(chan struct{})
		calls := 0
		hang := func() (int, error) {
			calls++
			<-stuck
			return 1, nil
		}
		for _, want := range []time.Duration{time.Second, 0, 0} {
			began := time.Now()
			if _, err := r.do(time.Second, hang); !errors.Is(err, errNoAnswer) || time.Since(began) != want {
				t.Errorf("%v after %s, want that after %s", err, time.Since(began), want)
			}
		}
		time.AfterFunc(time.Second, func() { close(stuck) })
		if got, err := r.do(time.Hour, hang); got != 1 || err != nil || calls != 1 {
			t.Errorf("it answers at last: %d, %v, %d reads", got, err, calls)
		}
		failed := errors.New("gone")
		if _, err := r.do(time.Second, func() (int, error) { return 0, failed }); !errors.Is(err, failed) {
			t.Errorf("afterwards: %v", err)
		}
	})
}

func TestPodNames(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	add := func(name string) {
		t.Helper()
		must.Do(t, os.Mkdir(filepath.Join(folder, name), 0o755))
	}
	n := &PodNames{Roots: host.Roots{PodLogs: folder}}
	check := func(uid, want string) {
		t.Helper()
		if got := n.Name(uid); got != want {
			t.Errorf("%s: got %q, want %q", uid, got, want)
		}
	}
	add("team_train_u1")
	check("u1", "team/train")
	check("u2", "")
	add("team_other_u2")
	check("u2", "team/other")
	must.Do(t, os.RemoveAll(folder))
	check("u1", "team/train")
	check("u4", "")
	check("u2", "team/other")
}
