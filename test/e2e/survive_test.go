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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// sliceWatch follows the ResourceSlices of this driver.
type sliceWatch struct {
	counts chan sliceCount
}

// sliceCount is how many slices there are, and how many of those that there were at first.
type sliceCount struct{ present, old int }

// watchSlices starts to follow the ResourceSlices.
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
	w := &sliceWatch{counts: make(chan sliceCount, 10000)}
	old := map[types.UID]bool{}
	for _, s := range list.Items {
		old[s.UID] = true
	}
	present := len(list.Items)
	go func() {
		for change := range changes.ResultChan() {
			switch change.Type {
			case watch.Added:
				present++
			case watch.Deleted:
				present--
				if s, ok := change.Object.(*resourceapi.ResourceSlice); ok {
					delete(old, s.UID)
				}
			}
			w.counts <- sliceCount{present, len(old)}
		}
	}()
	return w
}

// until waits for a number of slices.
func (w *sliceWatch) until(t *testing.T, what string, is func(sliceCount) bool) {
	t.Helper()
	for {
		select {
		case n := <-w.counts:
			if is(n) {
				return
			}
		case <-time.After(waitLimit):
			t.Fatalf("not within %s: %s", waitLimit, what)
		}
	}
}

// least returns the smallest of first and the numbers of slices seen so far.
func (w *sliceWatch) least(first int) int {
	for {
		select {
		case n := <-w.counts:
			first = min(first, n.present)
		default:
			return first
		}
	}
}

// countSlices returns how many slices this driver has published.
func countSlices(t *testing.T) int {
	t.Helper()
	published, err := publishedSlices(t.Context())
	if err != nil || len(published) == 0 {
		t.Fatalf("published slices: %v, %v", published, err)
	}
	return len(published)
}

// wantDevice fails the test unless the pod's container was never restarted and has the device of this UUID.
func wantDevice(t *testing.T, ns, pod, uuid string) {
	t.Helper()
	wantFirstContainer(t, ns, pod)
	if out, err := inPod(ns, pod, "nvidia-smi", "-L"); err != nil || !strings.Contains(out, uuid) {
		t.Errorf("pod %s sees %s (%v), want device %s", pod, out, err, uuid)
	}
}

// runningPartition starts a pod on a partition and returns the UUID of the partition.
func runningPartition(t *testing.T, ns, name string) string {
	t.Helper()
	apply(t, ns, claim(name, oneSlice, "")+podUsing(name, name))
	waitRunning(t, ns, name)
	return migUUID.FindString(waitLog(t, ns, name, "main", "MIG 1g.10gb"))
}

// TestNodeKubeletRestart checks that the slices, which the kubelet deletes when it starts, come back as soon as the driver sees that,
// however often it restarts, and that pods are not affected.
func TestNodeKubeletRestart(t *testing.T) {
	ns := reserveNode(t)
	uuid := runningPartition(t, ns, "before")
	want := countSlices(t)
	const restarts = 10
	for n := range restarts {
		w := watchSlices(t)
		if out, err := exec.Command("sh", "-c", "kill -KILL $(pidof kubelet)").CombinedOutput(); err != nil {
			t.Fatalf("killing the kubelet: %v\n%s", err, out)
		}
		// The first may be back before the kubelet has deleted the last.
		w.until(t, "all ResourceSlices are deleted", func(n sliceCount) bool { return n.old == 0 })
		gone := time.Now()
		w.until(t, fmt.Sprintf("%d ResourceSlices are there", want), func(n sliceCount) bool { return n.present == want })
		t.Logf("restart %d: the ResourceSlices were gone for %.1f s", n+1, time.Since(gone).Seconds())
	}
	runningPartition(t, ns, "after")
	wantDevice(t, ns, "before", uuid)
}

// upgradePlugin replaces the plugin's pod as an upgrade does, and returns when the new one is ready.
func upgradePlugin() error {
	const daemonSet = "daemonset/partage-gpu-kubelet-plugin"
	for _, args := range [][]string{{"restart", daemonSet}, {"status", daemonSet, "--timeout=" + waitLimit.String()}} {
		out, err := exec.Command("kubectl", append([]string{"-n", driverNamespace, "rollout"}, args...)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("kubectl rollout %s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// TestNodeUpgrade replaces the plugin's pod while pods come and go, and checks that none of them is affected and that the devices
// never disappear.
func TestNodeUpgrade(t *testing.T) {
	ns := reserveNode(t)
	uuid := runningPartition(t, ns, "before")
	slicesBefore := countSlices(t)
	w := watchSlices(t)

	upgraded := make(chan error, 1)
	go func() { upgraded <- upgradePlugin() }()
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
	wantDevice(t, ns, "before", uuid)
}

// TestNodeReboot cuts the power of the node while pods run, and checks that they come back on the same devices, with partitions and
// MPS daemons made anew and other device numbers.
func TestNodeReboot(t *testing.T) {
	ns := reserveNode(t)
	uuid := runningPartition(t, ns, "part")
	apply(t, ns, claim("whole", wholeGPU, "")+podUsing("whole", "whole"))
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
		t.Error("the GPUs have the same minor numbers as before, so the test shows little")
	}
	for _, pod := range []string{"part", "whole", "share"} {
		waitRestarted(t, ns, pod)
	}
	if now := migUUID.FindString(waitLog(t, ns, "part", "main", "MIG 1g.10gb")); now != uuid {
		t.Errorf("the partition is %s, and was %s in the same place", now, uuid)
	}
	wantAll(t, "the share", waitLog(t, ns, "share", "main", "ready"), throughMPS, "limit 10240 MiB", shared)
	wantNodes(t, ns, "whole", after)
	wantNodes(t, ns, "part", after)
}

// waitRestarted waits until the pod's container has been restarted and is ready.
func waitRestarted(t *testing.T, ns, pod string) {
	t.Helper()
	eventually(t, "pod "+pod+" to be restarted", func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		return slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.RestartCount > 0 && s.Ready }),
			fmt.Sprintf("phase %s; events: %s", p.Status.Phase, strings.Join(events(ctx, ns, pod), " | "))
	})
}

// wantNodes fails the test unless the CDI spec of a claim has the device node with the number that its GPU has now.
func wantNodes(t *testing.T, ns, claimName string, machine simulated) {
	t.Helper()
	c, err := client.ResourceV1().ResourceClaims(ns).Get(t.Context(), claimName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	device := c.Status.Allocation.Devices.Results[0].Device
	i := slices.IndexFunc(machine.GPUs, func(g simulatedGPU) bool { return strings.HasPrefix(device, g.deviceName()) })
	if i < 0 {
		t.Fatalf("no GPU of the machine is %s", device)
	}
	files, err := filepath.Glob(filepath.Join(cdiDir, "*-claim_"+string(c.UID)+"*"))
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
