//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	draDriver      = "dra-driver-nvidia-gpu"
	draDriverPods  = "dra-driver-nvidia-gpu-component=kubelet-plugin"
	draDriverChart = "oci://registry.k8s.io/dra-driver-nvidia/charts/dra-driver-nvidia-gpu"
)

// TestMigrationFromDRADriver follows docs/how-to/migrate/nvidia-dra-driver.md from a cluster that NVIDIA's own DRA driver serves to one
// that Partage serves, with one node moved back in between and at the end, and pods with claims and with old limits. Where the second node is moved
// although a pod runs on, no other pod gets its GPU.
func TestMigrationFromDRADriver(t *testing.T) {
	ns, dir := migrant(t)
	chart := peer(draDriver, draDriver)
	g := openGuide(t, "docs/how-to/migrate/nvidia-dra-driver.md", dir, draDriverChart, chart)
	installPeer(t, draDriver, chart, "--set", strings.Join([]string{
		"image.repository=partage.invalid/" + draDriver, "image.tag=dev", "image.pullPolicy=Never", "nvidiaDriverRoot=" + machineRoot,
		"gpuResourcesEnabledOverride=true", "resources.computeDomains.enabled=false",
	}, ","))
	for _, node := range []string{wholeNode, sharedNode} {
		waitDevices(t, node, "those of NVIDIA's driver", areNVIDIAs)
	}
	apply(t, ns, deployment("claims", 2, "{name: gpu, exactly: "+wholeGPU.String()+"}")+oldDeployment("limits", 2))
	wantEachOnItsOwn(t, ns)

	g.run(t, []string{"GPU_NODES=2", "VERSION=0.4.1"}, "label", "select")
	g.run(t, nil, "install")
	runsOn(t, draDriver, draDriverPods, wholeNode, sharedNode)
	runsOn(t, driverNamespace, partagePods)

	move := func(node string) {
		t.Helper()
		g.run(t, onNodeNamed(node), "drain")
		if left := g.run(t, onNodeNamed(node), "claims"); left != "" {
			t.Errorf("claims of NVIDIA's driver are left on %s:\n%s", node, left)
		}
		g.run(t, onNodeNamed(node), "move", "uncordon")
	}
	move(wholeNode)
	waitDevices(t, wholeNode, "Partage's", arePartages)
	waitDevices(t, sharedNode, "those of NVIDIA's driver", areNVIDIAs)
	runsOn(t, draDriver, draDriverPods, sharedNode)
	wantEachOnItsOwn(t, ns)

	g.run(t, onNodeNamed(wholeNode), "drain", "back", "uncordon")
	waitDevices(t, wholeNode, "those of NVIDIA's driver", areNVIDIAs)
	wantEachOnItsOwn(t, ns)
	move(wholeNode)
	wantEachOnItsOwn(t, ns)

	// The second node is moved although a pod runs on. Two more wait for its GPUs.
	kubectl(t, "delete", "deployments", "--all", "-n", ns)
	removePods(t, ns)
	holder := startOn(t, ns, sharedNode, "holder", wholeGPU)
	if left := g.run(t, onNodeNamed(sharedNode), "claims"); !strings.HasPrefix(left, ns+"/holder gpu.nvidia.com/"+sharedNode+"/gpu-") {
		t.Errorf("the claim of the pod is not listed:\n%s", left)
	}
	kubectl(t, "cordon", sharedNode)
	for _, name := range []string{"a", "b"} {
		apply(t, ns, claim(name, wholeGPU, "")+podOn(sharedNode, name, []container{{"main", listAndStay, []string{name}}}))
	}
	g.run(t, onNodeNamed(sharedNode), "move", "uncordon")
	other := ""
	eventually(t, "one of the pods to run", func(context.Context) (bool, string) {
		running := runningPods(t, ns, "a", "b")
		if len(running) > 0 {
			other = running[0]
		}
		return len(running) == 1, fmt.Sprint(running)
	})
	if uuid := gpusSeen(t, ns, []string{other})[0]; uuid == holder {
		t.Fatalf("pod %s has the GPU %s, which another pod uses", other, uuid)
	}
	waiting := map[string]string{"a": "b", "b": "a"}[other]
	waitTainted(t, sharedNode, holder)
	kubectl(t, "delete", "pod", "holder", "-n", ns)
	waitRunning(t, ns, waiting)
	if uuid := gpusSeen(t, ns, []string{waiting})[0]; uuid != holder {
		t.Errorf("pod %s has the GPU %s, want %s, which is free now", waiting, uuid, holder)
	}

	g.run(t, nil, "finish")
	runsOn(t, draDriver, draDriverPods)
	runsOn(t, driverNamespace, partagePods, wholeNode, sharedNode)
	removePods(t, ns)
	apply(t, ns, oldDeployment("limits", 4))
	wantOwnGPUs(t, ns, waitPods(t, ns, "limits", 4))

	// Back after the last step.
	g.run(t, []string{"VERSION=0.4.1"}, "return")
	runsOn(t, draDriver, draDriverPods)
	g.run(t, onNodeNamed(wholeNode), "drain", "back", "uncordon")
	runsOn(t, draDriver, draDriverPods, wholeNode)
	waitDevices(t, wholeNode, "those of NVIDIA's driver", areNVIDIAs)
	wantOwnGPUs(t, ns, waitPods(t, ns, "limits", 4))
	// Both drivers must be there to release what the pods have.
	kubectl(t, "delete", "deployments", "--all", "-n", ns)
	removePods(t, ns)
	record(t, "NVIDIA DRA driver, GPUs", "two nodes move, one also back, with pods that have claims or limits; the GPU of a pod that runs on is given to no other")
}

// wantEachOnItsOwn waits until two pods with claims and two with limits run, and fails unless each has a GPU of its own.
func wantEachOnItsOwn(t *testing.T, ns string) {
	t.Helper()
	wantOwnGPUs(t, ns, append(waitPods(t, ns, "claims", 2), waitPods(t, ns, "limits", 2)...))
}

func wantOwnGPUs(t *testing.T, ns string, pods []corev1.Pod) {
	t.Helper()
	var names []string
	for _, p := range pods {
		names = append(names, p.Name)
	}
	if seen := gpusSeen(t, ns, names); len(slices.Compact(slices.Clone(seen))) != len(pods) {
		t.Errorf("%d pods see the GPUs %v", len(pods), seen)
	}
}

// runningPods returns those of the pods that are ready.
func runningPods(t *testing.T, ns string, names ...string) []string {
	t.Helper()
	return slices.DeleteFunc(names, func(name string) bool {
		p, err := client.CoreV1().Pods(ns).Get(t.Context(), name, metav1.GetOptions{})
		return err != nil || !slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
	})
}

// waitTainted waits until the GPU with this UUID has the taint of those that a claim of another driver may be using.
func waitTainted(t *testing.T, node, uuid string) {
	t.Helper()
	eventually(t, "the taint of GPU "+uuid, func(ctx context.Context) (bool, string) {
		list, err := slicesOf(ctx, node)
		if err != nil {
			return false, err.Error()
		}
		for _, s := range list {
			for _, d := range s.Spec.Devices {
				if a := d.Attributes["uuid"].StringValue; a != nil && *a == uuid {
					return slices.ContainsFunc(d.Taints, func(x resourceapi.DeviceTaint) bool { return x.Key == driverName+"/foreign-claim" }), fmt.Sprint(d.Taints)
				}
			}
		}
		return false, "no such GPU"
	})
}

// Devices have other names with each of the drivers.
var (
	nvidiasDevice  = regexp.MustCompile(`^gpu-[0-9]+$`)
	partagesDevice = regexp.MustCompile(`^gpu-[0-9a-f]{4}-`)
)

func areNVIDIAs(names []string) bool  { return allMatch(names, nvidiasDevice) }
func arePartages(names []string) bool { return allMatch(names, partagesDevice) }

// allMatch reports whether there are names and all are like this.
func allMatch(names []string, like *regexp.Regexp) bool {
	return len(names) > 0 && !slices.ContainsFunc(names, func(n string) bool { return !like.MatchString(n) })
}
