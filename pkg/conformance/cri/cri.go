// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cri runs a program in a container of the node's container runtime, by the
// interface that the kubelet uses (CRI), with devices of CDI specs.
//
// The kubelet does not know such a pod, and ends it within seconds as one that is left over.
// So it is for programs that take a moment, and ErrEnded says that it was too late.
package cri

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/uuid"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/partage-dev/partage/pkg/util/wait"
)

// ErrEnded means that somebody else has ended the pod, as the kubelet does.
var ErrEnded = errors.New("the pod was ended by somebody else")

const (
	// label is that of the pods that Run makes, and podName their name and namespace.
	label   = "partage.dev/conformance"
	podName = "partage-conformance"

	// Labels of the kubelet, by which it finds its pods and names them.
	labelPodName   = "io.kubernetes.pod.name"
	labelNamespace = "io.kubernetes.pod.namespace"
	labelPodUID    = "io.kubernetes.pod.uid"
	labelContainer = "io.kubernetes.container.name"
)

// Client speaks to a container runtime.
type Client struct {
	connection *grpc.ClientConn
	runtime    runtimeapi.RuntimeServiceClient
	images     runtimeapi.ImageServiceClient
}

// Connect returns a client of the runtime that listens on a socket. Close ends it.
func Connect(socket string) (*Client, error) {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("container runtime at %s: %w", socket, err)
	}
	return &Client{
		connection: connection, runtime: runtimeapi.NewRuntimeServiceClient(connection), images: runtimeapi.NewImageServiceClient(connection),
	}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.connection.Close() }

// Version returns name and version of the runtime: "containerd v2.1.1".
func (c *Client) Version(ctx context.Context) (string, error) {
	v, err := c.runtime.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return "", fmt.Errorf("version of the container runtime: %w", err)
	}
	return v.GetRuntimeName() + " " + v.GetRuntimeVersion(), nil
}

// ImageOf returns the image of a container that runs, as the runtime finds it again: of that
// with an ID, or, where there is none, of one in the pod with a UID. Either may be empty.
func (c *Client) ImageOf(ctx context.Context, id, podUID string) (string, error) {
	all, err := c.runtime.ListContainers(ctx, &runtimeapi.ListContainersRequest{
		Filter: &runtimeapi.ContainerFilter{State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING}},
	})
	if err != nil {
		return "", fmt.Errorf("containers of the node: %w", err)
	}
	for _, isOwn := range []func(*runtimeapi.Container) bool{
		func(c *runtimeapi.Container) bool { return id != "" && c.GetId() == id },
		func(c *runtimeapi.Container) bool { return podUID != "" && c.GetLabels()[labelPodUID] == podUID },
	} {
		if i := slices.IndexFunc(all.GetContainers(), isOwn); i >= 0 {
			return all.GetContainers()[i].GetImage().GetImage(), nil
		}
	}
	return "", fmt.Errorf("the runtime has no container with ID %q and none of a pod with UID %q", id, podUID)
}

// HasImage reports whether an image is on the node.
func (c *Client) HasImage(ctx context.Context, image string) (bool, error) {
	s, err := c.images.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: image}})
	if err != nil {
		return false, fmt.Errorf("look for image %q: %w", image, err)
	}
	return s.GetImage() != nil, nil
}

// CgroupParent returns the cgroup below which pods that are not the kubelet's may be.
// systemd says whether the node uses systemd's driver for cgroups, for runtimes that do not
// tell: containerd does since 2.0.
func (c *Client) CgroupParent(ctx context.Context, systemd bool) string {
	config, err := c.runtime.RuntimeConfig(ctx, &runtimeapi.RuntimeConfigRequest{})
	if err == nil && config.GetLinux() != nil {
		systemd = config.GetLinux().GetCgroupDriver() == runtimeapi.CgroupDriver_SYSTEMD
	}
	if systemd {
		return "system.slice"
	}
	return ""
}

// Program is what runs in the container.
type Program struct {
	// Image must be on the node.
	Image string
	// Command is the program with its arguments.
	Command []string
	// CDIDevices are the full names of devices.
	CDIDevices []string
	// CgroupParent is that of CgroupParent.
	CgroupParent string
	// LogDir is a folder that has the same path here and for the runtime.
	LogDir string
}

// Run runs a program to its end in a pod of its own, and returns its standard output. Nothing of the pod stays, unless ctx ends or
// the runtime fails: see RemoveAll.
func (c *Client) Run(ctx context.Context, p Program) (output string, err error) {
	uid := string(uuid.NewUUID())
	sandbox := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: podName, Namespace: podName, Uid: uid},
		Labels:       map[string]string{label: "true", labelPodName: podName, labelNamespace: podName, labelPodUID: uid},
		LogDirectory: p.LogDir,
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    p.CgroupParent,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: namespaces},
		},
	}
	made, err := c.runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: sandbox})
	if err != nil {
		return "", fmt.Errorf("make a pod: %w", err)
	}
	id := made.GetPodSandboxId()
	output, code, err := c.runIn(ctx, id, sandbox, p)
	// The kubelet kills containers before it stops their pod.
	const signalled = 128 // is added to the number of a signal
	killed := code == signalled+int32(unix.SIGKILL) || code == signalled+int32(unix.SIGTERM)
	if (killed || c.hasEnded(ctx, id, err != nil)) && ctx.Err() == nil {
		err = errors.Join(ErrEnded, err)
	}
	return output, errors.Join(err, c.remove(ctx, id))
}

// noticeTime is in what time a runtime notices that somebody has ended a pod: a container that does not start may be the first sign.
const noticeTime = 3 * time.Second

// hasEnded reports whether a pod has ended, which it waits for where something in it has failed.
func (c *Client) hasEnded(ctx context.Context, id string, failed bool) (ended bool) {
	limited, cancel := context.WithTimeout(ctx, noticeTime)
	defer cancel()
	_ = wait.Until(limited, func() (bool, error) {
		pod, err := c.runtime.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
		ended = err != nil || pod.GetStatus().GetState() != runtimeapi.PodSandboxState_SANDBOX_READY
		return ended || !failed, nil
	})
	return ended
}

// namespaces have the node's network, which needs no network plugin.
var namespaces = &runtimeapi.NamespaceOption{
	Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER, Ipc: runtimeapi.NamespaceMode_POD,
}

// runIn runs the program in a container of the pod. It returns its exit code, too.
func (c *Client) runIn(ctx context.Context, sandboxID string, sandbox *runtimeapi.PodSandboxConfig, p Program) (string, int32, error) {
	const name = "program"
	labels := maps.Clone(sandbox.GetLabels())
	labels[labelContainer] = name
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: p.Image},
		Command:  p.Command,
		Labels:   labels,
		LogPath:  sandbox.GetMetadata().GetUid() + ".log", // of its own: a runtime appends to one that there is
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       &runtimeapi.LinuxContainerResources{},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: namespaces},
		},
	}
	for _, name := range p.CDIDevices {
		config.CDIDevices = append(config.CDIDevices, &runtimeapi.CDIDevice{Name: name})
	}
	made, err := c.runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: sandboxID, Config: config, SandboxConfig: sandbox})
	if err != nil {
		return "", 0, fmt.Errorf("make a container: %w", err)
	}
	id := made.GetContainerId()
	if _, err := c.runtime.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id}); err != nil {
		return "", 0, fmt.Errorf("start the container: %w", err)
	}
	var code int32
	if err := wait.Until(ctx, func() (bool, error) {
		s, err := c.runtime.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
		code = s.GetStatus().GetExitCode()
		return s.GetStatus().GetState() == runtimeapi.ContainerState_CONTAINER_EXITED, err
	}); err != nil {
		return "", 0, fmt.Errorf("wait for the container: %w", err)
	}
	log, err := os.ReadFile(filepath.Join(p.LogDir, config.GetLogPath()))
	if err != nil {
		return "", code, fmt.Errorf("output of the container: %w", err)
	}
	return standardOutput(string(log)), code, nil
}

// standardOutput takes a program's out of the log of a container, whose lines are
// "TIME STREAM TAGS TEXT". The first tag is P where the line of the program goes on.
func standardOutput(log string) string {
	var out strings.Builder
	for line := range strings.Lines(log) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(fields) < 4 || fields[1] != "stdout" {
			continue
		}
		out.WriteString(fields[3])
		if tag, _, _ := strings.Cut(fields[2], ":"); tag != "P" {
			out.WriteByte('\n')
		}
	}
	return out.String()
}

// RemoveAll removes the pods that Run has left, also of another process. Anybody can give a pod
// of the kubelet the label, but not another namespace than it is in.
func (c *Client) RemoveAll(ctx context.Context) error {
	all, err := c.runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{
		Filter: &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{label: "true", labelNamespace: podName}},
	})
	if err != nil {
		return fmt.Errorf("look for pods: %w", err)
	}
	var errs []error
	for _, one := range all.GetItems() {
		errs = append(errs, c.remove(ctx, one.GetId()))
	}
	return errors.Join(errs...)
}

// remove ends a pod and removes it. One that is not there is no error.
func (c *Client) remove(ctx context.Context, id string) error {
	_, err := c.runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	if err == nil {
		_, err = c.runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	}
	if err != nil && status.Code(err) != codes.NotFound {
		return fmt.Errorf("remove the pod %s: %w", id, err)
	}
	return nil
}
