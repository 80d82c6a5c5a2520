//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// xidOnPartition: an XID that the policy lets evict hits one of two partitions of a GPU. The pod there is evicted and another starts on
// a third partition; the pod beside it does not notice.
func (h healthTest) xidOnPartition(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	gpu := gpus[0]
	pods := deployUntilTold(t, ns, "workers", 2, oneSlice.on(gpu))
	hit, beside := pods[0], pods[1]
	device := deviceOf(t, ns, claimOf(t, hit))
	besideUUID := lastUUID(t, logs(t, ns, beside.Name, "main"))

	onGPU(t, gpu, "xid", "--xid", "94", "--gi", instanceOf(t, device, gpu))
	waitTaints(t, gpu, "xid=94:NoExecute", []string{device})
	now := waitEvicted(t, ns, "workers", hit, 2)
	h.wantSigns(t, ns, hit, gpu, signs{
		reason: "GPUXID", metric: "xid", health: corev1.ResourceHealthStatusUnhealthy, says: "Pods that use it are evicted", alert: "PartageGPUXIDErrors",
	})
	h.wait(t, fmt.Sprintf(`partage_gpu_xid_errors_total{gpu=%q, xid="94"} == 1`, gpu.PCIAddress), true)
	h.waitFired(t, "PartageGPUUnhealthy", gpu.PCIAddress)
	waitTaints(t, gpu, "xid=94:NoExecute", []string{device})
	for _, p := range now {
		if other := deviceOf(t, ns, claimOf(t, p)); other == device {
			t.Errorf("pod %s has the partition %s, too", p.Name, other)
		}
	}
	if !slices.ContainsFunc(now, func(p corev1.Pod) bool { return p.UID == beside.UID }) {
		t.Errorf("pod %s, which has another partition, is gone", beside.Name)
	}
	wantDevice(t, ns, beside.Name, besideUUID)
	waitClaimStatus(t, ns, claimOf(t, beside), "Ready=True Ready")
	waitHealth(t, ns, beside.Name, "gpu", corev1.ResourceHealthStatusHealthy, "")
	for _, e := range events(t.Context(), ns, beside.Name) {
		if strings.HasPrefix(e, "GPU") {
			t.Errorf("pod %s is told %s", beside.Name, e)
		}
	}

	// What is wrong with a partition ends with it.
	endPod(t, ns, hit.Name)
	h.waitOver(t, gpu)
	// The two that run have one partition each of the seven.
	apply(t, ns, claim("again", oneSlice.on(gpu).times(5), "")+podUsing("again", "again"))
	waitRunning(t, ns, "again")
}

// startOf is the memory slice at which a partition begins: the end of its name.
func startOf(t *testing.T, device string) string {
	t.Helper()
	start := device[strings.LastIndex(device, "-")+1:]
	if _, err := strconv.Atoi(start); err != nil {
		t.Fatalf("device %s is no partition: %v", device, err)
	}
	return start
}

// instanceOf is the ID of the GPU instance of a partition.
func instanceOf(t *testing.T, device string, gpu simulatedGPU) string {
	t.Helper()
	start, err := strconv.Atoi(startOf(t, device))
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range showMachine(t).GPUs {
		if g.UUID != gpu.UUID || g.MIG == nil {
			continue
		}
		for _, i := range g.MIG.Instances {
			if i.Start == start {
				return strconv.Itoa(i.ID)
			}
		}
	}
	t.Fatalf("GPU %s has no instance of %s", gpu.PCIAddress, device)
	return ""
}

// gpuLost: a GPU falls off the bus. Its pod is evicted, as XID 79 comes with that, and another starts on the next GPU; a third GPU is
// not affected. After a reset the GPU is used again.
func (h healthTest) gpuLost(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 3)
	beside := gpus[2]
	apply(t, ns, claim("beside", oneSlice.on(beside), "")+podUsing("beside", "beside"))
	hit := deployUntilTold(t, ns, "trainer", 1, wholeGPU.on(gpus[:2]...))[0]
	uuid := gpuUUID.FindString(logs(t, ns, hit.Name, "main"))
	gpu, next := gpus[0], gpus[1]
	if gpu.UUID != uuid {
		gpu, next = next, gpu
	}
	waitRunning(t, ns, "beside")
	besideUUID := lastUUID(t, waitLog(t, ns, "beside", "main", "UUID: MIG"))

	t.Cleanup(func() { onGPU(t, gpu, "gpu", "--failure", "none") })
	onGPU(t, gpu, "gpu", "--failure", "lost")
	all := devicesOf(t, gpu, "gpu", "mig", "mps", "timeslice")
	waitTaints(t, gpu, "gpu-lost=:NoSchedule", all)
	waitTaints(t, gpu, "xid=79:NoExecute", all)
	now := waitEvicted(t, ns, "trainer", hit, 1)[0]
	h.wantSigns(t, ns, hit, gpu, signs{
		reason: "GPULost", metric: "gpu-lost", health: corev1.ResourceHealthStatusUnhealthy, says: "GPU is lost", alert: "PartageGPULost",
	})
	if device := deviceOf(t, ns, claimOf(t, now)); device != next.deviceName() {
		t.Errorf("the new pod has %s, want %s", device, next.deviceName())
	}
	wantDevice(t, ns, "beside", besideUUID)
	waitClaimStatus(t, ns, "beside", "Ready=True Ready")
	waitHealth(t, ns, "beside", "beside", corev1.ResourceHealthStatusHealthy, "")
	h.wantNone(t, next.PCIAddress)
	h.wantNone(t, beside.PCIAddress)

	endPod(t, ns, hit.Name)
	onGPU(t, gpu, "reset")
	h.waitOver(t, gpu)
	apply(t, ns, claim("again", wholeGPU.on(gpu), "")+podUsing("again", "again"))
	waitRunning(t, ns, "again")
}

// nvmlHangs: calls about one GPU do not return. Its pod stays, and pods on another GPU start and end meanwhile; when the calls return,
// all is as before.
func (h healthTest) nvmlHangs(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 2)
	gpu, beside := gpus[0], gpus[1]
	apply(t, ns, claim("hit", oneSlice.on(gpu), "")+podUsing("hit", "hit"))
	waitRunning(t, ns, "hit")
	uuid := lastUUID(t, waitLog(t, ns, "hit", "main", "UUID: MIG"))
	hit, err := client.CoreV1().Pods(ns).Get(t.Context(), "hit", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}

	fault := onGPU(t, gpu, "fault", "add", "--function", "nvmlDeviceGetMigMode", "--hang")
	release := func() error {
		_, err := gpusim(context.WithoutCancel(t.Context()), "fault", "rm", "--root", machineRoot, fault)
		return err
	}
	t.Cleanup(func() { _ = release() }) // again, if the test has ended before it did
	waitTaints(t, gpu, "unresponsive=:NoSchedule", devicesOf(t, gpu, "gpu", "mig", "mps", "timeslice"))
	apply(t, ns, claim("beside", oneSlice.on(beside), "")+podUsing("beside", "beside"))
	waitRunning(t, ns, "beside")
	h.wantSigns(t, ns, *hit, gpu, signs{
		reason: "GPUUnresponsive", metric: "unresponsive", health: corev1.ResourceHealthStatusUnknown, says: "GPU does not answer", alert: "PartageGPUUnresponsive",
	})
	waitHealth(t, ns, "beside", "beside", corev1.ResourceHealthStatusHealthy, "")
	deletePod(t, ns, "beside")
	h.wantNone(t, beside.PCIAddress)

	if err := release(); err != nil {
		t.Fatal(err)
	}
	waitClaimStatus(t, ns, "hit", "Ready=True Ready")
	waitHealth(t, ns, "hit", "hit", corev1.ResourceHealthStatusHealthy, "")
	waitEvent(t, ns, "hit", "GPURecovered", "the GPU answers again")
	h.waitOver(t, gpu)
	wantDevice(t, ns, "hit", uuid)
	apply(t, ns, claim("again", oneSlice.on(gpu), "")+podUsing("again", "again"))
	waitRunning(t, ns, "again")
}

// supervisorGone: the MPS supervisor of the node ends, with its daemons, and nobody starts another for a while. Shares are not offered,
// claims that have one say so, and partitions go on. With another supervisor the session is started again, and the pod comes back.
func (h healthTest) supervisorGone(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 2)
	gpu, beside := gpus[0], gpus[1]
	runningClient(t, ns, "hit", mpsShare("10Gi", 25).on(gpu))
	hit, err := client.CoreV1().Pods(ns).Get(t.Context(), "hit", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { selectSupervisor(t, "null") })
	selectSupervisor(t, `{"example.com/nowhere": "true"}`)
	waitTaints(t, gpu, "mps-unavailable=:NoSchedule", devicesOf(t, gpu, "mps"))
	h.wait(t, fmt.Sprintf(`partage_gpu_condition{gpu=%q, reason="mps-unavailable"} == 1`, gpu.PCIAddress), true)
	waitEvent(t, metav1.NamespaceDefault, h.node, "MPSUnavailable", gpu.PCIAddress)
	waitClaimStatus(t, ns, "hit", "Ready=False MPSUnavailable")
	waitEvent(t, ns, "hit", "MPSUnavailable", "until it is back")
	waitHealth(t, ns, hit.Name, "hit", corev1.ResourceHealthStatusUnknown, "supervisor")
	h.waitFired(t, "PartageMPSUnavailable", "")
	apply(t, ns, claim("beside", oneSlice.on(beside), "")+podUsing("beside", "beside"))
	waitRunning(t, ns, "beside")

	selectSupervisor(t, "null")
	waitLoss(t, ns, "hit")
	waitTaints(t, gpu, "", nil)
	waitEvent(t, metav1.NamespaceDefault, h.node, "MPSRecovered", gpu.PCIAddress)
	h.wait(t, fmt.Sprintf(`partage_gpu_condition{gpu=%q} == 1`, gpu.PCIAddress), false)
	waitClaimStatus(t, ns, "hit", "Ready=True Ready")
	waitHealth(t, ns, hit.Name, "hit", corev1.ResourceHealthStatusHealthy, "")
	h.waitEnded(t, "")
	h.waitEnded(t, gpu.PCIAddress)
	waitBack(t, ns, "hit")
	runningClient(t, ns, "again", mpsShare("10Gi", 25).on(gpu))
}

// selectSupervisor changes which nodes have an MPS supervisor, beyond what the chart says.
func selectSupervisor(t *testing.T, selector string) {
	t.Helper()
	kubectl(t, "patch", "daemonset", "partage-mps-supervisor", "-n", driverNamespace, "--type=merge",
		"-p", fmt.Sprintf(`{"spec": {"template": {"spec": {"nodeSelector": %s}}}}`, selector))
}
