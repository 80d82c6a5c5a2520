// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
)

// nodeChecks are about the kernel, the container runtime and this container.
var nodeChecks = []Check{
	{
		ID:         "node.pids",
		Assumption: "the processes of the node are seen, with the process IDs that they have there",
		Expected:   "the pod has hostPID",
		So:         "holders of GPUs are not found, and MPS does not know its clients",
		Code:       "pkg/node/holder",
		find: judge(firstProgram, func(name string) Finding {
			own := strings.HasPrefix(name, "gpu-kubelet-plu") || strings.HasPrefix(name, "mps-supervisor")
			return expect(!own, "process 1 is %s", name)
		}),
	},
	{
		ID:         "node.kernel",
		Assumption: "the kernel has pidfds, and mounts that follow no symbolic links",
		Expected:   "Linux 5.10 or newer", // MS_NOSYMFOLLOW came last of what the driver uses
		Code:       "pkg/mps/supervisor/doc.go",
		find: judge(kernelRelease, func(release string) Finding {
			found, err := version.ParseGeneric(release)
			if err != nil {
				return cannot("the release %q is no version", release)
			}
			return expect(found.AtLeast(version.MajorMinor(5, 10)), "%s", release)
		}),
	},
	{
		ID:         "node.selinux",
		Assumption: "containers may use the sockets and the shared memory of MPS",
		Expected:   "SELinux does not enforce, or what containers get of MPS has a type that they may use",
		So:         "clients of MPS are refused by the node's policy: set selinuxContext of the chart to auto",
		Code:       "pkg/mps/supervisor/mount.go",
		find:       judge(seLinuxState, judgeSELinux),
	},
	{
		ID:         "node.runtime",
		Assumption: "the container runtime adds devices to containers by CDI specs",
		Expected:   "containerd 2.0 or newer, or 1.7 with enable_cdi = true, or CRI-O 1.28 or newer",
		Code:       "pkg/driver/cdi/cdi.go",
		find: one(func(q *inquiry) Finding {
			info, err := nodeObject.try(q)
			if err != nil {
				return cannot("the Node object cannot be read: %v", err)
			}
			return judgeRuntime(info.Runtime)
		}),
	},
	{
		ID:         "node.userns",
		Assumption: "pods with MPS have the user namespace of the node; others are refused",
		Expected:   "no pod with MPS sets hostUsers: false",
		Code:       "pkg/driver/cdi/hook/mps.go",
		find:       one(checkUserNamespaces),
	},
	{
		ID:         "node.nofile",
		Assumption: "MPS daemons can have as many files open as NVIDIA asks for",
		Expected:   fmt.Sprintf("%d open files at least", leastOpenFiles),
		So:         "the MPS server fails to open shared memory when it has many clients",
		Code:       "pkg/mps/supervisor/openfiles.go",
		find: judge(openFileLimits, func(found openFiles) Finding {
			if !found.Raise {
				return expect(found.Hard >= leastOpenFiles, "%d, at most %d", found.Soft, found.Hard)
			}
			most := max(found.Hard, found.Most)
			return expect(most >= leastOpenFiles, "%d, at most %d, may be raised to %d", found.Soft, found.Hard, most)
		}),
	},
	{
		ID:         "node.cdi",
		Assumption: "the container runtime reads specs from the folder that the driver writes them to",
		Expected:   strings.Join(watchedFolders[:2], " or ") + ", and it can be written to",
		Code:       "pkg/driver/cdi/cdi.go",
		find: judge(specFolder, func(folder string) Finding {
			if !slices.Contains(watchedFolders, filepath.Clean(folder)) {
				return cannot("the folder is %s, look for it in the configuration of the container runtime", folder)
			}
			return expect(true, "%s", folder)
		}),
	},
	{
		ID:         "node.nri",
		Assumption: "the container runtime has plugins (NRI), which may hear of the end of a container too late; the driver does without",
		Expected:   nriSocket,
		Code:       "docs/design/sharing.md",
		find: judge(hasNRI, func(there bool) Finding {
			if !there {
				return cannot("the container runtime does not offer NRI")
			}
			return expect(true, "it is there")
		}),
	},
}

// leastOpenFiles is what NVIDIA asks for MPS (MPS documentation, "Troubleshooting Guide").
const leastOpenFiles = 16384

// watchedFolders are those that containerd and CRI-O read CDI specs from unless they are
// told otherwise. /var/run is /run.
var watchedFolders = []string{"/etc/cdi", "/var/run/cdi", "/run/cdi"}

// containerType is the type that containers may use, in the policies of Fedora, RHEL and
// OpenShift.
const containerType = ":container_file_t:"

// judgeSELinux knows one type that containers may use. Policies may allow others.
func judgeSELinux(found seLinux) Finding {
	switch {
	case !found.Enforcing:
		return expect(true, "it does not enforce")
	case found.Context != "" && !strings.Contains(found.Context, containerType):
		return cannot("it enforces, and only the node's policy knows whether containers may use %s", found.Context)
	}
	return expect(found.Context != "", "it enforces, with %s", cmp.Or(found.Context, "no context"))
}

// oldestRuntimes have CDI switched on, or can have it.
var oldestRuntimes = map[string]*version.Version{"containerd": version.MajorMinor(1, 7), "cri-o": version.MajorMinor(1, 28)}

// judgeRuntime goes by versions: no API says whether CDI is switched on.
func judgeRuntime(runtime string) Finding {
	name, number, _ := strings.Cut(runtime, "://")
	found, err := version.ParseGeneric(number)
	oldest := oldestRuntimes[name]
	switch {
	case oldest == nil || err != nil:
		return cannot("the Node object says that the runtime is %q", runtime)
	case name == "containerd" && found.AtLeast(oldest) && found.LessThan(version.MajorMinor(2, 0)):
		return cannot("%s: look for enable_cdi in the configuration of containerd", runtime)
	}
	return expect(found.AtLeast(oldest), "%s", runtime)
}

// checkUserNamespaces cannot say more than whether pods could use one.
func checkUserNamespaces(q *inquiry) Finding {
	most, err := mostUserNamespaces.try(q)
	if errors.Is(err, fs.ErrNotExist) || most == "0" {
		return expect(true, "the kernel gives no user namespaces")
	}
	info, infoErr := nodeObject.try(q)
	switch {
	case err != nil:
		return failed(err)
	case infoErr != nil:
		return cannot("the Node object cannot be read: %v", infoErr)
	case len(info.UserNamespaces) == 0:
		return expect(true, "no handler of the container runtime supports user namespaces")
	}
	return cannot("the container runtime supports user namespaces, and only pods know whether they use one")
}

// rootChecks are about the device nodes and what containers get of them.
var rootChecks = []Check{
	{
		ID:         "roots.control-nodes",
		Assumption: "the nodes that every CUDA program needs are where the driver looks for device nodes",
		Expected:   "a character device in the device root",
		Code:       "pkg/node/host/devroot.go",
		find: func(q *inquiry) (findings []Finding) {
			for _, path := range host.RequiredNodes() {
				findings = append(findings, q.on(filepath.Base(path), func(q *inquiry) Finding { return judgePlaces(placesOf(path).of(q)) })...)
			}
			return findings
		},
	},
	{
		ID:         "roots.gpu-nodes",
		Assumption: "each GPU has a device node there, whose number NVML and /proc agree on",
		Expected:   "a character device in the device root, with the minor number that NVML says",
		Code:       "pkg/node/host/devices.go",
		find: eachGPU(func(q *inquiry, g *gpu.GPU) Finding {
			if minor := minorOf(g).of(q); minor != g.Minor {
				return expect(false, "minor %d in NVML, %d in /proc/driver/nvidia", g.Minor, minor)
			}
			return judgePlaces(placesOf(fmt.Sprintf("/dev/nvidia%d", g.Minor)).of(q))
		}),
	},
	{
		ID:         "roots.capabilities",
		Assumption: "the driver publishes numbers for the nodes of MIG capabilities, which need not exist",
		Expected:   "nvidia-caps in /proc/devices, and a minor number for mig/monitor",
		Code:       "pkg/driver/cdi/edit/nodes.go",
		find: one(func(q *inquiry) Finding {
			node, err := gpus.try(q)
			if err != nil || !slices.ContainsFunc(node.GPUs, hasMIG) {
				return Finding{} // driver.nvml says why
			}
			found := capabilities.of(q)
			return expect(true, "%d:%d", found.Major, found.Monitor)
		}),
	},
	{
		ID:         "roots.common-edits",
		Assumption: "NVIDIA's library finds all that a container needs of the driver",
		Expected:   "the libraries and nodes of the driver",
		Code:       "pkg/driver/cdi/common.go",
		find:       judge(commonEdits, func(bool) Finding { return expect(true, "found") }),
	},
}

// judgePlaces says whether the driver finds a node.
func judgePlaces(places []place) Finding {
	var have []string
	for _, p := range places {
		if p.Number != "" {
			have = append(have, p.Name)
		}
	}
	if len(have) == 0 {
		return expect(false, "nowhere").because("nvidia-modprobe makes it on the host, or the driver container below its root")
	}
	return expect(places[0].Number != "", "in %s", strings.Join(have, ", ")).
		because("the device root is %s: set host.devRoot of the chart to auto, or to where the node is", places[0].Folder)
}

// programChecks are about the driver's programs.
var programChecks = []Check{
	{
		ID:         "programs.nvidia-smi",
		Assumption: "nvidia-smi sets time slices, for which NVML has no call",
		Expected:   "nvidia-smi with --set-timeslice",
		Code:       "pkg/driver/sharing/interval.go",
		find:       checkProgram("nvidia-smi", []string{"compute-policy", "--help"}, "--set-timeslice"),
	},
	{
		ID:         "programs.mps-control",
		Assumption: "the control daemon of MPS runs in the foreground and has one server for all users",
		Expected:   "nvidia-cuda-mps-control with -f and -multiuser-server",
		Code:       "pkg/mps/supervisor/program.go",
		find:       checkProgram("nvidia-cuda-mps-control", []string{"--help"}, "-f", "-multiuser-server"),
	},
	{
		ID:         "programs.mps-server",
		Assumption: "the control daemon finds the MPS server",
		Expected:   "nvidia-cuda-mps-server",
		Code:       "pkg/mps/supervisor/program.go",
		// It is not run: started by hand it serves.
		find: checkProgram("nvidia-cuda-mps-server", nil),
	},
}

// checkProgram returns a check that a program is there and that its help names options.
func checkProgram(name string, help []string, options ...string) func(*inquiry) []Finding {
	return one(func(q *inquiry) Finding {
		path := programPath(name).of(q)
		if len(options) == 0 {
			return expect(true, "%s", path)
		}
		text := helpOf(name, help...).of(q)
		missing := slices.DeleteFunc(slices.Clone(options), func(option string) bool { return strings.Contains(text, option) })
		if len(missing) > 0 {
			// Help texts do not name all options.
			return cannot("%s is there, its help does not name %s", path, strings.Join(missing, " and "))
		}
		return expect(true, "%s", path)
	})
}
