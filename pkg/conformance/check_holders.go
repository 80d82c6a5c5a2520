// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/quote"
)

// holderChecks are about the processes that use GPUs.
var holderChecks = []Check{
	{
		ID:         "holders.listed",
		Assumption: "NVML lists the processes that use a GPU, with the process IDs that they have here",
		Code:       "pkg/gpu/nvml/usage.go",
		Run:        checkListed,
	},
	{
		ID:         "holders.others",
		Assumption: "no other process has the GPU open, so that its partitions can be made and can go",
		Code:       "pkg/partition",
		Run:        checkOthers,
	},
}

// process is one of the node.
type process struct {
	PID  int
	Name string // the kernel's, of 15 bytes at most, which the process may choose
	// Harmless is true for one that has GPUs open and is in nobody's way.
	Harmless bool `json:",omitempty"`
}

func (p process) String() string { return fmt.Sprintf("%s (%d)", quote.Name(p.Name), p.PID) }

// named finds out the names of processes. Those that have ended are left out.
func named(pids []int) ([]process, error) {
	var found []process
	for _, pid := range pids {
		name, err := os.ReadFile(filepath.Join(procfs, strconv.Itoa(pid), "comm"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		found = append(found, process{PID: pid, Name: strings.TrimSpace(string(name))})
	}
	return found, nil
}

// listed returns the processes that NVML lists, each once.
func (n *Node) listed(ctx context.Context, g *gpu.GPU) ([]int, error) {
	return Ask(ctx, n, NVML, "processes of GPU "+g.PCIAddress, func(ctx context.Context) ([]int, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return nil, err
		}
		processes, err := hardware.Processes(ctx, g.PCIAddress)
		if err != nil {
			return nil, err
		}
		pids := []int{}
		for _, p := range processes {
			pids = append(pids, p.PID)
		}
		slices.Sort(pids)
		return slices.Compact(pids), nil
	})
}

func checkListed(ctx context.Context, n *Node) []Finding {
	const expected = "each has a process ID that this pod sees"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		pids, err := n.listed(ctx, g)
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		found, err := Ask(ctx, n, File, "names of the processes that NVML lists of GPU "+g.PCIAddress, func(context.Context) ([]process, error) {
			return named(pids)
		})
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		f := Expect(g.PCIAddress, len(found) == len(pids), expected, listOf(found))
		if f.Verdict == Differs {
			f.Observed = fmt.Sprintf("NVML lists %v, of which are here: %s", pids, f.Observed)
		}
		return []Finding{f.Because("processes that use the GPU are not recognised, or one has just ended")}
	})
}

func listOf(processes []process) string {
	if len(processes) == 0 {
		return "none"
	}
	var names []string
	for _, p := range processes {
		names = append(names, p.String())
	}
	return strings.Join(names, ", ")
}

// markHarmless marks this driver, whose session NVML does not count, and NVIDIA's daemon
// for persistence. They are known by what they do and are: any process may have their names.
func (n *Node) markHarmless(ctx context.Context, open []process) {
	plugins := n.plugins(ctx)
	for i := range open {
		open[i].Harmless = slices.Contains(plugins, open[i].PID) || n.runs(open[i].PID, "nvidia-persistenced")
	}
}

// plugins returns the processes that serve the sockets of this driver. There are two during
// an upgrade.
func (n *Node) plugins(ctx context.Context) []int {
	sockets, err := filepath.Glob(filepath.Join(n.DataDir, "dra*.sock"))
	if err != nil || n.DataDir == "" {
		return nil
	}
	var pids []int
	for _, path := range sockets {
		if pid, err := server(ctx, path); err == nil { // one that was killed leaves its socket
			pids = append(pids, pid)
		}
	}
	return pids
}

// server returns the process that listens on a socket.
func server(ctx context.Context, path string) (int, error) {
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = connection.Close() }()
	socket, ok := connection.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("%s is no socket", path)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	var peerErr error
	err = raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, peerErr); err != nil {
		return 0, fmt.Errorf("find out who serves %s: %w", path, err)
	}
	return int(peer.Pid), nil
}

// runs reports whether a process runs a program of the driver.
func (n *Node) runs(pid int, name string) bool {
	program, err := n.Roots.Program(name)
	if err != nil {
		return false
	}
	driver, err := os.Stat(filepath.Join(program.Root, program.Path))
	if err != nil {
		return false
	}
	running, err := os.Stat(filepath.Join(procfs, strconv.Itoa(pid), "exe"))
	return err == nil && os.SameFile(driver, running)
}

func checkOthers(ctx context.Context, n *Node) []Finding {
	const expected = "nobody beside those that NVML lists"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		open, err := Ask(ctx, n, File, "processes with GPU "+g.PCIAddress+" open", func(ctx context.Context) ([]process, error) {
			roots := n.Roots
			roots.Proc = procfs
			pids, err := roots.Openers(fmt.Sprintf("/dev/nvidia%d", g.Minor))
			if err != nil {
				return nil, err
			}
			open, err := named(pids)
			n.markHarmless(ctx, open)
			return open, err
		})
		if err != nil {
			return []Finding{Cannot(g.PCIAddress, expected, "%v", err)}
		}
		pids, err := n.listed(ctx, g)
		if err != nil {
			return []Finding{Cannot(g.PCIAddress, expected, "open in %s, and NVML does not list processes: %v", listOf(open), err)}
		}
		others := slices.DeleteFunc(open, func(p process) bool {
			return slices.Contains(pids, p.PID) || p.Harmless
		})
		return []Finding{Expect(g.PCIAddress, len(others) == 0, expected, listOf(others)).
			Because("while it has the GPU open, it may keep the first partition from being made, and a partition may be in use that no pod has")}
	})
}
