// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Kinds of the questions of part B.
const (
	// Daemon is for MPS: its control daemon, its server, their files.
	Daemon Kind = "mps"
	// Client is for a CUDA program that is a client of MPS.
	Client Kind = "mps client"
)

// mpsChecks start MPS on one GPU that nobody uses, in compute mode DEFAULT and in a
// folder of their own. They run in this order, in one session.
var mpsChecks = []Check{
	{
		ID:         "mps.start",
		Assumption: "nvidia-cuda-mps-control -f serves in the foreground, and start_server -uid 0 makes its server ACTIVE before the first client",
		Code:       "pkg/mps/supervisor/act.go",
		Needed:     true,
		Run:        checkMPSStart,
	},
	{
		ID:         "mps.files",
		Assumption: "a pipe directory has these files: clients reach control only, and nobody but root control_privileged",
		Code:       "pkg/mps/supervisor/sockets.go",
		Run:        checkMPSFiles,
	},
	{
		ID:         "mps.nofile",
		Assumption: "daemon and server may open the 16384 files that NVIDIA asks for",
		Code:       "pkg/mps/supervisor/openfiles.go",
		Run:        checkMPSOpenFiles,
	},
	{ID: "mps.answers", Assumption: "the daemon's answers have the form that the driver reads", Code: "pkg/mps/control", Run: checkMPSAnswers},
	{
		ID:         "mps.limits-read-back",
		Assumption: "a limit is read back as it was set, or rounded to the unit in which it is printed",
		Code:       "pkg/mps/control/limits.go",
		Run:        checkMPSReadBack,
	},
	{
		ID:         "mps.client-priority",
		Assumption: "the daemon has a default priority of clients, which is read back as it was set",
		Code:       "pkg/mps/control/priority.go",
		Run:        checkMPSPriority,
	},
	{
		ID:         "mps.memory-limit",
		Assumption: "a client gets its memory limit, less what its context takes, and nothing beyond it",
		Code:       "pkg/device/share.go",
		Run:        checkMPSMemoryLimit,
	},
	{
		ID:         "mps.memory-info",
		Assumption: "cuMemGetInfo tells a client its limit as what is free, and the whole device as the total",
		Code:       "docs/concepts/mps.md",
		Run:        checkMPSMemoryInfo,
	},
	{
		ID:         "mps.multiprocessors",
		Assumption: "an active thread percentage gives a client whole multiprocessors, rounded down",
		Code:       "pkg/device/share.go",
		Run:        checkMPSMultiprocessors,
	},
	{
		ID:         "mps.client-environment",
		Assumption: "a client can lower its limits by its environment and not raise them, but can void that of memory",
		Code:       "pkg/cdi/edit",
		Run:        checkMPSEnvironment,
	},
	{
		ID:         "mps.without-daemon",
		Assumption: "in compute mode DEFAULT a client that reaches no daemon runs without MPS and without limits; so the driver sets EXCLUSIVE_PROCESS",
		Code:       "pkg/sharing/effects.go",
		Run:        checkMPSWithoutDaemon,
	},
	{
		ID:         "mps.control-alone",
		Assumption: "a client needs the socket control, perhaps the server's /dev/shm, and no other file of the daemon",
		Code:       "pkg/mps/supervisor/sockets.go",
		Run:        checkMPSControlAlone,
	},
	{
		ID:         "mps.clients",
		Assumption: "programs of other users and in namespaces of their own are clients of the same server, which knows them by their process ID on the host",
		Code:       "pkg/mps/supervisor/clients.go",
		Run:        checkMPSClients,
	},
	{
		ID:         "mps.user-namespace",
		Assumption: "MPS may not work for programs in a user namespace, so the driver refuses such pods; where it does, its limits hold",
		Code:       "docs/concepts/mps.md",
		Run:        checkMPSUserNamespace,
	},
	{
		ID:         "mps.ends",
		Assumption: "terminate_client makes the end of a client safe for the others; without it anything may happen",
		Code:       "pkg/mps/supervisor/watch.go",
		Run:        checkMPSEnds,
	},
	{
		ID:         "mps.server-lost",
		Assumption: "when its server dies, the daemon starts another one for the next client, with the limits of future servers",
		Code:       "pkg/mps/supervisor/rules/decide.go",
		Run:        checkMPSServerLost,
	},
	{
		ID:         "mps.quit",
		Assumption: "quit -t 1 ends server and daemon, and nothing of them stays on the GPU",
		Code:       "pkg/mps/supervisor/daemon.go",
		Run:        checkMPSQuit,
	},
}

// inLab puts a question to the lab.
func inLab[T any](ctx context.Context, n *Node, kind Kind, question string, live func(context.Context, *lab) (T, error)) (T, error) {
	return Ask(ctx, n, kind, question, func(ctx context.Context) (T, error) {
		n.lab.mu.Lock()
		defer n.lab.mu.Unlock()
		return live(ctx, n.lab)
	})
}

// usable is the GPU that part B works on, or why there is none.
type usable struct {
	gpu    *gpu.GPU
	reason string
}

// labGPU chooses a GPU that nobody uses, that is in compute mode DEFAULT and not in MIG
// mode. It asks once.
func (n *Node) labGPU(ctx context.Context) usable {
	if n.labChoice == nil {
		choice := n.chooseGPU(ctx)
		n.labChoice = &choice
	}
	return *n.labChoice
}

func (n *Node) chooseGPU(ctx context.Context) usable {
	_, err := inLab(ctx, n, Daemon, "end what an earlier run left", func(ctx context.Context, l *lab) (bool, error) { return true, l.sweep(ctx) })
	if err != nil {
		return usable{reason: err.Error()}
	}
	node, err := n.GPUs(ctx)
	if err != nil {
		return usable{reason: fmt.Sprintf("the GPUs cannot be read: %v", err)}
	}
	var reasons []string
	for i := range node.GPUs {
		g := &node.GPUs[i]
		if n.GPU != "" && n.GPU != g.UUID {
			continue
		}
		why := n.unreserved(ctx, g)
		if why == "" {
			return usable{gpu: g}
		}
		reasons = append(reasons, g.PCIAddress+" "+why)
	}
	if len(reasons) == 0 {
		return usable{reason: fmt.Sprintf("there is no GPU %s", n.GPU)}
	}
	return usable{reason: "no GPU is free for it: " + strings.Join(reasons, "; ")}
}

// unreserved keeps claims off a GPU, unless that cannot be used; then it returns why.
func (n *Node) unreserved(ctx context.Context, g *gpu.GPU) string {
	_, err := Ask(ctx, n, File, "lock GPU "+g.PCIAddress+" against claims", func(ctx context.Context) (bool, error) {
		return true, n.reserved.take(ctx, n.DataDir, g.PCIAddress)
	})
	if err != nil {
		return fmt.Sprintf("cannot be kept from claims: %v", err)
	}
	claims, err := n.claims(ctx)
	why := claimed(claims, g.PCIAddress)
	if err != nil {
		why = fmt.Sprintf("may have claims, which cannot be read: %v", err)
	}
	if why == "" {
		why = n.unusable(ctx, g)
	}
	if why != "" {
		n.reserved.release(g.PCIAddress)
	}
	return why
}

// unusable returns why a GPU cannot be used, or nothing.
func (n *Node) unusable(ctx context.Context, g *gpu.GPU) string {
	if g.MIG != nil && g.MIG.Enabled {
		return "is in MIG mode"
	}
	mode, processes, err := n.use(ctx, g)
	switch {
	case err != nil:
		return fmt.Sprintf("cannot be looked at: %v", err)
	case mode != gpu.ComputeDefault:
		return fmt.Sprintf("is in compute mode %s", mode)
	case len(processes) > 0:
		return fmt.Sprintf("is used by %d processes", len(processes))
	}
	return ""
}

// use returns the compute mode of a GPU and who uses it.
func (n *Node) use(ctx context.Context, g *gpu.GPU) (gpu.ComputeMode, []gpu.Process, error) {
	mode, err := Ask(ctx, n, NVML, "compute mode of GPU "+g.PCIAddress+" before MPS", func(ctx context.Context) (gpu.ComputeMode, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return "", err
		}
		return hardware.ComputeMode(ctx, g.PCIAddress, "")
	})
	if err != nil {
		return "", nil, err
	}
	processes, err := Ask(ctx, n, NVML, "processes on GPU "+g.PCIAddress+" before MPS", func(ctx context.Context) ([]gpu.Process, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return nil, err
		}
		return hardware.Processes(ctx, g.PCIAddress)
	})
	return mode, processes, err
}

// checkMPSStart also decides whether the other checks can run.
func checkMPSStart(ctx context.Context, n *Node) []Finding {
	const expected = "daemon and server start within a minute"
	choice := n.labGPU(ctx)
	if choice.gpu == nil {
		n.labFailed = choice.reason
		return []Finding{Cannot("", expected, "%s", choice.reason)}
	}
	g := choice.gpu
	took, err := inLab(ctx, n, Daemon, "start daemon and server", func(ctx context.Context, l *lab) (daemonStart, error) {
		return l.start(ctx, g.UUID)
	})
	if err != nil {
		n.labFailed = "MPS could not be started"
		return []Finding{Failed(g.PCIAddress, expected, err)}
	}
	if server, err := time.ParseDuration(took.ServerTook); err == nil {
		n.measuredOf(g).serverStart = server
	}
	return []Finding{Expect(g.PCIAddress, true, expected, fmt.Sprintf("daemon %s, server %s", took.DaemonTook, took.ServerTook))}
}

// started returns no finding if MPS runs, and else that nothing can be said.
func (n *Node) started(expected string) []Finding {
	if n.labFailed != "" {
		return []Finding{Cannot("", expected, "%s", n.labFailed)}
	}
	return nil
}

// pipeFile is a file in the daemon's pipe folder.
type pipeFile struct {
	Name string      `json:"name"`
	Mode fs.FileMode `json:"mode"`
	// Socket is the type of a socket that takes connections.
	Socket string `json:"socket,omitempty"`
}

func (f pipeFile) String() string {
	kind := "file"
	switch {
	case f.Mode&fs.ModeSocket != 0:
		kind = strings.TrimSpace("socket " + f.Socket)
	case f.Mode&fs.ModeNamedPipe != 0:
		kind = "FIFO"
	case f.Mode.IsDir():
		kind = "directory"
	}
	return fmt.Sprintf("%s: %s %04o", f.Name, kind, f.Mode.Perm())
}

// pipeFiles are what transcripts of real nodes show.
var pipeFiles = []string{
	"control: socket SOCK_SEQPACKET 0666", "control_lock: file 0666", "control_privileged: socket SOCK_SEQPACKET 0755",
	"log: FIFO 0777", "nvidia-cuda-mps-control.pid: file 0666",
}

func checkMPSFiles(ctx context.Context, n *Node) []Finding {
	expected := strings.Join(pipeFiles, ", ")
	if f := n.started(expected); f != nil {
		return f
	}
	found, err := inLab(ctx, n, Daemon, "files of the pipe directory", func(_ context.Context, l *lab) ([]pipeFile, error) {
		return listPipe(l.mps.DaemonPipe)
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	texts := make([]string, len(found))
	for i, f := range found {
		texts[i] = f.String()
	}
	return []Finding{Expect("", slices.Equal(texts, pipeFiles), expected, strings.Join(texts, ", ")).
		Because("what clients need, and who can command the daemon, may be others than the driver takes for granted")}
}

func listPipe(folder string) ([]pipeFile, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var files []pipeFile
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		f := pipeFile{Name: e.Name(), Mode: info.Mode()}
		if f.Mode&fs.ModeSocket != 0 {
			f.Socket = socketType(filepath.Join(folder, f.Name))
		}
		files = append(files, f)
	}
	return files, nil
}

// socketType finds out of what type a socket is by connecting to it.
func socketType(path string) string {
	for _, t := range []struct {
		number int
		name   string
	}{{unix.SOCK_SEQPACKET, "SOCK_SEQPACKET"}, {unix.SOCK_STREAM, "SOCK_STREAM"}, {unix.SOCK_DGRAM, "SOCK_DGRAM"}} {
		fd, err := unix.Socket(unix.AF_UNIX, t.number|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			continue
		}
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		_ = unix.Close(fd)
		if err == nil {
			return t.name
		}
	}
	return ""
}

// mpsFiles are how many files the processes of MPS may open.
type mpsFiles struct {
	Daemon uint64 `json:"daemon"`
	Server uint64 `json:"server"`
}

func checkMPSOpenFiles(ctx context.Context, n *Node) []Finding {
	expected := fmt.Sprintf("at least %d", leastOpenFiles)
	if f := n.started(expected); f != nil {
		return f
	}
	found, err := inLab(ctx, n, Daemon, "how many files daemon and server may open", func(_ context.Context, l *lab) (mpsFiles, error) {
		control, err := l.control()
		if err != nil {
			return mpsFiles{}, err
		}
		daemon, err := mpsFileLimit(control.PID)
		server, serverErr := mpsFileLimit(l.server.PID)
		return mpsFiles{daemon, server}, errors.Join(err, serverErr)
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	return []Finding{Expect("", min(found.Daemon, found.Server) >= leastOpenFiles, expected, fmt.Sprintf("daemon %d, server %d", found.Daemon, found.Server)).
		Because(`with many clients the server fails with "failed to create/open SHM segment"`)}
}

func mpsFileLimit(pid int) (uint64, error) {
	var limit unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit); err != nil {
		return 0, fmt.Errorf("limit of open files of process %s: %w", strconv.Itoa(pid), err)
	}
	return limit.Cur, nil
}
