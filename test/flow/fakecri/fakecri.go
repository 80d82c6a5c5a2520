// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package fakecri plays a container runtime for a client of the kubelet's interface (CRI). It
// keeps the rules of pods and containers; what a container does is up to the test.
package fakecri

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/partage-dev/partage/test/must"
)

// Image is the one that is on the node.
const Image = "sha256:0123"

// Runtime is a container runtime. Its fields are set before it is used.
type Runtime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	runtimeapi.UnimplementedImageServiceServer

	// Program is what a container does: it returns what that prints and its exit code.
	Program func(*runtimeapi.ContainerConfig) (stdout string, code int32)
	// Ended is how many pods are ended by the kubelet before their program says anything.
	Ended int
	// EndedEarly is how many are ended before their container starts, which the runtime notices a moment later.
	EndedEarly int
	// Running are containers that the node has anyway.
	Running []*runtimeapi.Container
	// CgroupDriver is nil for a runtime that does not tell.
	CgroupDriver *runtimeapi.CgroupDriver

	mu         sync.Mutex
	made       int
	pods       map[string]*pod
	containers map[string]*container
}

type pod struct {
	config *runtimeapi.PodSandboxConfig
	ended  bool
	// unnoticed is how often the runtime says that it is ready although it has ended.
	unnoticed int
}

type container struct {
	pod    string
	config *runtimeapi.ContainerConfig
	state  runtimeapi.ContainerState
	code   int32
}

// Start serves the runtime on a socket in a folder with a short name, until the test ends.
func Start(t testing.TB, r *Runtime) (socket string) {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "cri"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket = filepath.Join(dir, "s")
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "unix", socket))(t)
	r.pods, r.containers = map[string]*pod{}, map[string]*container{}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, r)
	runtimeapi.RegisterImageServiceServer(server, r)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return socket
}

// Pods returns the pods that there are.
func (r *Runtime) Pods() []*runtimeapi.PodSandboxConfig {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []*runtimeapi.PodSandboxConfig
	for _, p := range r.pods {
		all = append(all, p.config)
	}
	return all
}

// Made is how many pods were made.
func (r *Runtime) Made() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.made
}

// Version is the name of this package.
func (*Runtime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: "fakecri", RuntimeVersion: "1.0"}, nil
}

// RuntimeConfig tells the driver of cgroups, if that is known.
func (r *Runtime) RuntimeConfig(context.Context, *runtimeapi.RuntimeConfigRequest) (*runtimeapi.RuntimeConfigResponse, error) {
	if r.CgroupDriver == nil {
		return nil, status.Error(codes.Unimplemented, "unknown method RuntimeConfig")
	}
	return &runtimeapi.RuntimeConfigResponse{Linux: &runtimeapi.LinuxRuntimeConfiguration{CgroupDriver: *r.CgroupDriver}}, nil
}

// ImageStatus knows the image that is there. One that is not is no error.
func (*Runtime) ImageStatus(_ context.Context, q *runtimeapi.ImageStatusRequest) (*runtimeapi.ImageStatusResponse, error) {
	if q.GetImage().GetImage() != Image {
		return &runtimeapi.ImageStatusResponse{}, nil
	}
	return &runtimeapi.ImageStatusResponse{Image: &runtimeapi.Image{Id: Image}}, nil
}

// ListContainers lists those that the node has anyway.
func (r *Runtime) ListContainers(_ context.Context, q *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	return &runtimeapi.ListContainersResponse{Containers: slices.DeleteFunc(slices.Clone(r.Running), func(c *runtimeapi.Container) bool {
		return q.GetFilter().GetState() != nil && q.GetFilter().GetState().GetState() != c.GetState()
	})}, nil
}

// RunPodSandbox makes a pod.
func (r *Runtime) RunPodSandbox(_ context.Context, q *runtimeapi.RunPodSandboxRequest) (*runtimeapi.RunPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := q.GetConfig().GetMetadata()
	if m.GetName() == "" || m.GetNamespace() == "" || m.GetUid() == "" {
		return nil, status.Error(codes.InvalidArgument, "sandbox config must include metadata")
	}
	for _, p := range r.pods {
		if p.config.GetMetadata().GetUid() == m.GetUid() {
			return nil, status.Errorf(codes.AlreadyExists, "pod %s", m.GetUid())
		}
	}
	r.made++
	id := fmt.Sprintf("pod-%d", r.made)
	r.pods[id] = &pod{config: q.GetConfig()}
	return &runtimeapi.RunPodSandboxResponse{PodSandboxId: id}, nil
}

// CreateContainer makes a container of the image that is there.
func (r *Runtime) CreateContainer(_ context.Context, q *runtimeapi.CreateContainerRequest) (*runtimeapi.CreateContainerResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pods[q.GetPodSandboxId()]
	switch {
	case p == nil:
		return nil, status.Error(codes.NotFound, "no such pod")
	case p.ended:
		return nil, status.Error(codes.Unknown, "the pod is not ready")
	case q.GetConfig().GetImage().GetImage() != Image:
		return nil, status.Errorf(codes.NotFound, "no image %q", q.GetConfig().GetImage().GetImage())
	case q.GetSandboxConfig().GetLogDirectory() != p.config.GetLogDirectory():
		return nil, status.Error(codes.InvalidArgument, "another pod's configuration")
	}
	id := q.GetPodSandboxId() + "-" + q.GetConfig().GetMetadata().GetName()
	r.containers[id] = &container{pod: q.GetPodSandboxId(), config: q.GetConfig(), state: runtimeapi.ContainerState_CONTAINER_CREATED}
	return &runtimeapi.CreateContainerResponse{ContainerId: id}, nil
}

// StartContainer starts the program, and returns before it has ended.
func (r *Runtime) StartContainer(_ context.Context, q *runtimeapi.StartContainerRequest) (*runtimeapi.StartContainerResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[q.GetContainerId()]
	if c == nil || c.state != runtimeapi.ContainerState_CONTAINER_CREATED {
		return nil, status.Error(codes.FailedPrecondition, "no such container, or it has started")
	}
	p := r.pods[c.pod]
	if r.EndedEarly > 0 {
		r.EndedEarly--
		p.ended, p.unnoticed = true, 2
		return nil, status.Error(codes.Unknown, "namespace path: lstat /proc/660/ns/ipc: no such file or directory")
	}
	c.state = runtimeapi.ContainerState_CONTAINER_RUNNING
	if r.Ended > 0 {
		r.Ended--
		p.ended = true
	}
	go r.run(c, p.config.GetLogDirectory(), p.ended)
	return &runtimeapi.StartContainerResponse{}, nil
}

func (r *Runtime) run(c *container, logs string, ended bool) {
	const killed = 137
	stdout, code := "", int32(killed)
	if !ended {
		stdout, code = r.Program(c.config)
	}
	var log strings.Builder
	for line := range strings.Lines(stdout) {
		fmt.Fprintf(&log, "%s stdout F %s\n", time.Now().Format(time.RFC3339Nano), strings.TrimSuffix(line, "\n"))
	}
	path := filepath.Join(logs, c.config.GetLogPath())
	if err := appendFile(path, log.String()); err != nil {
		code = -1
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c.state, c.code = runtimeapi.ContainerState_CONTAINER_EXITED, code
}

// appendFile writes to a log as containerd and CRI-O do: one that there is goes on.
func appendFile(path, text string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = file.WriteString(text)
	return errors.Join(err, file.Close())
}

// ContainerStatus says whether a program has ended.
func (r *Runtime) ContainerStatus(_ context.Context, q *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[q.GetContainerId()]
	if c == nil {
		return nil, status.Error(codes.NotFound, "no such container")
	}
	return &runtimeapi.ContainerStatusResponse{Status: &runtimeapi.ContainerStatus{Id: q.GetContainerId(), State: c.state, ExitCode: c.code}}, nil
}

// PodSandboxStatus says whether the pod was ended.
func (r *Runtime) PodSandboxStatus(_ context.Context, q *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pods[q.GetPodSandboxId()]
	if p == nil {
		return nil, status.Error(codes.NotFound, "no such pod")
	}
	s := &runtimeapi.PodSandboxStatus{Id: q.GetPodSandboxId(), State: runtimeapi.PodSandboxState_SANDBOX_READY}
	if p.unnoticed > 0 {
		p.unnoticed--
	} else if p.ended {
		s.State = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	}
	return &runtimeapi.PodSandboxStatusResponse{Status: s}, nil
}

// ListPodSandbox lists pods by labels.
func (r *Runtime) ListPodSandbox(_ context.Context, q *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	answer := &runtimeapi.ListPodSandboxResponse{}
	for id, p := range r.pods {
		matches := true
		for key, value := range q.GetFilter().GetLabelSelector() {
			matches = matches && p.config.GetLabels()[key] == value
		}
		if matches {
			answer.Items = append(answer.Items, &runtimeapi.PodSandbox{Id: id, Metadata: p.config.GetMetadata()})
		}
	}
	return answer, nil
}

// StopPodSandbox ends a pod. One that is not there has ended.
func (r *Runtime) StopPodSandbox(_ context.Context, q *runtimeapi.StopPodSandboxRequest) (*runtimeapi.StopPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pods[q.GetPodSandboxId()]; p != nil {
		p.ended = true
	}
	return &runtimeapi.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox removes a pod that was stopped.
func (r *Runtime) RemovePodSandbox(_ context.Context, q *runtimeapi.RemovePodSandboxRequest) (*runtimeapi.RemovePodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pods[q.GetPodSandboxId()]; p != nil && !p.ended {
		return nil, status.Error(codes.Unknown, "the pod is not stopped")
	}
	delete(r.pods, q.GetPodSandboxId())
	return &runtimeapi.RemovePodSandboxResponse{}, nil
}
