//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestNeighboursComputeDomains installs NVIDIA's driver for ComputeDomains, without that for GPUs, beside this one, and runs a pod with a
// channel of it and a GPU of ours. The simulated GPUs are in no NVLink fabric of several nodes, so that there is no IMEX daemon to run.
func TestNeighboursComputeDomains(t *testing.T) {
	if suite != neighboursSuite {
		t.Skip("needs the programs of suite " + neighboursSuite)
	}
	ns, gpus := reserve(t, 1)
	// The kernel's list has no NVIDIA driver here.
	devices := filepath.Join(t.TempDir(), "devices")
	const list = "Character devices:\n195 nvidia\n234 nvidia-caps\n235 nvidia-caps-imex-channels\n\nBlock devices:\n"
	if err := os.WriteFile(devices, []byte(list), 0o600); err != nil {
		t.Fatal(err)
	}
	kubectl(t, "label", "nodes", "--all", "nvidia.com/gpu.present=true", "--overwrite") // by which its chart finds nodes with GPUs
	t.Cleanup(func() {                                                                  // its driver leaves it
		for _, file := range filesIn(cdiDir) {
			if strings.Contains(file, "compute-domain.nvidia.com") {
				if err := os.Remove(file); err != nil {
					t.Error(err)
				}
			}
		}
	})
	const name = "compute-domains"
	chart := filepath.Join(repoRoot, neighboursDir, "src/dra-driver-nvidia-gpu/deployments/helm/dra-driver-nvidia-gpu")
	installPeer(t, name, chart, "--set", strings.Join([]string{
		"image.repository=partage.invalid/" + name, "image.tag=dev", "image.pullPolicy=Never", "nvidiaDriverRoot=" + machineRoot,
		"resources.gpus.enabled=false", "altProcDevices=" + devices,
	}, ","))
	eventually(t, "slices of both drivers", func(ctx context.Context) (bool, string) {
		list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		drivers := map[string]int{}
		for _, s := range list.Items {
			drivers[s.Spec.Driver] += len(s.Spec.Devices)
		}
		return drivers[driverName] > 0 && drivers["compute-domain.nvidia.com"] > 0, fmt.Sprint(drivers)
	})
	apply(t, ns, claim("gpu", wholeGPU.on(gpus...), "")+fmt.Sprintf(`
apiVersion: resource.nvidia.com/v1beta1
kind: ComputeDomain
metadata: {name: domain}
spec: {numNodes: 1, channel: {resourceClaimTemplate: {name: channel}}}
---
apiVersion: v1
kind: Pod
metadata: {name: both}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: %s, imagePullPolicy: Never, command: [sh, -c, '%s'], resources: {claims: [{name: gpu}, {name: channel}]}}
  resourceClaims: [{name: gpu, resourceClaimName: gpu}, {name: channel, resourceClaimTemplateName: channel}]
`, demoImage, listAndStay))
	// Its driver first lets the node's daemon for the domain start, and fails the claim until that is ready.
	eventually(t, "pod both to be ready", func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, "both", metav1.GetOptions{})
		ready := err == nil && len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].Ready
		return ready, strings.Join(events(ctx, ns, "both"), " | ")
	})
	waitLog(t, ns, "both", "main", "UUID: GPU-")
	if code, out, errors := kubectlGPU(t, "doctor"); strings.Contains(out, "same name") {
		t.Errorf("kubectl gpu doctor takes it for a second driver of GPUs, exit code %d:\n%s%s", code, out, errors)
	}
	claims := claimUIDs(t, ns)
	removePods(t, ns)
	kubectl(t, "delete", "computedomain", "domain", "-n", ns)
	untilDeallocated(t, ns)
	eventually(t, "nothing left of the claims", func(ctx context.Context) (bool, string) {
		return nothing(leftBy(ctx, gpus, claims))
	})
	record(t, "NVIDIA DRA driver, ComputeDomains", "with `resources.gpus.enabled=false`, a pod has a channel of it and a GPU of ours. "+
		"Simulated GPUs are in no fabric of several nodes, so no IMEX daemon ran")
}
