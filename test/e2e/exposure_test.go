//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// TestPodWithoutClaim: a container gets nothing of a GPU without a claim, although it asks as images for CUDA do: no node, no
// library, and no permission to open a node that it makes itself. A pod with a claim on the GPU is the control.
func TestPodWithoutClaim(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	var node unix.Stat_t
	if err := unix.Stat(filepath.Join(machineRoot, fmt.Sprintf("dev/nvidia%d", gpus[0].Minor)), &node); err != nil {
		t.Fatal(err)
	}
	look := fmt.Sprintf(`ls -d /dev/nvidia*; find /usr /lib* -name "libnvidia-ml.so*" -o -name "libcuda.so*" -o -name nvidia-smi; cuda-client info; `+
		`mknod /tmp/gpu c %d %d && (: </tmp/gpu); echo looked; sleep 3600`, unix.Major(node.Rdev), unix.Minor(node.Rdev))
	apply(t, ns, claim("gpu", wholeGPU.on(gpus...), "")+podRunning("user", look, "gpu"))
	apply(t, ns, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: stranger}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: %s
    imagePullPolicy: Never
    command: [sh, -c, '%s']
    env:
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    - {name: NVIDIA_DRIVER_CAPABILITIES, value: all}
    - {name: CUDA_VERSION, value: "12.8"}
`, demoImage, look))
	waitRunning(t, ns, "user")
	waitRunning(t, ns, "stranger")

	user := waitLog(t, ns, "user", "main", "looked")
	wantAll(t, "the pod with the claim", user, "/dev/nvidiactl", "libnvidia-ml.so", "libcuda.so", gpus[0].UUID)
	const denied = "Operation not permitted"
	if strings.Contains(user, denied) {
		t.Errorf("the pod with the claim may not open its GPU:\n%s", user)
	}
	stranger := waitLog(t, ns, "stranger", "main", "looked")
	wantAll(t, "the pod without a claim", stranger, "/tmp/gpu: "+denied)
	if found := regexp.MustCompile(`(?m)^(/dev/nvidia\S*|/\S*(libnvidia|libcuda|nvidia-smi)\S*)$|GPU-[0-9a-f]`).FindAllString(stranger, -1); len(found) > 0 {
		t.Errorf("the pod without a claim has %q:\n%s", found, stranger)
	}
}

// TestNodeNVIDIARuntimeByDefault: where containerd starts every container with NVIDIA's runtime, the plugin says so until that ignores
// what containers ask for. The runtime is runc by that name: the test is about what the plugin finds out, not about what NVIDIA's does.
func TestNodeNVIDIARuntimeByDefault(t *testing.T) {
	out, err := doctor(t)
	if err != nil || !strings.Contains(out, "/runc\n") || !strings.Contains(out, "through claims only") {
		t.Fatalf("doctor: %v\n%s", err, out)
	}
	const nvidiaConfig = "/etc/nvidia-container-runtime/config.toml"
	config := containerdConfig(t)
	before, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`BinaryName = '([^']+)'`).FindSubmatch(before)
	if line == nil {
		t.Fatalf("%s names no runtime:\n%s", config, before)
	}
	nvidia := filepath.Join(t.TempDir(), "nvidia-container-runtime")
	if err := os.Symlink(string(line[1]), nvidia); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(filepath.Dir(nvidiaConfig)); err != nil {
			t.Error(err)
		}
		restartContainerd(t, config, before)
		replacePlugin(t)
	})
	restartContainerd(t, config, []byte(strings.Replace(string(before), string(line[1]), nvidia, 1)))
	replacePlugin(t)
	plugin := driverPod(t, pluginComponent)
	waitEvent(t, metav1.NamespaceDefault, plugin.Spec.NodeName, "GPUsWithoutClaims", nvidia+" gives them to containers")
	if out, err := doctor(t); err == nil || !strings.Contains(out, "Every container on this node can have all GPUs without a claim") {
		t.Errorf("doctor: %v\n%s", err, out)
	}

	if err := os.MkdirAll(filepath.Dir(nvidiaConfig), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(nvidiaConfig, []byte("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := doctor(t); err != nil || !strings.Contains(out, nvidia) || !strings.Contains(out, "through claims only") {
		t.Errorf("doctor where NVIDIA's runtime ignores what containers ask for: %v\n%s", err, out)
	}
}

// TestNodeAnnotatedPod: NVIDIA's NRI plugin gives a pod the device of another one's claim that an annotation names. The API server refuses
// such pods outside of the namespaces of the driver and of NVIDIA's software, and the plugin knows who gives them what.
func TestNodeAnnotatedPod(t *testing.T) {
	ns, gpus := reserve(t, 1)
	apply(t, ns, claim("gpu", wholeGPU.on(gpus...), "")+podRunning("user", "sleep 3600", "gpu"))
	waitRunning(t, ns, "user")
	c, err := client.ResourceV1().ResourceClaims(ns).Get(t.Context(), "gpu", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	runNRIPlugin(t)
	device := fmt.Sprintf("k8s.gpu.nvidia.com/claim=%s-%s", c.UID, c.Status.Allocation.Devices.Results[0].Device)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "annotated-" + ns, Annotations: map[string]string{"nvidia.cdi.k8s.io/container.main": device}},
		Spec: corev1.PodSpec{TerminationGracePeriodSeconds: ptr.To[int64](1), Containers: []corev1.Container{{
			Name: "main", Image: demoImage, ImagePullPolicy: corev1.PullNever, Command: []string{"sh", "-c", "ls -d /dev/nvidia*; echo looked; sleep 3600"},
		}}},
	}
	if _, err := client.CoreV1().Pods(ns).Create(t.Context(), pod, metav1.CreateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "nvidia.cdi.k8s.io/container.main") {
		t.Errorf("a pod of a tenant: %v", err)
	}
	// The same without the policy.
	if _, err := client.CoreV1().Pods(metav1.NamespaceSystem).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.CoreV1().Pods(metav1.NamespaceSystem).Delete(context.WithoutCancel(t.Context()), pod.Name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	waitRunning(t, metav1.NamespaceSystem, pod.Name)
	node := fmt.Sprintf("/dev/nvidia%d\n", gpus[0].Minor)
	wantAll(t, "the annotated pod, without a claim", waitLog(t, metav1.NamespaceSystem, pod.Name, "main", "looked"), node)
	if out, err := doctor(t); err != nil || !strings.Contains(out, "of the namespaces "+driverNamespace+", kube-system, gpu-operator: NVIDIA's NRI plugin") {
		t.Errorf("doctor: %v\n%s", err, out)
	}
}

// runNRIPlugin has containerd take NRI plugins, and runs NVIDIA's, as the container does that installs its toolkit.
func runNRIPlugin(t *testing.T) {
	t.Helper()
	config := containerdConfig(t)
	before, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	with := strings.Replace(string(before), "'io.containerd.nri.v1.nri', ", "", 1)
	if with == string(before) {
		t.Fatalf("%s does not turn off NRI:\n%s", config, before)
	}
	const sockets = "/var/run/nri"
	t.Cleanup(func() {
		restartContainerd(t, config, before)
		if err := os.RemoveAll(sockets); err != nil {
			t.Error(err)
		}
	})
	restartContainerd(t, config, []byte(with))
	eventually(t, "NRI", func(context.Context) (bool, string) {
		_, err := os.Stat(filepath.Join(sockets, "nri.sock"))
		return err == nil, fmt.Sprint(err)
	})
	plugin := exec.CommandContext(t.Context(), "_output/nvidia-ctk-installer") // it ends with the test
	plugin.Env = append(os.Environ(), "ENABLE_NRI_PLUGIN=true")
	said, err := plugin.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := plugin.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plugin.Wait() })
	if line, err := bufio.NewReader(said).ReadString('\n'); !strings.Contains(line, "runs") {
		t.Fatalf("NVIDIA's NRI plugin says %q: %v", line, err)
	}
}

// doctor runs the plugin's check in its pod.
func doctor(t *testing.T) (string, error) {
	t.Helper()
	return inPod(driverNamespace, driverPod(t, pluginComponent).Name, "/usr/bin/gpu-kubelet-plugin", "doctor")
}

// containerdConfig is the file that containerd was started with.
func containerdConfig(t *testing.T) string {
	t.Helper()
	pid, err := containerd(t.Context())
	if err != nil {
		t.Fatalf("find containerd: %v", err)
	}
	commandLine, err := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(commandLine), "--config\x00")
	if !found {
		t.Fatalf("containerd was started without --config: %q", commandLine)
	}
	file, _, _ := strings.Cut(rest, "\x00")
	return file
}

// restartContainerd has the cluster start it anew with another configuration.
func restartContainerd(t *testing.T, config string, content []byte) {
	t.Helper()
	if err := os.WriteFile(config, content, 0o644); err != nil {
		t.Fatal(err)
	}
	ctx := context.WithoutCancel(t.Context())
	killed, err := containerd(ctx)
	if err != nil {
		t.Fatalf("find containerd: %v", err)
	}
	if out, err := exec.CommandContext(ctx, "kill", "-KILL", killed).CombinedOutput(); err != nil {
		t.Fatalf("kill containerd: %v\n%s", err, out)
	}
	eventually(t, "another containerd", func(ctx context.Context) (bool, string) {
		now, err := containerd(ctx)
		return err == nil && now != killed, now
	})
}

// containerd is its process ID.
func containerd(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "pidof", "containerd").Output()
	return strings.TrimSpace(string(out)), err
}

// replacePlugin starts the plugin's pod anew and waits until only the new one is there.
func replacePlugin(t *testing.T) {
	t.Helper()
	if err := upgradePlugin(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "one pod of the plugin", func(ctx context.Context) (bool, string) {
		pods, err := client.CoreV1().Pods(driverNamespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + pluginComponent})
		if err != nil {
			return false, err.Error()
		}
		return len(pods.Items) == 1, fmt.Sprintf("%d pods", len(pods.Items))
	})
}
