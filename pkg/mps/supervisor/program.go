// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process"
)

// programName is NVIDIA's control daemon, and the client that sends commands to it.
const programName = "nvidia-cuda-mps-control"

// folderInRoot is where programs that run in a root of their own find the session's
// folder. That root may be read-only and has no folder for it.
const folderInRoot folder = "/tmp"

// controlProgram is NVIDIA's control program, set up for a session.
type controlProgram struct {
	host.Program

	folder folder
	// dev is the folder that a program with a root of its own has as its /dev: that root may have none of the nodes.
	dev string
}

func newControlProgram(roots host.Roots, f folder) (controlProgram, error) {
	program, err := roots.Program(programName)
	if err != nil {
		return controlProgram{}, fmt.Errorf("find MPS of this node's driver: %w", err)
	}
	c := controlProgram{Program: program, folder: f}
	if program.Root != "" {
		c.dev = filepath.Join(roots.DevRoot().Path, "dev")
	}
	return c, nil
}

// checkNodes fails unless there are the device nodes that a server needs, whatever its
// GPU: it would only say that there is no GPU.
func checkNodes(ctx context.Context, roots host.Roots) error {
	for _, path := range host.RequiredNodes() {
		if _, err := roots.Node(path); err != nil {
			return fmt.Errorf("no MPS server can start: %w", err)
		}
	}
	klog.FromContext(ctx).V(4).Info("The MPS server gets its device nodes from here", "folder", roots.DevRoot().Folder())
	return nil
}

func (p controlProgram) env() []string {
	seen := p.folder
	if p.Root != "" {
		seen = folderInRoot
	}
	return append(slices.Clone(p.Env), "CUDA_MPS_PIPE_DIRECTORY="+seen.daemonPipe(), "CUDA_MPS_LOG_DIRECTORY="+string(seen.logs()))
}

// daemon returns the command that runs the keeper of a control daemon.
func (p controlProgram) daemon(spec mps.Spec) *exec.Cmd {
	args := []string{"-f"}
	if spec.MultiUser {
		args = append(args, "-multiuser-server")
	}
	l, _ := json.Marshal(launch{ // strings and a number
		Starter: os.Getpid(), Lock: p.folder.keeper(), Shm: p.folder.memory().shm(), Root: p.Root, Session: string(p.folder), Dev: p.dev,
	})
	// No context ends the daemon: it outlives the call that starts it.
	cmd := exec.Command(self, append([]string{LaunchCommand, string(l), p.Path}, args...)...) //nolint:noctx // as said
	cmd.Dir = "/"
	cmd.Env = append(p.env(), "CUDA_VISIBLE_DEVICES="+strings.Join(spec.Devices, ","))
	return cmd
}

const clientOutputLimit = 5 * time.Second

// client returns the command that reads commands for a daemon from its standard input. It sees the daemon's files: its sockets
// and device nodes, and its /dev/shm, which drivers may need.
func (p controlProgram) client(ctx context.Context, root *os.File) *exec.Cmd {
	seen := host.Program{Root: fmt.Sprintf("/proc/self/fd/%d", root.Fd()), Path: p.Path}
	cmd := seen.Command(ctx)
	cmd.Env = p.env()
	// How long its output may take after its end. On a node that starts many pods at once
	// even that does.
	cmd.WaitDelay = clientOutputLimit
	return cmd
}

// rootOf opens the root of a process's files, and of no other process: what is in the root of one in a container is run as root
// of the node.
func rootOf(id process.ID) (*os.File, error) {
	root, err := os.OpenFile(filepath.Join("/proc", strconv.Itoa(id.PID), "root"), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == nil && !id.Alive() {
		err = errors.Join(fmt.Errorf("%s has ended", id), root.Close())
	}
	if err != nil {
		return nil, fmt.Errorf("open the files of the control daemon: %w", err)
	}
	return root, nil
}
