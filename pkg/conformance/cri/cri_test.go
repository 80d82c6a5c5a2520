// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cri

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/partage-dev/partage/test/flow/fakecri"
)

func connect(t *testing.T, r *fakecri.Runtime) *Client {
	t.Helper()
	c, err := Connect(fakecri.Start(t, r))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestRun: a program gets the devices, what it prints comes back, and nothing of its pod stays.
func TestRun(t *testing.T) {
	var config *runtimeapi.ContainerConfig
	r := &fakecri.Runtime{Program: func(c *runtimeapi.ContainerConfig) (string, int32) {
		config = c
		return "one\ntwo\n", 3
	}}
	c := connect(t, r)
	p := Program{Image: fakecri.Image, Command: []string{"/bin/x", "-y"}, CDIDevices: []string{"v/c=a"}, LogDir: t.TempDir()}
	out, err := c.Run(t.Context(), p)
	if out != "one\ntwo\n" || err != nil {
		t.Errorf("got %q, %v", out, err)
	}
	if diff := cmp.Diff(p.Command, config.GetCommand()); diff != "" || len(config.GetCDIDevices()) != 1 || config.GetCDIDevices()[0].GetName() != "v/c=a" {
		t.Errorf("the container was %v: %s", config, diff)
	}
	if left := r.Pods(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if version, err := c.Version(t.Context()); version != "fakecri 1.0" || err != nil {
		t.Errorf("got %q, %v", version, err)
	}
}

// TestRunAgain: what a program says is not that of an earlier one with the same folder: a
// runtime appends to a log that there is.
func TestRunAgain(t *testing.T) {
	c := connect(t, &fakecri.Runtime{Program: func(*runtimeapi.ContainerConfig) (string, int32) { return "one\n", 0 }})
	p := Program{Image: fakecri.Image, LogDir: t.TempDir()}
	for range 2 {
		if out, err := c.Run(t.Context(), p); out != "one\n" || err != nil {
			t.Errorf("got %q, %v", out, err)
		}
	}
}

// TestRunFails: an error says what was attempted, and nothing stays.
func TestRunFails(t *testing.T) {
	quiet := func(*runtimeapi.ContainerConfig) (string, int32) { return "", 0 }
	for name, test := range map[string]struct {
		runtime *fakecri.Runtime
		image   string
		want    string
		ended   bool
	}{
		"no image":                {&fakecri.Runtime{Program: quiet}, "other", `make a container: rpc error: code = NotFound desc = no image "other"`, false},
		"its container is killed": {&fakecri.Runtime{Program: func(*runtimeapi.ContainerConfig) (string, int32) { return "", 137 }}, fakecri.Image, "ended by somebody else", true},
		"an end before its start": {&fakecri.Runtime{Program: quiet, EndedEarly: 1}, fakecri.Image, "ended by somebody else", true},
		"the kubelet's end":       {&fakecri.Runtime{Program: quiet, Ended: 1}, fakecri.Image, "ended by somebody else", true},
	} {
		t.Run(name, func(t *testing.T) {
			c := connect(t, test.runtime)
			_, err := c.Run(t.Context(), Program{Image: test.image, LogDir: t.TempDir()})
			if err == nil || !strings.Contains(err.Error(), test.want) || errors.Is(err, ErrEnded) != test.ended {
				t.Errorf("got %v, want %q", err, test.want)
			}
			if left := test.runtime.Pods(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
	c, err := Connect("/does/not/exist")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Version(t.Context()); err == nil || !strings.Contains(err.Error(), "/does/not/exist") {
		t.Errorf("got %v", err)
	}
}

// TestRemoveAll: what another process has left goes, and pods of others stay.
func TestRemoveAll(t *testing.T) {
	r := &fakecri.Runtime{}
	c := connect(t, r)
	own := map[string]string{label: "true", labelNamespace: podName}
	for uid, labels := range map[string]map[string]string{
		"1": own, "2": own, "3": {"app": "train", labelNamespace: "b"},
		// The kubelet gives the runtime a pod's own labels as well, and the namespace that it is in.
		"4": {label: "true", labelNamespace: "b"},
	} {
		_, err := c.runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "a", Namespace: "b", Uid: uid}, Labels: labels,
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := c.RemoveAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, pod := range r.Pods() {
		left = append(left, pod.GetMetadata().GetUid())
	}
	slices.Sort(left)
	if !slices.Equal(left, []string{"3", "4"}) {
		t.Errorf("left: %v", left)
	}
}

func TestImageOf(t *testing.T) {
	running := func(id, pod, image string, state runtimeapi.ContainerState) *runtimeapi.Container {
		return &runtimeapi.Container{Id: id, State: state, Image: &runtimeapi.ImageSpec{Image: image}, Labels: map[string]string{labelPodUID: pod}}
	}
	c := connect(t, &fakecri.Runtime{Running: []*runtimeapi.Container{
		running("a", "1", "old", runtimeapi.ContainerState_CONTAINER_EXITED),
		running("b", "1", "first", runtimeapi.ContainerState_CONTAINER_RUNNING),
		running("c", "", "second", runtimeapi.ContainerState_CONTAINER_RUNNING),
		running("d", "1", "third", runtimeapi.ContainerState_CONTAINER_RUNNING),
	}})
	for _, test := range []struct{ id, pod, want string }{
		{"c", "", "second"}, {"", "1", "first"}, {"x", "1", "first"}, {"", "", ""}, {"a", "", ""}, {"", "2", ""},
		{"d", "1", "third"}, // not that of a sidecar in the same pod
	} {
		if got, err := c.ImageOf(t.Context(), test.id, test.pod); got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%+v: got %q, %v", test, got, err)
		}
	}
}

func TestHasImage(t *testing.T) {
	c := connect(t, &fakecri.Runtime{})
	for image, want := range map[string]bool{fakecri.Image: true, "other": false} {
		if got, err := c.HasImage(t.Context(), image); got != want || err != nil {
			t.Errorf("%s: got %t, %v", image, got, err)
		}
	}
}

func TestCgroupParent(t *testing.T) {
	systemd, cgroupfs := runtimeapi.CgroupDriver_SYSTEMD, runtimeapi.CgroupDriver_CGROUPFS
	for name, test := range map[string]struct {
		driver *runtimeapi.CgroupDriver
		guess  bool
		want   string
	}{
		"systemd": {&systemd, false, "system.slice"}, "cgroupfs": {&cgroupfs, true, ""},
		"systemd, not told": {nil, true, "system.slice"}, "cgroupfs, not told": {nil, false, ""},
	} {
		if got := connect(t, &fakecri.Runtime{CgroupDriver: test.driver}).CgroupParent(t.Context(), test.guess); got != test.want {
			t.Errorf("%s: got %q", name, got)
		}
	}
}

func TestStandardOutput(t *testing.T) {
	const log = "2026-01-02T03:04:05.6Z stdout F {\"a\": 1}\n" +
		"2026-01-02T03:04:05.6Z stderr F cuda-probe: no\n" +
		"2026-01-02T03:04:05.6Z stdout P lo\n2026-01-02T03:04:05.6Z stdout F ng\n" +
		"2026-01-02T03:04:05.6Z stdout F \ncut"
	if got, want := standardOutput(log), "{\"a\": 1}\nlong\n\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
