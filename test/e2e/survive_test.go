//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
)

// rebootTimeout is long enough for the kubelet to prepare a second time: right
// after a reboot it finds no driver registered, and tries again only 60 to 90 s
// later.
const rebootTimeout = 3 * time.Minute

// sliceWatch follows how many of this driver's slices there are.
type sliceWatch struct {
	counts chan int
}

func watchSlices(t *testing.T) *sliceWatch {
	t.Helper()
	selector := fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorDriver, driverName).String()
	list, err := client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		t.Fatal(err)
	}
	changes, err := client.ResourceV1().ResourceSlices().Watch(t.Context(), metav1.ListOptions{FieldSelector: selector, ResourceVersion: list.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(changes.Stop)
	w := &sliceWatch{counts: make(chan int, 10000)}
	present := len(list.Items)
	go func() {
		for change := range changes.ResultChan() {
			switch change.Type {
			case watch.Added:
				present++
			case watch.Deleted:
				present--
			}
			w.counts <- present
		}
	}()
	return w
}

// until waits until there are so many slices.
func (w *sliceWatch) until(t *testing.T, want int) {
	t.Helper()
	for {
		select {
		case n := <-w.counts:
			if n == want {
				return
			}
		case <-time.After(podTimeout):
			t.Fatalf("there have not been %d ResourceSlices within %s", want, podTimeout)
		}
	}
}

// least is the smallest number of slices seen so far, or first if none was.
func (w *sliceWatch) least(first int) int {
	for {
		select {
		case n := <-w.counts:
			first = min(first, n)
		default:
			return first
		}
	}
}

func countSlices(t *testing.T) int {
	t.Helper()
	published, err := publishedSlices(t.Context())
	if err != nil || len(published) == 0 {
		t.Fatalf("published slices: %v, %v", published, err)
	}
	return len(published)
}

// wantUndisturbed fails unless the pod's container still is the first one and
// has the partition that it had.
func wantUndisturbed(t *testing.T, ns, pod, uuid string) {
	t.Helper()
	p, err := client.CoreV1().Pods(ns).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if s := p.Status.ContainerStatuses[0]; s.RestartCount != 0 || !s.Ready {
		t.Errorf("container of pod %s: ready %v, started again %d times", pod, s.Ready, s.RestartCount)
	}
	out, err := exec.Command("kubectl", "exec", "-n", ns, pod, "--", "nvidia-smi", "-L").CombinedOutput()
	if err != nil || !strings.Contains(string(out), uuid) {
		t.Errorf("pod %s sees %s (%v), want its partition %s", pod, out, err, uuid)
	}
}

// runningPartition starts a pod on a partition and returns the partition's UUID.
func runningPartition(t *testing.T, ns, name string) string {
	t.Helper()
	apply(t, ns, claim(name, oneSlice, "")+podUsing(name, "resourceClaimName: "+name))
	waitRunning(t, ns, name)
	return migUUID.FindString(waitLog(t, ns, name, "main", "MIG 1g.10gb"))
}

// TestKubeletRestart: the kubelet deletes the slices of its node when it starts.
// They come back as soon as the driver sees that, and pods do not notice.
func TestKubeletRestart(t *testing.T) {
	ns := namespace(t)
	uuid := runningPartition(t, ns, "before")
	want := countSlices(t)
	w := watchSlices(t)
	if out, err := exec.Command("sh", "-c", "kill -KILL $(pidof kubelet)").CombinedOutput(); err != nil {
		t.Fatalf("killing the kubelet: %v\n%s", err, out)
	}
	w.until(t, 0)
	gone := time.Now()
	w.until(t, want)
	t.Logf("the ResourceSlices were gone for %.1f s", time.Since(gone).Seconds())

	runningPartition(t, ns, "after")
	wantUndisturbed(t, ns, "before", uuid)
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestUpgrade replaces the driver's pod while pods come and go: none of them
// notices, and the devices never disappear.
func TestUpgrade(t *testing.T) {
	ns := namespace(t)
	uuid := runningPartition(t, ns, "before")
	slicesBefore := countSlices(t)
	w := watchSlices(t)

	upgraded := make(chan error, 1)
	go func() {
		const daemonSet = "daemonset/partage-gpu-kubelet-plugin"
		out, err := exec.Command("sh", "-c", fmt.Sprintf("kubectl -n %[1]s rollout restart %[2]s && kubectl -n %[1]s rollout status %[2]s --timeout=90s",
			driverNamespace, daemonSet)).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
		upgraded <- err
	}()
	pods := 0
	for done := false; !done; pods++ {
		select {
		case err := <-upgraded:
			done = true
			if err != nil {
				t.Fatal(err)
			}
		default:
		}
		name := fmt.Sprintf("during-%d", pods)
		runningPartition(t, ns, name)
		if err := client.CoreV1().Pods(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, e := range events(t.Context(), ns, name) {
			if strings.HasPrefix(e, "Failed") {
				t.Errorf("pod %s: %s", name, e)
			}
		}
	}
	t.Logf("%d pods were started during the upgrade", pods)
	if least := w.least(slicesBefore); least < slicesBefore {
		t.Errorf("for a time there were only %d of %d ResourceSlices", least, slicesBefore)
	}
	wantUndisturbed(t, ns, "before", uuid)
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

// TestNodeReboot cuts the node's power while pods run. They come back on the
// same devices, with partitions and MPS started anew and with other device numbers.
func TestNodeReboot(t *testing.T) {
	ns := namespace(t)
	uuid := runningPartition(t, ns, "part")
	apply(t, ns, claim("whole", wholeGPU, "")+podUsing("whole", "resourceClaimName: whole"))
	waitRunning(t, ns, "whole")
	shared := runningClient(t, ns, "share", mpsShare("10Gi", 25))
	before := showMachine(t)

	if out, err := exec.CommandContext(t.Context(), filepath.Join(repoRoot, "bin", "cluster"), "reboot").CombinedOutput(); err != nil {
		t.Fatalf("rebooting the node: %v\n%s", err, out)
	}
	after := showMachine(t)
	if after.BootID == before.BootID {
		t.Fatal("the boot id is the same as before")
	}
	if slices.EqualFunc(before.GPUs, after.GPUs, func(a, b simulatedGPU) bool { return a.Minor == b.Minor }) {
		t.Error("the GPUs have the minor numbers of before, so this shows little")
	}
	for _, pod := range []string{"part", "whole", "share"} {
		waitRestarted(t, ns, pod)
	}
	now := migUUID.FindString(waitLog(t, ns, "part", "main", "MIG 1g.10gb"))
	if now == uuid {
		t.Errorf("the partition still is %s", uuid)
	}
	out := waitLog(t, ns, "share", "main", "ready")
	wantAll(t, "the share", out, throughMPS, "limit 10240 MiB", shared)
	wantNodes(t, ns, "whole", after)
	wantNodes(t, ns, "part", after)
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}

func waitRestarted(t *testing.T, ns, pod string) {
	t.Helper()
	var last string
	err := wait.PollUntilContextTimeout(t.Context(), time.Second, rebootTimeout, true, func(ctx context.Context) (bool, error) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, pod, metav1.GetOptions{})
		last = fmt.Sprintf("phase %s (%v); events: %s", p.Status.Phase, err, strings.Join(events(ctx, ns, pod), " | "))
		return slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.RestartCount > 0 && s.Ready }), nil
	})
	if err != nil {
		t.Fatalf("pod %s did not come back within %s of the reboot; last seen: %s", pod, rebootTimeout, last)
	}
}

// wantNodes compares the GPU's device node that the CDI spec of a claim names
// with the number that the GPU has now.
func wantNodes(t *testing.T, ns, claimName string, machine simulated) {
	t.Helper()
	c, err := client.ResourceV1().ResourceClaims(ns).Get(t.Context(), claimName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	device := c.Status.Allocation.Devices.Results[0].Device
	i := slices.IndexFunc(machine.GPUs, func(g simulatedGPU) bool {
		return strings.HasPrefix(device, "gpu-"+strings.NewReplacer(":", "-", ".", "-").Replace(g.PCIAddress))
	})
	if i < 0 {
		t.Fatalf("no GPU of the machine is %s", device)
	}
	files, err := filepath.Glob(filepath.Join(cdiDir, "*"+string(c.UID)+"*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("CDI files of claim %s: %v, %v", claimName, files, err)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	var spec struct {
		Devices []struct {
			ContainerEdits struct {
				DeviceNodes []struct {
					Path         string
					Major, Minor int64
				}
			}
		}
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("/dev/nvidia%d", machine.GPUs[i].Minor)
	for _, node := range spec.Devices[0].ContainerEdits.DeviceNodes {
		if node.Path == want && node.Minor == int64(machine.GPUs[i].Minor) {
			return
		}
	}
	t.Errorf("the CDI spec of claim %s has no %s:\n%s", claimName, want, data)
}
