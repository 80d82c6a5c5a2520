// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/cdi/edit"
	"github.com/partage-dev/partage/pkg/cri"
	"github.com/partage-dev/partage/pkg/cuda/probe"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/podcgroup"
	"github.com/partage-dev/partage/pkg/quote"
)

// runtimeSockets are where container runtimes listen for the kubelet, on the host.
var runtimeSockets = []string{"/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock"}

// containerRuntime is what runs containers on the node.
type containerRuntime struct {
	Socket string `json:"socket"`
	// Version is its name and version.
	Version string `json:"version"`
	// Image has cuda-probe.
	Image        string `json:"image"`
	CgroupParent string `json:"cgroupParent,omitempty"`
}

// findRuntime finds the container runtime, and an image that is on the node.
func (n *Node) findRuntime(ctx context.Context) (containerRuntime, error) {
	return Ask(ctx, n, File, "container runtime, and the image of this container", func(ctx context.Context) (containerRuntime, error) {
		socket, err := n.runtimeSocket()
		if err != nil {
			return containerRuntime{}, err
		}
		client, err := cri.Connect(socket)
		if err != nil {
			return containerRuntime{}, err
		}
		defer func() { _ = client.Close() }()
		found := containerRuntime{Socket: socket, Image: n.Image}
		if found.Version, err = client.Version(ctx); err != nil {
			return containerRuntime{}, err
		}
		cgroups, err := os.ReadFile("/proc/self/cgroup")
		if err != nil {
			return containerRuntime{}, err
		}
		found.CgroupParent = client.CgroupParent(ctx, strings.Contains(string(cgroups), ".slice/"))
		if found.Image == "" {
			own, _ := podcgroup.Find(string(cgroups))
			found.Image, err = client.ImageOf(ctx, own.Container, n.PodUID)
			return found, err
		}
		there, err := client.HasImage(ctx, found.Image)
		if err == nil && !there {
			err = fmt.Errorf("the image of --image, %s, is not on this node; pull it first", quote.Name(found.Image))
		}
		return found, err
	})
}

func (n *Node) runtimeSocket() (string, error) {
	if n.RuntimeSocket != "" {
		if _, err := os.Stat(n.RuntimeSocket); err != nil {
			return "", fmt.Errorf("the container runtime of --runtime-endpoint: %w", err)
		}
		return n.RuntimeSocket, nil
	}
	for _, path := range runtimeSockets {
		path = filepath.Join(hostRoot, path)
		if info, err := os.Stat(path); err == nil && info.Mode()&fs.ModeSocket != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("no container runtime listens on %s; --runtime-endpoint names another socket", strings.Join(runtimeSockets, ", "))
}

// podLeft is what there is to remove of a pod.
type podLeft struct {
	Socket string `json:"socket"`
	CDIDir string `json:"cdiDir"`
}

// inPod is what a program in a container says.
type inPod struct {
	Devices []string `json:"devices"` // UUIDs, as CUDA has them
	Outcome string   `json:"outcome"`
}

// plainUUID takes the prefix from a UUID of NVML, which CUDA's do not have.
func plainUUID(uuid string) string {
	return strings.TrimPrefix(strings.TrimPrefix(uuid, "MIG-"), "GPU-")
}

func checkPod(ctx context.Context, n *Node) []Finding {
	const expected = "the program sees that device and no other, and uses it"
	g := n.subject.gpu
	if g == nil {
		return []Finding{Cannot(n.GPU, expected, "%s", n.subject.why)}
	}
	runtime, err := n.findRuntime(ctx)
	if err != nil {
		return []Finding{Cannot(g.PCIAddress, expected, "%v", err)}
	}
	subject, u := g.PCIAddress, undoOf(g, nil)
	if n.partitionable() == "" {
		smallest, at := smallestPartition(g)
		subject, u = smallest.Name, undoOf(g, &at)
	}
	u.Pod = &podLeft{Socket: runtime.Socket, CDIDir: n.CDIDir}
	type answer struct {
		UUID string `json:"uuid"`
		inPod
	}
	got, err := changing(ctx, n, "a container with a device of the GPU", u, func(ctx context.Context, hardware *nvml.Client) (answer, error) {
		uuid, device, err := n.podDevice(ctx, hardware, g, u.Partition)
		if err != nil {
			return answer{}, err
		}
		seen, err := n.runPod(ctx, runtime, device)
		return answer{uuid, seen}, err
	})
	if err != nil {
		return []Finding{Failed(subject, expected, err).Because("pods with claims for such devices do not start")}
	}
	want := plainUUID(got.UUID)
	right := len(got.Devices) == 1 && got.Devices[0] == want && got.Outcome == goesOn
	observed := fmt.Sprintf("%s: %d device(s), the program %s", runtime.Version, len(got.Devices), got.Outcome)
	if len(got.Devices) > 0 && got.Devices[0] != want {
		observed += fmt.Sprintf("; it sees %s, the device is %s", strings.Join(got.Devices, ", "), want)
	}
	return []Finding{Expect(subject, right, expected, observed).Because("pods do not get what their claims say")}
}

// podDevice makes the partition, or takes the whole GPU, and returns its UUID and what a
// container needs for it.
func (n *Node) podDevice(ctx context.Context, hardware *nvml.Client, g *gpu.GPU, at *partition.Address) (string, cdi.Device, error) {
	if at == nil {
		device, err := edit.Device("gpu", edit.GPU{Roots: n.Roots, PCIAddress: g.PCIAddress})
		return g.UUID, device, err
	}
	live, err := n.partitions(hardware).Make(ctx, *at, g.MIG.Dynamic)
	if err != nil {
		return "", cdi.Device{}, err
	}
	device, err := edit.Device("partition", edit.Partition{
		Roots: n.Roots, PCIAddress: g.PCIAddress, InstanceID: live.InstanceID, ComputeID: live.ComputeID,
	})
	return live.UUID, device, err
}

// attempts is how often a pod is tried: the kubelet ends it when it notices it.
const attempts = 5

// runPod runs cuda-probe in a pod with a device.
func (n *Node) runPod(ctx context.Context, runtime containerRuntime, device cdi.Device) (inPod, error) {
	program, err := n.podProgram(ctx, runtime, device)
	if err != nil {
		return inPod{}, err
	}
	client, err := cri.Connect(runtime.Socket)
	if err != nil {
		return inPod{}, err
	}
	defer func() { _ = client.Close() }()
	var events []probe.Event
	for range attempts {
		var output string
		output, _, err = client.Run(ctx, program)
		events = parseEvents(output)
		if _, done := probe.Find(events, probe.Done); done || said(events) != "" {
			err = nil // what comes after that changes nothing
		}
		if !errors.Is(err, cri.ErrEnded) {
			break
		}
	}
	if err != nil {
		return inPod{}, err
	}
	seen := inPod{Outcome: outcome(events, nil)}
	for _, e := range events {
		if e.Kind == probe.Device {
			seen.Devices = append(seen.Devices, e.UUID)
		}
	}
	if _, done := probe.Find(events, probe.Done); !done && said(events) == "" {
		seen.Outcome = "ends without saying how"
	}
	return seen, nil
}

// podProgram writes the CDI spec, as the driver does for a claim, and returns the program
// that gets the device.
func (n *Node) podProgram(ctx context.Context, runtime containerRuntime, device cdi.Device) (cri.Program, error) {
	hook, err := n.Hook()
	if err != nil {
		return cri.Program{}, fmt.Errorf("install the hook of CDI specs: %w", err)
	}
	specs, err := cdi.New(cdi.Options{Root: n.CDIDir, Roots: n.Roots, HookPath: hook})
	if err != nil {
		return cri.Program{}, err
	}
	names, err := specs.Write(ctx, cdi.Conformance, []cdi.Device{device})
	if err != nil {
		return cri.Program{}, err
	}
	if err := os.MkdirAll(n.podLogs(), 0o750); err != nil {
		return cri.Program{}, fmt.Errorf("make a folder for the container's output: %w", err)
	}
	options := probe.Options{Library: "libcuda.so.1", Allocate: probe.Sizes{64 * mebibyte}}
	return cri.Program{
		Image: runtime.Image, Command: append([]string{n.Probe}, options.Arguments()...), CDIDevices: []string{names[device.Name]},
		CgroupParent: runtime.CgroupParent, LogDir: n.podLogs(),
	}, nil
}

// podLogs is a folder that has the same path on the host.
func (n *Node) podLogs() string { return filepath.Join(n.DataDir, "conformance", "pod") }

// parseEvents reads the output of cuda-probe.
func parseEvents(output string) []probe.Event {
	var events []probe.Event
	for line := range strings.Lines(output) {
		var e probe.Event
		if json.Unmarshal([]byte(line), &e) == nil {
			events = append(events, e)
		}
	}
	return events
}

// removePod removes what there is of a pod, its spec and its output.
func (n *Node) removePod(ctx context.Context, left *podLeft) error {
	client, err := cri.Connect(left.Socket)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	if err := client.RemoveAll(ctx); err != nil {
		return err
	}
	specs, err := cdi.New(cdi.Options{Root: left.CDIDir, Roots: n.Roots})
	if err != nil {
		return err
	}
	if err := specs.Remove(cdi.Conformance); err != nil {
		return err
	}
	return host.RemoveTree(ctx, n.podLogs())
}
