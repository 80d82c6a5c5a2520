//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/test/neighbours"
)

// TestNeighboursDriverManager lets the GPU Operator's driver manager, unmodified, prepare the node for a driver container that has just
// been started anew with the same driver, while a claim is held. What it needs of a node is a loaded module, which it looks for in /sys.
func TestNeighboursDriverManager(t *testing.T) {
	if suite != neighboursSuite {
		t.Skip("needs the programs of suite " + neighboursSuite)
	}
	ns := reserveNode(t)
	becomeOperatorClient(t)
	uuid := runningPartition(t, ns, "stays")
	before := []types.UID{driverPod(t, pluginComponent).UID, driverPod(t, supervisorComponent).UID}
	const state = "/run/nvidia/nvidia-driver.state"
	if err := os.MkdirAll(filepath.Dir(state), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(state, []byte("same\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c",
		"mount -t tmpfs none /sys/module && mkdir /sys/module/nvidia && echo 0 >/sys/module/nvidia/refcnt && exec "+
			filepath.Join(repoRoot, neighboursDir, "driver-manager")+" uninstall_driver")
	cmd.Env = append(os.Environ(), "NODE_NAME="+driverPod(t, pluginComponent).Spec.NodeName, "DRIVER_CONFIG_DIGEST=same")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("the driver manager: %v", err)
	}
	wantAll(t, "the driver manager", string(out), "nodeSelector key nvidia.com/gpu.deploy.client", "skipping the uninstallation of the driver")
	left, err := client.CoreV1().Pods(driverNamespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range left.Items {
		if slices.Contains(before, pod.UID) {
			t.Errorf("pod %s is still there: the driver manager has not waited for it", pod.Name)
		}
	}
	waitDriverBack(t)
	nodes, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: clientLabel + "=true"})
	if err != nil || len(nodes.Items) != 1 {
		t.Errorf("nodes with the label set to true again: %v, %v", nodes, err)
	}
	wantDevice(t, ns, "stays", uuid)
	removePods(t, ns)
	checkNothingLeft(t)
	record(t, "NVIDIA driver manager", "it waits for both DaemonSets and brings them back; a pod with a partition runs on meanwhile")
}

// record writes what a test saw of a program of others.
func record(t *testing.T, name, what string) {
	t.Helper()
	if t.Failed() {
		return
	}
	if err := neighbours.Record(repoRoot, name, t.Name(), what); err != nil {
		t.Error(err)
	}
}

// becomeOperatorClient lets the driver go by the label of the GPU Operator's clients, which the node then has. Both stay: the driver runs
// with them as without.
func becomeOperatorClient(t *testing.T) {
	t.Helper()
	labelNode(t, "true")
	t.Cleanup(func() { labelNode(t, "true") })
	mustHelm(t, "upgrade", release, filepath.Join(repoRoot, "deployments", "helm", "partage"), "--reuse-values",
		"--set", "kubeletPlugin.gpuOperatorClient=true", "--wait=legacy", "--timeout", waitLimit.String())
	replaceSupervisor(t)
	waitNoOldPlugin(t)
}

// waitDriverBack waits until the driver has ready pods again, and no others.
func waitDriverBack(t *testing.T) {
	t.Helper()
	for _, component := range []string{pluginComponent, supervisorComponent} {
		eventually(t, component+" to be back", func(ctx context.Context) (bool, string) {
			pods, err := client.CoreV1().Pods(driverNamespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
			if err != nil || len(pods.Items) != 1 {
				return false, strings.Join(events(ctx, driverNamespace, release+"-"+component), " | ")
			}
			return condition(&pods.Items[0], corev1.PodReady).Status == corev1.ConditionTrue, ""
		})
	}
}
