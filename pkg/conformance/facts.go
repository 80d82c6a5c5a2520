// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process"
)

// procfs and hostRoot are the node's in a pod with hostPID, as those of the driver are.
// They are not the roots of the driver's flags: those are where a GPU driver is.
const (
	procfs   = "/proc"
	hostRoot = procfs + "/1/root"
)

// ofFile is what the file systems answer, where the driver's roots are all that it takes.
func ofFile[T any](question string, read func(host.Roots) (T, error)) fact[T] {
	return fact[T]{File, question, func(_ context.Context, m *machine) (T, error) { return read(m.Roots) }}
}

// readText reads a short file of the kernel.
func readText(elements ...string) (string, error) {
	text, err := os.ReadFile(filepath.Join(elements...))
	return strings.TrimSpace(string(text)), err
}

// ofKernel is the text of a file of the kernel.
func ofKernel(question string, elements ...string) fact[string] {
	return ofFile(question, func(host.Roots) (string, error) { return readText(elements...) })
}

var (
	// firstProgram is this container's own where the pod has no hostPID.
	firstProgram       = ofKernel("program of process 1", procfs, "1/comm")
	mostUserNamespaces = ofKernel("most user namespaces", procfs, "sys/user/max_user_namespaces")

	kernelRelease = ofFile("kernel release", func(host.Roots) (string, error) {
		var name unix.Utsname
		err := unix.Uname(&name)
		return unix.ByteSliceToString(name.Release[:]), err
	})
)

// seLinux is what the node and the driver's setting make of it.
type seLinux struct {
	Enforcing bool
	// Context is that of the file systems in memory that containers get; empty for none.
	Context string
}

// seLinuxState is read from the root of the host's first process: a container does not see it.
var seLinuxState = fact[seLinux]{File, "SELinux", func(_ context.Context, m *machine) (seLinux, error) {
	enforce, err := readText(hostRoot, "sys/fs/selinux/enforce")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return seLinux{}, err
	}
	label, err := m.Roots.FileContext(m.SELinuxContext)
	return seLinux{enforce == "1", label}, err
}}

// NodeInfo is what the Node object says of the node.
type NodeInfo struct {
	// Runtime is the container runtime with its version, "containerd://2.1.4".
	Runtime string
	// UserNamespaces are the runtime's handlers that support them; "" is the default one.
	UserNamespaces []string
}

var nodeObject = fact[NodeInfo]{API, "Node object", func(ctx context.Context, m *machine) (NodeInfo, error) {
	if m.NodeInfo == nil {
		return NodeInfo{}, errors.New("this command was not told how to reach the API server")
	}
	return m.NodeInfo(ctx)
}}

// openFiles are the limits of this process.
type openFiles struct {
	Soft, Hard uint64
	// Raise is true where the process may go beyond the hard limit, up to Most.
	Raise bool
	Most  uint64
}

// openFileLimits are what a daemon of MPS would inherit from this process, which has the rights of the driver's.
var openFileLimits = ofFile("limits of open files", func(host.Roots) (openFiles, error) {
	var limit unix.Rlimit
	var capabilities [2]unix.CapUserData
	text, readErr := readText(procfs, "sys/fs/nr_open")
	most, parseErr := strconv.ParseUint(text, 10, 64)
	if err := errors.Join(
		unix.Getrlimit(unix.RLIMIT_NOFILE, &limit), cmp.Or(readErr, parseErr),
		unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &capabilities[0]),
	); err != nil {
		return openFiles{}, fmt.Errorf("limit of open files: %w", err)
	}
	return openFiles{Soft: limit.Cur, Hard: limit.Max, Raise: capabilities[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0, Most: most}, nil
})

// specFolder is where the driver writes specs, if it can.
var specFolder = fact[string]{File, "folder for CDI specs", func(_ context.Context, m *machine) (string, error) {
	if err := unix.Access(m.CDIDir, unix.W_OK|unix.X_OK); err != nil {
		return "", fmt.Errorf("write to the folder for CDI specs: %w", err)
	}
	return m.CDIDir, nil
}}

const nriSocket = "/var/run/nri/nri.sock"

var hasNRI = ofFile("socket of NRI", func(host.Roots) (bool, error) {
	_, err := os.Stat(filepath.Join(hostRoot, nriSocket))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
})

// place is a tree that may have device nodes, as the driver or this process sees it.
type place struct {
	Name, Folder string
	// Number is "195:255"; empty where the tree does not have the node.
	Number string
}

// placesOf says which trees have a node. The first is the one that the driver uses.
func placesOf(path string) fact[[]place] {
	return ofFile("places of "+path, func(roots host.Roots) ([]place, error) {
		places := []place{
			{Name: "device root", Folder: roots.DevRoot().OnHost}, {Name: "driver root", Folder: roots.Driver}, {Name: "host", Folder: hostRoot},
		}
		for i := range places {
			if i > 0 {
				roots = host.Roots{Dev: places[i].Folder}
			}
			major, minor, err := roots.CharDevice(path)
			switch {
			case err == nil:
				places[i].Number = fmt.Sprintf("%d:%d", major, minor)
			case i == 0 && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, host.ErrNotCharDevice):
				return nil, err
			}
		}
		return places, nil
	})
}

func minorOf(g *gpu.GPU) fact[int] {
	return ofFile("minor of GPU "+g.PCIAddress, func(roots host.Roots) (int, error) { return roots.GPUMinor(g.PCIAddress) })
}

// numbers are those of the nodes of MIG capabilities.
type numbers struct{ Major, Monitor int64 }

var capabilities = ofFile("numbers of MIG capabilities", func(roots host.Roots) (found numbers, err error) {
	if found.Major, err = roots.CapabilityMajor(); err == nil {
		found.Monitor, err = roots.MonitorCapability()
	}
	return found, err
})

// noClaim is the UID of no claim; specs of claims have those that the API server makes.
const noClaim = "conformance"

// commonEdits renders a spec and compares it with a file; nothing is written.
var commonEdits = fact[bool]{File, "common edits", func(ctx context.Context, m *machine) (bool, error) {
	specs, err := cdi.New(cdi.Options{Root: m.CDIDir, Roots: m.Roots})
	if err != nil {
		return false, err
	}
	return specs.Matches(ctx, noClaim, []cdi.Device{{Name: "none", Edits: cdi.Edits{Nodes: []cdi.Node{{Path: "/dev/null", Major: 1, Minor: 3}}}}})
}}

var (
	nvmlLibrary = ofFile("NVML library", host.Roots.LibraryPath)
	busGPUs     = ofFile("GPUs on the PCI bus", host.Roots.NVIDIAGPUs)
	// cudaLibrary is the file that the link beside NVML leads to.
	cudaLibrary = ofFile("libcuda", func(roots host.Roots) (string, error) {
		library, err := roots.LibraryPath()
		if err != nil {
			return "", err
		}
		target, err := filepath.EvalSymlinks(filepath.Join(filepath.Dir(library), "libcuda.so.1"))
		return filepath.Base(target), err
	})
)

// programPath is where a program of the driver is.
func programPath(name string) fact[string] {
	return ofFile("program "+name, func(roots host.Roots) (string, error) {
		program, err := roots.Program(name)
		if err == nil && program.Root != "" {
			return program.Path + " in its own root", nil
		}
		return program.Path, err
	})
}

// helpOf is what a program prints when it is asked for help, whatever its exit code.
func helpOf(name string, args ...string) fact[string] {
	const longest = 64 << 10 // is kept
	return fact[string]{Command, name + " " + strings.Join(args, " "), func(ctx context.Context, m *machine) (string, error) {
		program, err := m.Roots.Program(name)
		if err != nil {
			return "", err
		}
		cmd := program.Command(ctx, args...)
		// A program that does not know the option reads commands for a daemon instead. It
		// must find none, and its standard input is empty.
		cmd.Env = append(cmd.Env, "CUDA_MPS_PIPE_DIRECTORY=/nonexistent", "CUDA_MPS_LOG_DIRECTORY=/nonexistent")
		out, err := cmd.CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			return "", fmt.Errorf("run %s: %w", name, err)
		}
		return string(out[:min(len(out), longest)]), ctx.Err()
	}}
}

// mpsSessions are those of the node's MPS supervisor.
var mpsSessions = fact[[]mps.Status]{Command, "sessions of the MPS supervisor", func(ctx context.Context, m *machine) ([]mps.Status, error) {
	client, err := mps.NewClient(filepath.Join(m.MPSDir, mps.SocketName))
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Close() }()
	return client.List(ctx)
}}

// gpus are all of the node, as the driver discovers them.
var gpus = fact[gpu.Node]{NVML, "all GPUs", func(ctx context.Context, m *machine) (gpu.Node, error) {
	if err := m.hardware.Open(ctx); err != nil {
		return gpu.Node{}, err
	}
	node, err := m.hardware.Discover(ctx)
	if err != nil {
		return gpu.Node{}, err
	}
	return *node, nil
}}

var (
	gpuFacts      = ofGPU("facts of GPU %s", (*nvml.Client).Facts)
	migState      = ofGPU("MIG state of GPU %s", (*nvml.Client).MIGState)
	computeMode   = computeModeOf("compute mode of GPU %s")
	fabricPending = ofGPU("registration of GPU %s with the NVLink fabric", (*nvml.Client).FabricPending)
	listed        = processesOf("processes of GPU %s")
)

func computeModeOf(question string) gpuFact[gpu.ComputeMode] {
	return ofGPU(question, func(c *nvml.Client, ctx context.Context, pciAddress string) (gpu.ComputeMode, error) {
		return c.ComputeMode(ctx, pciAddress, "")
	})
}

// processesOf are the processes that NVML lists, each once.
func processesOf(question string) gpuFact[[]int] {
	return ofGPU(question, func(c *nvml.Client, ctx context.Context, pciAddress string) ([]int, error) {
		processes, err := c.Processes(ctx, pciAddress)
		pids := []int{}
		for _, p := range processes {
			pids = append(pids, p.PID)
		}
		slices.Sort(pids)
		return slices.Compact(pids), err
	})
}

// nodeProcess is a process of the node.
type nodeProcess struct {
	PID  int
	Name string // the kernel's, of 15 bytes at most, which the process may choose
	// Harmless is true for one that has GPUs open and is in nobody's way.
	Harmless bool `json:",omitempty"`
}

// named finds out the names of processes. Those that have ended are left out.
func named(pids []int) (found []nodeProcess, err error) {
	for _, pid := range pids {
		name, err := readText(procfs, strconv.Itoa(pid), "comm")
		switch {
		case err == nil:
			found = append(found, nodeProcess{PID: pid, Name: name})
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
	}
	return found, nil
}

// namesOf are the names of those that this process sees. In another PID namespace it sees none.
func namesOf(g *gpu.GPU, pids []int) fact[[]nodeProcess] {
	return ofFile("names of the processes that NVML lists of GPU "+g.PCIAddress, func(host.Roots) ([]nodeProcess, error) { return named(pids) })
}

// openersOf are the processes that have a GPU open. Harmless are this driver, whose session
// NVML does not count, and NVIDIA's daemon for persistence. They are known by what they do and
// are: any process may have their names.
func openersOf(g *gpu.GPU) fact[[]nodeProcess] {
	return fact[[]nodeProcess]{File, "processes with GPU " + g.PCIAddress + " open", func(ctx context.Context, m *machine) ([]nodeProcess, error) {
		finder := holder.Finder{Roots: m.Roots, Proc: procfs}
		processes, err := finder.Openers(ctx, g.PCIAddress, m.Limit, false)
		if err != nil {
			return nil, err
		}
		var pids []int
		for _, p := range processes {
			pids = append(pids, p.PID)
		}
		open, err := named(pids)
		plugins := m.plugins(ctx)
		for i := range open {
			open[i].Harmless = slices.Contains(plugins, open[i].PID) || m.runs(open[i].PID, "nvidia-persistenced")
		}
		return open, err
	}}
}

// plugins returns the processes that serve the sockets of this driver. There are two during
// an upgrade.
func (m *machine) plugins(ctx context.Context) (pids []int) {
	sockets, err := filepath.Glob(filepath.Join(m.DataDir, "dra*.sock"))
	if err != nil || m.DataDir == "" {
		return nil
	}
	for _, path := range sockets {
		if pid, err := process.Peer(ctx, path); err == nil { // one that was killed leaves its socket
			pids = append(pids, pid)
		}
	}
	return pids
}

// runs reports whether a process runs a program of the driver.
func (m *machine) runs(pid int, name string) bool {
	program, err := m.Roots.Program(name)
	driver, driverErr := os.Stat(filepath.Join(program.Root, program.Path))
	running, runningErr := os.Stat(filepath.Join(procfs, strconv.Itoa(pid), "exe"))
	return errors.Join(err, driverErr, runningErr) == nil && os.SameFile(driver, running)
}

// Latency is how long the slowest call of one function of NVML took.
type Latency struct {
	Function string
	Longest  time.Duration
}

// latencies are those of a run up to now, the slowest first.
type latencies struct {
	// Limit is the driver's for one call.
	Limit     time.Duration
	Functions []Latency
}

// latenciesSoFar is a question, although all calls are recorded, for the moment at which it is
// asked: a transcript has the later ones, too.
var latenciesSoFar = fact[latencies]{NVML, "latency so far", func(_ context.Context, m *machine) (latencies, error) {
	found := latencies{Limit: m.CallLimit}
	for function, times := range m.transcript.times(func(string, string, bool) bool { return true }) {
		found.Functions = append(found.Functions, Latency{function, times[len(times)-1]})
	}
	slices.SortFunc(found.Functions, func(a, b Latency) int { return cmp.Compare(b.Longest, a.Longest) })
	return found, nil
}}
