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
	"strings"

	"github.com/partage-dev/partage/pkg/conformance/cri"
	"github.com/partage-dev/partage/pkg/conformance/probe"
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/edit"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/podcgroup"
	"github.com/partage-dev/partage/pkg/util/quote"
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
func findRuntime(ctx context.Context, m *machine) (found containerRuntime, err error) {
	if found.Socket, err = m.runtimeSocket(); err != nil {
		return found, err
	}
	client, err := cri.Connect(found.Socket)
	if err != nil {
		return found, err
	}
	defer func() { _ = client.Close() }()
	if found.Version, err = client.Version(ctx); err != nil {
		return found, err
	}
	cgroups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return found, err
	}
	found.CgroupParent = client.CgroupParent(ctx, strings.Contains(string(cgroups), ".slice/"))
	if found.Image = m.Image; found.Image == "" {
		own, _ := podcgroup.Find(string(cgroups))
		found.Image, err = client.ImageOf(ctx, own.Container, m.PodUID)
		return found, err
	}
	there, err := client.HasImage(ctx, found.Image)
	if err == nil && !there {
		err = fmt.Errorf("the image of --image, %s, is not on this node; pull it first", quote.Name(found.Image))
	}
	return found, err
}

// runtimeSocket finds the socket by its usual paths, since no API tells which one the kubelet uses.
func (m *machine) runtimeSocket() (string, error) {
	if m.RuntimeSocket != "" {
		if _, err := os.Stat(m.RuntimeSocket); err != nil {
			return "", fmt.Errorf("the container runtime of --runtime-endpoint: %w", err)
		}
		return m.RuntimeSocket, nil
	}
	for _, path := range runtimeSockets {
		path = filepath.Join(hostRoot, path)
		if info, err := os.Stat(path); err == nil && info.Mode()&fs.ModeSocket != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("no container runtime listens on %s; --runtime-endpoint names another socket", strings.Join(runtimeSockets, ", "))
}

// inPod is what a program in a container says of its device.
type inPod struct {
	UUID    string   `json:"uuid"`    // of the device, as NVML has it
	Devices []string `json:"devices"` // UUIDs that the program sees, as CUDA has them
	Outcome string   `json:"outcome"`
}

// attempts is how often a pod is tried: the kubelet ends it when it notices it.
const attempts = 5

// runPod runs cuda-probe in a pod with a device, which u says how to remove.
func (m *machine) runPod(ctx context.Context, runtime containerRuntime, g *gpu.GPU, u *undo) (seen inPod, err error) {
	uuid, device, err := m.podDevice(ctx, g, u)
	if err != nil {
		return seen, err
	}
	program, err := m.podProgram(ctx, runtime, device)
	if err != nil {
		return seen, err
	}
	client, err := cri.Connect(runtime.Socket)
	if err != nil {
		return seen, err
	}
	defer func() { _ = client.Close() }()
	seen = inPod{UUID: uuid, Outcome: "ends without saying how"}
	for range attempts {
		var output string
		output, err = client.Run(ctx, program)
		events := probe.Read(strings.NewReader(output))
		if _, done := probe.Find(events, probe.Done); done || said(events) != "" {
			seen.Outcome, err = outcome(events, nil), nil // what comes after that changes nothing
		}
		seen.Devices = nil
		for _, e := range events {
			if e.Kind == probe.Device {
				seen.Devices = append(seen.Devices, e.UUID)
			}
		}
		if !errors.Is(err, cri.ErrEnded) {
			break
		}
	}
	return seen, err
}

// podDevice makes the partition, or takes the whole GPU, and returns its UUID and what a
// container needs for it.
func (m *machine) podDevice(ctx context.Context, g *gpu.GPU, u *undo) (string, cdi.Device, error) {
	if u.Partition == nil {
		device, err := edit.Device("gpu", edit.GPU{Roots: m.Roots, PCIAddress: g.PCIAddress})
		return g.UUID, device, err
	}
	live, err := m.partitions().Make(ctx, *u.Partition, g.MIG.Dynamic)
	if err != nil {
		return "", cdi.Device{}, err
	}
	device, err := edit.Device("partition", edit.Partition{
		Roots: m.Roots, PCIAddress: g.PCIAddress, InstanceID: live.InstanceID, ComputeID: live.ComputeID,
	})
	return live.UUID, device, err
}

// podProgram writes the CDI spec, as the driver does for a claim, and returns the program
// that gets the device.
func (m *machine) podProgram(ctx context.Context, runtime containerRuntime, device cdi.Device) (program cri.Program, err error) {
	hook, err := m.Hook()
	if err != nil {
		return program, fmt.Errorf("install the hook of CDI specs: %w", err)
	}
	specs, err := cdi.New(cdi.Options{Root: m.CDIDir, Roots: m.Roots, HookPath: hook})
	if err != nil {
		return program, err
	}
	names, err := specs.Write(ctx, cdi.Conformance, []cdi.Device{device})
	if err != nil {
		return program, err
	}
	if err := os.MkdirAll(m.podLogs(), 0o750); err != nil {
		return program, fmt.Errorf("make a folder for the container's output: %w", err)
	}
	options := probe.Options{Library: "libcuda.so.1", Allocate: 64 * mib}
	return cri.Program{
		Image: runtime.Image, Command: append([]string{m.Probe}, options.Arguments()...), CDIDevices: []string{names[device.Name]},
		CgroupParent: runtime.CgroupParent, LogDir: m.podLogs(),
	}, nil
}

// podLogs is a folder that has the same path on the host.
func (m *machine) podLogs() string { return filepath.Join(m.DataDir, "conformance", "pod") }

// removePod removes what a runtime has of a pod, its spec and its output.
func (m *machine) removePod(ctx context.Context, socket string) error {
	client, err := cri.Connect(socket)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	if err := client.RemoveAll(ctx); err != nil {
		return err
	}
	specs, err := cdi.New(cdi.Options{Root: m.CDIDir, Roots: m.Roots})
	if err != nil {
		return err
	}
	return errors.Join(specs.Remove(cdi.Conformance), host.RemoveTree(ctx, m.podLogs()))
}
