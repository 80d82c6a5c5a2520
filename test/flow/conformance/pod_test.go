// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/fakecri"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

const ownPod = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"

// onRuntime are the flags of the command in a container of a runtime, which has it.
func onRuntime(t *testing.T, n *harness.Node, r *fakecri.Runtime) []string {
	t.Helper()
	r.Running = []*runtimeapi.Container{{
		Id: "conformance", State: runtimeapi.ContainerState_CONTAINER_RUNNING, Image: &runtimeapi.ImageSpec{Image: fakecri.Image},
		Labels: map[string]string{"io.kubernetes.pod.uid": ownPod},
	}}
	return []string{"--intrusive", "--gpu=" + n.Machine(t).GPUs[0].UUID, "--runtime-endpoint=unix://" + fakecri.Start(t, r)}
}

// program runs what a container runs, with the devices of the CDI specs of the node.
func program(t *testing.T, n *harness.Node) func(*runtimeapi.ContainerConfig) (string, int32) {
	t.Helper()
	library := filepath.Join(sysroot.LibraryDir(n.Root), "libcuda.so.1")
	return func(c *runtimeapi.ContainerConfig) (string, int32) {
		cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(n.CDIDir), cdiapi.WithAutoRefresh(false))
		if err != nil {
			return err.Error(), 1
		}
		spec := &oci.Spec{}
		for _, device := range c.GetCDIDevices() {
			if _, err := cache.InjectDevices(spec, device.GetName()); err != nil {
				return err.Error(), 1
			}
		}
		if nodes := harness.DeviceNodes(spec); len(nodes) != 3 { // GPU, GPU instance, compute instance
			return fmt.Sprintf("nodes: %v", nodes), 1
		}
		args := c.GetCommand()[1:]
		for i, arg := range args {
			// The hook of a real runtime tells the loader.
			args[i] = strings.ReplaceAll(arg, "libcuda.so.1", library)
		}
		cmd := exec.CommandContext(t.Context(), c.GetCommand()[0], args...)
		cmd.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=/nonexistent"}
		out, err := cmd.Output()
		if err != nil {
			return string(out), 1
		}
		return string(out), 0
	}
}

// noPod fails if something of a pod is left.
func noPod(t *testing.T, n *harness.Node, r *fakecri.Runtime) {
	t.Helper()
	expect.Len(t, r.Pods(), 0, "pods are left")
	for _, dir := range []string{n.CDIDir, filepath.Join(n.PluginsDir, harness.DriverName, "conformance/pod")} {
		if files, err := os.ReadDir(dir); err == nil && len(files) > 0 {
			t.Errorf("files are left in %s: %v", dir, files)
		}
	}
}

// TestIntrusivePod: a container gets a partition by the runtime, also where the kubelet ends
// the first pods, and the same report comes from the transcript.
func TestIntrusivePod(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	before := n.Machine(t)
	r := &fakecri.Runtime{Program: program(t, n), Ended: 2}
	transcript := filepath.Join(t.TempDir(), "transcript")
	live := finished(t, n, "intrusive.", append(onRuntime(t, n, r), "--transcript="+transcript)...)
	if got, want := live.find(t, "intrusive.pod", "1g.10gb"), "fakecri 1.0: 1 device(s), the program goes on"; got.Verdict != "holds" || got.Observed != want {
		t.Errorf("got %+v, want %q", got, want)
	}
	expect.Equal(t, r.Made(), 3, "pods were made")
	asBefore(t, n, before)
	noPod(t, n, r)
	replays(t, n, transcript, "intrusive.", live)
}

// TestIntrusivePodDiffers: what a container gets instead of the device is a difference.
func TestIntrusivePodDiffers(t *testing.T) {
	t.Parallel()
	const other = "00000000-0000-4000-8000-000000000000"
	says := func(text string, code int32) func(*runtimeapi.ContainerConfig) (string, int32) {
		return func(*runtimeapi.ContainerConfig) (string, int32) { return text, code }
	}
	for name, test := range map[string]struct {
		runtime *fakecri.Runtime
		want    string
	}{
		"another device": {
			&fakecri.Runtime{Program: says(`{"event":"device","uuid":"`+other+`"}`+"\n"+`{"event":"done"}`+"\n", 0)}, "it sees " + other,
		},
		"no devices": {
			&fakecri.Runtime{Program: says(`{"event":"failed","call":"cuInit","result":"CUDA_ERROR_NO_DEVICE"}`+"\n", 1)},
			"0 device(s), the program gets CUDA_ERROR_NO_DEVICE",
		},
		"no program":            {&fakecri.Runtime{Program: says("exec: no such file\n", 127)}, "ends without saying how"},
		"never left to its end": {&fakecri.Runtime{Program: says("", 0), Ended: 1 << 20}, "ended by somebody else"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100-80-sxmx1")
			before := n.Machine(t)
			out, code, stderr := run(t, n, onRuntime(t, n, test.runtime)...)
			got := part(t, out, "intrusive.").find(t, "intrusive.pod", "1g.10gb")
			if code != 1 || got.Verdict != "differs" || !strings.Contains(got.Observed, test.want) {
				t.Errorf("exit code %d: got %+v, want a difference with %q: %s", code, got, test.want, stderr)
			}
			asBefore(t, n, before)
			noPod(t, n, test.runtime)
		})
	}
}

// TestIntrusivePodNoImage: an image that is not on the node says nothing about it.
func TestIntrusivePodNoImage(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	before := n.Machine(t)
	r := &fakecri.Runtime{Program: program(t, n)}
	out, code, stderr := run(t, n, append(onRuntime(t, n, r), "--image=other")...)
	got := part(t, out, "intrusive.").find(t, "intrusive.pod", n.Address(t, 0))
	if got.Verdict != "not testable" || !strings.Contains(got.Reason, "--image, other, is not on this node") {
		t.Errorf("exit code %d: got %+v: %s", code, got, stderr)
	}
	if r.Made() > 0 {
		t.Errorf("%d pods were made", r.Made())
	}
	asBefore(t, n, before)
}

// TestIntrusivePodKilled: a run that is killed while its pod runs leaves how to remove that,
// and the next one does.
func TestIntrusivePodKilled(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx1")
	before := n.Machine(t)
	runs, killed := make(chan struct{}, 1), make(chan struct{})
	real := program(t, n)
	r := &fakecri.Runtime{Program: func(c *runtimeapi.ContainerConfig) (string, int32) {
		runs <- struct{}{}
		<-killed
		return real(c)
	}}
	args := onRuntime(t, n, r)
	cmd := command(t, n, args...)
	must.Do(t, cmd.Start())
	<-runs
	must.Do(t, errors.Join(cmd.Process.Kill(), ignoreExit(cmd.Wait())))
	close(killed)
	if len(r.Pods()) != 1 || len(n.Instances(t)) != 1 {
		t.Errorf("it was killed at another moment: %v, %v", r.Pods(), n.Instances(t))
	}
	report := finished(t, n, "intrusive.", args...)
	report.wantHolds(t, n.Address(t, 0), "intrusive.begin", "intrusive.as-before")
	report.wantHolds(t, "1g.10gb", "intrusive.pod")
	asBefore(t, n, before)
	noPod(t, n, r)
}
