// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package memorylimit limits the memory of containers when partage-hook asks for it, before they start. Nothing is remembered: the
// driver holds a limit for a cgroup, and drops it with the cgroup.
package memorylimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// Server serves the hook. All fields are mandatory.
type Server struct {
	// Folder is the same path on the host. The old and the new process of an upgrade have sockets of their own in it.
	Folder string
	// Cgroup finds the cgroup of a process.
	Cgroup func(pid int) (string, error)
	// Limit has the driver limit the memory of a cgroup.
	Limit func(ctx context.Context, pciAddress, uuid, cgroup string, soft, hard uint64) error
}

// Start serves until ctx ends.
func (s *Server) Start(ctx context.Context) error {
	if err := os.MkdirAll(s.Folder, 0o700); err != nil {
		return fmt.Errorf("folder for memory limits: %w", err)
	}
	if err := s.removeEnded(); err != nil {
		return err
	}
	listener, err := host.ListenUnix(ctx, filepath.Join(s.Folder, strconv.Itoa(os.Getpid())+hook.MemorySocketSuffix))
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = listener.Close() }) // which removes the socket
	go func() {
		for {
			conn, err := listener.Accept()
			switch {
			case err == nil:
				go s.serve(ctx, conn)
			case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
				return
			default:
				klog.FromContext(ctx).Error(err, "Could not take a request to limit memory")
				_ = wait.For(ctx, acceptPause) // where ctx ends, the listener is closed
			}
		}
	}()
	return nil
}

// acceptPause is for a process that has no descriptors left.
const acceptPause = 100 * time.Millisecond

// removeEnded removes the sockets of processes that were killed.
func (s *Server) removeEnded() error {
	paths, err := filepath.Glob(filepath.Join(s.Folder, "*"+hook.MemorySocketSuffix))
	if err != nil {
		return err
	}
	for _, path := range paths {
		pid, err := strconv.Atoi(strings.TrimSuffix(filepath.Base(path), hook.MemorySocketSuffix))
		if err != nil || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the socket of an ended process: %w", err)
		}
	}
	return nil
}

func (s *Server) serve(ctx context.Context, conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(hook.MemoryTime))
	// The hook waits a little longer.
	limited, cancel := context.WithTimeout(ctx, hook.MemoryTime*9/10)
	defer cancel()
	var limit hook.MemoryLimit
	var answer hook.MemoryAnswer
	if err := json.NewDecoder(conn).Decode(&limit); err != nil {
		answer.Error = fmt.Sprintf("read the request: %v", err)
	} else if err := s.limit(limited, limit); err != nil {
		// The driver's library is opened after the socket, and again if it cannot be yet. Where this process ends there is another one.
		answer = hook.MemoryAnswer{Error: err.Error(), Later: errors.Is(err, gpu.ErrDriverNotLoaded) || ctx.Err() != nil}
		klog.FromContext(ctx).Error(err, "A container's memory is not limited", "limit", limit, "askAgain", answer.Later)
	}
	_ = json.NewEncoder(conn).Encode(answer) // who does not get it refuses the container
}

func (s *Server) limit(ctx context.Context, limit hook.MemoryLimit) error {
	cgroup, err := s.Cgroup(limit.PID)
	if err != nil {
		return fmt.Errorf("find the container's cgroup: %w", err)
	}
	if err := s.Limit(ctx, limit.PCIAddress, limit.UUID, cgroup, limit.Soft, limit.Hard); err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Limited the memory of a container", "limit", limit, "cgroup", cgroup)
	return nil
}
