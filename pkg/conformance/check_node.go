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
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// nodeChecks are about the kernel, the container runtime and this container.
var nodeChecks = []Check{
	{
		ID:         "node.pids",
		Assumption: "the processes of the node are seen, with the process IDs that they have there",
		Code:       "pkg/host/openers.go",
		Run:        checkPIDs,
	},
	{
		ID:         "node.kernel",
		Assumption: "the kernel has pidfds, and mounts that follow no symbolic links",
		Code:       "pkg/mps/supervisor/doc.go",
		Run:        checkKernel,
	},
	{
		ID:         "node.selinux",
		Assumption: "containers may use the sockets and the shared memory of MPS",
		Code:       "pkg/mps/supervisor/mount.go",
		Run:        checkSELinux,
	},
	{
		ID:         "node.runtime",
		Assumption: "the container runtime adds devices to containers by CDI specs",
		Code:       "pkg/cdi/cdi.go",
		Run:        checkRuntime,
	},
	{
		ID:         "node.userns",
		Assumption: "pods with MPS have the user namespace of the node; others are refused",
		Code:       "pkg/cdi/hook/mps.go",
		Run:        checkUserNamespaces,
	},
	{
		ID:         "node.nofile",
		Assumption: "MPS daemons can have as many files open as NVIDIA asks for",
		Code:       "pkg/mps/supervisor/openfiles.go",
		Run:        checkOpenFiles,
	},
	{
		ID:         "node.cdi",
		Assumption: "the container runtime reads specs from the folder that the driver writes them to",
		Code:       "pkg/cdi/cdi.go",
		Run:        checkCDIFolder,
	},
	{
		ID:         "node.nri",
		Assumption: "the container runtime tells plugins (NRI) before it kills a container; the driver does without",
		Code:       "docs/design/sharing.md",
		Run:        checkNRI,
	},
}

// procfs and hostRoot are the node's in a pod with hostPID, as those of the driver are.
// They are not the roots of the driver's flags: those are where a GPU driver is.
const (
	procfs   = "/proc"
	hostRoot = procfs + "/1/root"
)

func checkPIDs(ctx context.Context, n *Node) []Finding {
	const expected = "the pod has hostPID"
	first, err := Ask(ctx, n, File, "program of process 1", func(context.Context) (string, error) {
		name, err := os.ReadFile(filepath.Join(procfs, "1/comm"))
		return strings.TrimSpace(string(name)), err
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	own := strings.HasPrefix(first, "gpu-kubelet-plu") || strings.HasPrefix(first, "mps-supervisor")
	return []Finding{Expect("", !own, expected, "process 1 is "+first).
		Because("holders of GPUs are not found, and MPS does not know its clients")}
}

// Of Linux: MS_NOSYMFOLLOW came last of what the driver uses.
const kernelMajor, kernelMinor = 5, 10

func checkKernel(ctx context.Context, n *Node) []Finding {
	expected := fmt.Sprintf("Linux %d.%d or newer", kernelMajor, kernelMinor)
	release, err := Ask(ctx, n, File, "kernel release", func(context.Context) (string, error) {
		var name unix.Utsname
		err := unix.Uname(&name)
		return unix.ByteSliceToString(name.Release[:]), err
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	version, ok := twoNumbers(release)
	if !ok {
		return []Finding{Cannot("", expected, "the release %q is no version", release)}
	}
	return []Finding{Expect("", version.atLeast(kernelMajor, kernelMinor), expected, release)}
}

// twoPart is a version of which two numbers matter.
type twoPart struct{ major, minor int }

func (v twoPart) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}

// twoNumbers reads the beginning of a version such as "6.8.0-45-generic".
func twoNumbers(text string) (twoPart, bool) {
	first, rest, _ := strings.Cut(strings.TrimPrefix(text, "v"), ".")
	second := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
	major, err := strconv.Atoi(first)
	if err != nil {
		return twoPart{}, false
	}
	minor, err := strconv.Atoi(second)
	return twoPart{major, minor}, err == nil
}

// seLinux is what the node and the driver's setting make of it.
type seLinux struct {
	Enforcing bool
	// Context is that of the file systems in memory that containers get; empty for none.
	Context string
}

// containerType is the type that containers may use, in the policies of Fedora, RHEL and
// OpenShift.
const containerType = ":container_file_t:"

func checkSELinux(ctx context.Context, n *Node) []Finding {
	const expected = "SELinux does not enforce, or what containers get of MPS has a type that they may use"
	found, err := Ask(ctx, n, File, "SELinux", func(context.Context) (seLinux, error) {
		enforcing, err := seLinuxEnforces()
		if err != nil {
			return seLinux{}, err
		}
		context, err := n.Roots.FileContext(n.SELinuxContext)
		return seLinux{enforcing, context}, err
	})
	switch {
	case err != nil:
		return []Finding{Failed("", expected, err)}
	case !found.Enforcing:
		return []Finding{Expect("", true, expected, "it does not enforce")}
	case found.Context != "" && !strings.Contains(found.Context, containerType):
		return []Finding{Cannot("", expected, "it enforces, and only the node's policy knows whether containers may use %s", found.Context)}
	}
	return []Finding{Expect("", found.Context != "", expected, "it enforces, with "+cmp.Or(found.Context, "no context")).
		Because("clients of MPS are refused by the node's policy: set selinuxContext of the chart to auto")}
}

// seLinuxEnforces reads what a container does not see; the host's first process does.
func seLinuxEnforces() (bool, error) {
	enforce, err := os.ReadFile(filepath.Join(hostRoot, "sys/fs/selinux/enforce"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return strings.TrimSpace(string(enforce)) == "1", err
}

// NodeInfo is what the Node object says of the node.
type NodeInfo struct {
	// Runtime is the container runtime with its version, "containerd://2.1.4".
	Runtime string
	// UserNamespaces are the runtime's handlers that support them; "" is the default one.
	UserNamespaces []string
}

// nodeInfo asks the API server.
func (n *Node) nodeInfo(ctx context.Context) (NodeInfo, error) {
	return Ask(ctx, n, API, "Node object", func(ctx context.Context) (NodeInfo, error) {
		if n.NodeInfo == nil {
			return NodeInfo{}, errors.New("this command was not told how to reach the API server")
		}
		return n.NodeInfo(ctx)
	})
}

// oldestRuntimes have CDI switched on, or can have it.
var oldestRuntimes = map[string]twoPart{"containerd": {1, 7}, "cri-o": {1, 28}}

func checkRuntime(ctx context.Context, n *Node) []Finding {
	const expected = "containerd 2.0 or newer, or 1.7 with enable_cdi = true, or CRI-O 1.28 or newer"
	info, err := n.nodeInfo(ctx)
	if err != nil {
		return []Finding{Cannot("", expected, "the Node object cannot be read: %v", err)}
	}
	name, version, _ := strings.Cut(info.Runtime, "://")
	oldest, known := oldestRuntimes[name]
	found, ok := twoNumbers(version)
	if !known || !ok {
		return []Finding{Cannot("", expected, "the Node object says that the runtime is %q", info.Runtime)}
	}
	if name == "containerd" && found.major == 1 && found.minor == 7 {
		return []Finding{Cannot("", expected, "%s: look for enable_cdi in the configuration of containerd", info.Runtime)}
	}
	return []Finding{Expect("", found.atLeast(oldest.major, oldest.minor), expected, info.Runtime)}
}

func checkUserNamespaces(ctx context.Context, n *Node) []Finding {
	const expected = "no pod with MPS sets hostUsers: false"
	most, err := Ask(ctx, n, File, "most user namespaces", func(context.Context) (string, error) {
		text, err := os.ReadFile(filepath.Join(procfs, "sys/user/max_user_namespaces"))
		return strings.TrimSpace(string(text)), err
	})
	if errors.Is(err, fs.ErrNotExist) || most == "0" {
		return []Finding{Expect("", true, expected, "the kernel gives no user namespaces")}
	}
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	info, err := n.nodeInfo(ctx)
	if err != nil {
		return []Finding{Cannot("", expected, "the Node object cannot be read: %v", err)}
	}
	if len(info.UserNamespaces) == 0 {
		return []Finding{Expect("", true, expected, "no handler of the container runtime supports user namespaces")}
	}
	return []Finding{Cannot("", expected, "the container runtime supports user namespaces, and only pods know whether they use one")}
}

// leastOpenFiles is what NVIDIA asks for MPS (MPS documentation, "Troubleshooting Guide").
const leastOpenFiles = 16384

// openFiles are the limits of this process.
type openFiles struct {
	Soft, Hard uint64
	// Raise is true where the process may go beyond the hard limit, up to Most.
	Raise bool
	Most  uint64
}

func checkOpenFiles(ctx context.Context, n *Node) []Finding {
	expected := fmt.Sprintf("%d open files at least", leastOpenFiles)
	found, err := Ask(ctx, n, File, "limits of open files", func(context.Context) (openFiles, error) { return readOpenFiles() })
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	most, observed := found.Hard, fmt.Sprintf("%d, at most %d", found.Soft, found.Hard)
	if found.Raise {
		most = max(most, found.Most)
		observed += fmt.Sprintf(", may be raised to %d", most)
	}
	return []Finding{Expect("", most >= leastOpenFiles, expected, observed).
		Because("the MPS server fails to open shared memory when it has many clients")}
}

func readOpenFiles() (openFiles, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return openFiles{}, fmt.Errorf("limit of open files: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(procfs, "sys/fs/nr_open"))
	if err != nil {
		return openFiles{}, err
	}
	most, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return openFiles{}, fmt.Errorf("%s/sys/fs/nr_open: %w", procfs, err)
	}
	raise, err := hasCapability(unix.CAP_SYS_RESOURCE)
	return openFiles{Soft: limit.Cur, Hard: limit.Max, Raise: raise, Most: most}, err
}

func hasCapability(number int) (bool, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false, fmt.Errorf("capabilities of this process: %w", err)
	}
	return data[number/32].Effective&(1<<(number%32)) != 0, nil
}

// watchedFolders are those that containerd and CRI-O read CDI specs from unless they are
// told otherwise. /var/run is /run.
var watchedFolders = []string{"/etc/cdi", "/var/run/cdi", "/run/cdi"}

func checkCDIFolder(ctx context.Context, n *Node) []Finding {
	expected := strings.Join(watchedFolders[:2], " or ") + ", and it can be written to"
	folder, err := Ask(ctx, n, File, "folder for CDI specs", func(context.Context) (string, error) {
		return n.CDIDir, unix.Access(n.CDIDir, unix.W_OK|unix.X_OK)
	})
	if err != nil {
		return []Finding{Failed("", expected, fmt.Errorf("write to the folder for CDI specs: %w", err))}
	}
	for _, watched := range watchedFolders {
		if filepath.Clean(folder) == watched {
			return []Finding{Expect("", true, expected, folder)}
		}
	}
	return []Finding{Cannot("", expected, "the folder is %s, look for it in the configuration of the container runtime", folder)}
}

func checkNRI(ctx context.Context, n *Node) []Finding {
	const socket = "/var/run/nri/nri.sock"
	there, err := Ask(ctx, n, File, "socket of NRI", func(context.Context) (bool, error) {
		_, err := os.Stat(filepath.Join(hostRoot, socket))
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return []Finding{Failed("", socket, err)}
	}
	if !there {
		return []Finding{Cannot("", socket, "the container runtime does not offer NRI")}
	}
	return []Finding{Expect("", true, socket, "it is there")}
}
