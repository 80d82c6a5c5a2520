// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package memorylimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/must"
)

// folder is one whose path is short enough for sockets.
func folder(t *testing.T) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("/tmp", "memory"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "sockets")
}

// runHook runs the hook for a container whose first process has a PID.
func runHook(t *testing.T, folder string, pid int) error {
	t.Helper()
	bundle := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(bundle, "config.json"), []byte(`{"process": {}}`), 0o600))
	return hook.Run(t.Context(), []string{
		hook.MemoryLimitCommand, "--sockets", folder, "--gpu", "0000:1b:00.0", "--uuid", "GPU-a", "--soft", "1048576", "--hard", "2097152",
	}, strings.NewReader(fmt.Sprintf(`{"bundle": %q, "pid": %d}`, bundle, pid)))
}

func TestServer(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var made []string
	s := Server{
		Folder: folder(t),
		Cgroup: func(pid int) (string, error) {
			if pid == 1 {
				return "", errors.New("no cgroup")
			}
			return fmt.Sprintf("/cgroup/%d", pid), nil
		},
		Limit: func(_ context.Context, address, uuid, cgroup string, soft, hard uint64) error {
			made = append(made, fmt.Sprint(address, " ", uuid, " ", cgroup, " ", soft, " ", hard))
			if cgroup == "/cgroup/4" && len(made) < 3 {
				return fmt.Errorf("not yet: %w", gpu.ErrDriverNotLoaded)
			}
			if cgroup == "/cgroup/2" {
				return errors.New("other limits")
			}
			return nil
		},
	}
	must.Do(t, s.Start(ctx))
	for pid, want := range map[int]string{1: "find the container's cgroup: no cgroup", 2: "other limits"} {
		if err := runHook(t, s.Folder, pid); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	made = nil
	if err := runHook(t, s.Folder, 3); err != nil || !slices.Equal(made, []string{"0000:1b:00.0 GPU-a /cgroup/3 1048576 2097152"}) {
		t.Errorf("%v, %q", err, made)
	}
	made = nil
	if err := runHook(t, s.Folder, 4); err != nil || len(made) != 3 {
		t.Errorf("a driver that is loaded later: %v, asked %d times", err, len(made))
	}
	if info, err := os.Stat(s.Folder); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// TestEndWhileAsked: the pod of the driver is replaced while a GPU is slow to limit a container. The next process is asked again.
func TestEndWhileAsked(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	s := Server{
		Cgroup: func(int) (string, error) { return "/cgroup", nil },
		Limit: func(ctx context.Context, _, _, _ string, _, _ uint64) error {
			end()
			<-ctx.Done()
			return ctx.Err()
		},
	}
	asks, answers := net.Pipe()
	go s.serve(ctx, answers)
	var answer hook.MemoryAnswer
	err := errors.Join(json.NewEncoder(asks).Encode(hook.MemoryLimit{PID: 3}), json.NewDecoder(asks).Decode(&answer))
	if err != nil || !answer.Later {
		t.Errorf("answer %+v, %v", answer, err)
	}
}

// What a process that was killed has left goes with the next one, what another instance has stays.
func TestEndedProcesses(t *testing.T) {
	s := Server{Folder: folder(t)}
	must.Do(t, os.Mkdir(s.Folder, 0o700))
	ended := exec.CommandContext(t.Context(), "true")
	must.Do(t, ended.Run())
	left := filepath.Join(s.Folder, fmt.Sprintf("%d.sock", ended.ProcessState.Pid()))
	other := filepath.Join(s.Folder, fmt.Sprintf("%d.sock", os.Getppid()))
	for _, path := range []string{left, other} {
		listener := must.Get(net.Listen("unix", path))(t)
		defer func() { _ = listener.Close() }()
	}
	ctx, cancel := context.WithCancel(t.Context())
	must.Do(t, s.Start(ctx))
	own := filepath.Join(s.Folder, fmt.Sprintf("%d.sock", os.Getpid()))
	if found, _ := filepath.Glob(s.Folder + "/*"); !slices.Contains(found, other) || !slices.Contains(found, own) || len(found) != 2 {
		t.Errorf("found %q", found)
	}
	cancel()
	<-ctx.Done()
}
