//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The nodes of the fleet; test/e2e/run says which machine each is.
const (
	hopperNode = "n1" // eight H100
	ampereNode = "n2" // eight A100 without MIG mode
	mixedNode  = "n3" // one GPU each of six models
)

var fleetNodes = []string{hopperNode, ampereNode, mixedNode}

// fleet makes a namespace for a test of several nodes. When the test ends, its pods are deleted, and nothing may be left on any node.
func fleet(t *testing.T) (ns string) {
	t.Helper()
	if suite != fleetSuite {
		t.Skip("needs the nodes of suite " + fleetSuite)
	}
	ns = makeNamespace(t)
	t.Cleanup(func() {
		kubectl(t, "delete", "deployments", "--all", "-n", ns)
		removeNamespace(t, ns)
		for _, node := range fleetNodes {
			waitNothingLeft(t, node)
		}
	})
	return ns
}

// clusterCommand runs the program that runs the cluster.
func clusterCommand(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(repoRoot, "bin", "cluster"), args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("cluster %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

func onNode(ctx context.Context, node string, command ...string) (string, error) {
	return clusterCommand(ctx, append([]string{"run", "--node", node, "--"}, command...)...)
}

// turnPower turns a node off or on.
func turnPower(t *testing.T, node, turn string) {
	t.Helper()
	if _, err := clusterCommand(context.WithoutCancel(t.Context()), turn, "--node", node); err != nil {
		t.Fatal(err)
	}
}

func kubectl(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "kubectl", args...).CombinedOutput(); err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func machineOf(ctx context.Context, node string) (simulated, error) {
	out, err := onNode(ctx, node, "bin/gpusim", "show", "-o", "json", "--root", machineRoot)
	if err != nil {
		return simulated{}, err
	}
	return decodeMachine([]byte(out))
}

// waitNothingLeft waits until nothing is left of any claim on a node.
func waitNothingLeft(t *testing.T, node string) {
	t.Helper()
	eventually(t, "nothing left on node "+node, func(ctx context.Context) (bool, string) {
		machine, err := machineOf(ctx, node)
		if err != nil {
			return false, err.Error()
		}
		script := fmt.Sprintf(`ls -d %s/* %s/* %s/*/ 2>/dev/null; grep -sL "%s" %s/*; cut -d" " -f5 /proc/self/mountinfo | grep ^%s/; true`,
			cdiDir, limitsDir, mpsDir, released, recordsDir, mpsDir)
		files, err := onNode(ctx, node, "sh", "-c", script)
		if err != nil {
			return false, err.Error()
		}
		return nothing(append(changedModes(machine.GPUs), strings.Fields(files)...), nil)
	})
}

// waitPool waits until the pool of a node has all its GPUs and belongs to the Node object that there is now.
func waitPool(t *testing.T, node string) {
	t.Helper()
	machine, err := machineOf(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pool of node "+node+" to be complete and the node's", func(ctx context.Context) (bool, string) {
		n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		published, err := slicesOf(ctx, node)
		if err != nil {
			return false, err.Error()
		}
		gpus := 0
		for _, s := range published {
			if s.Spec.Pool.Name != node || len(s.OwnerReferences) != 1 || s.OwnerReferences[0].UID != n.UID {
				return false, fmt.Sprintf("slice %s of pool %s belongs to %v; the node is %s", s.Name, s.Spec.Pool.Name, s.OwnerReferences, n.UID)
			}
			if s.Spec.Pool.ResourceSliceCount != int64(len(published)) || s.Spec.Pool.Generation != published[0].Spec.Pool.Generation {
				return false, fmt.Sprintf("%d slices, of which %s says %+v", len(published), s.Name, s.Spec.Pool)
			}
			for _, d := range s.Spec.Devices {
				if *d.Attributes["type"].StringValue == "gpu" && len(d.Taints) == 0 {
					gpus++
				}
			}
		}
		return gpus == len(machine.GPUs), fmt.Sprintf("%d slices with %d of %d GPUs", len(published), gpus, len(machine.GPUs))
	})
}

func slicesOf(ctx context.Context, node string) ([]resourceapi.ResourceSlice, error) {
	published, err := publishedSlices(ctx)
	return slices.DeleteFunc(published, func(s resourceapi.ResourceSlice) bool { return s.Spec.NodeName == nil || *s.Spec.NodeName != node }), err
}

// deployOn starts the first pods of a Deployment on one node.
func deployOn(t *testing.T, ns, node, name string, replicas int, claimRequest string) {
	t.Helper()
	others := slices.DeleteFunc(slices.Clone(fleetNodes), func(n string) bool { return n == node })
	kubectl(t, append([]string{"cordon"}, others...)...)
	defer kubectl(t, append([]string{"uncordon"}, others...)...)
	apply(t, ns, deployment(name, replicas, claimRequest))
	waitPods(t, ns, name, replicas, others...)
}

// waitPods waits until a Deployment has so many pods that are ready and not being deleted, and returns them. Pods on one of the nodes
// can be left out.
func waitPods(t *testing.T, ns, deployment string, want int, without ...string) []corev1.Pod {
	t.Helper()
	var ready []corev1.Pod
	eventually(t, fmt.Sprintf("%d pods of %s not on %v", want, deployment, without), func(ctx context.Context) (bool, string) {
		pods, err := client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + deployment})
		if err != nil {
			return false, err.Error()
		}
		ready = nil
		var seen []string
		for _, p := range pods.Items {
			isReady := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			})
			seen = append(seen, fmt.Sprintf("%s on %s: %s, ready %v, deleted %v, %s", p.Name, p.Spec.NodeName, p.Status.Phase, isReady,
				p.DeletionTimestamp != nil, strings.Join(events(ctx, ns, p.Name), " | ")))
			if isReady && p.DeletionTimestamp == nil && !slices.Contains(without, p.Spec.NodeName) {
				ready = append(ready, p)
			}
		}
		return len(ready) == want, strings.Join(seen, "\n")
	})
	return ready
}

// wantChoice fails the test unless a claim has this choice of its list, on this node.
func wantChoice(t *testing.T, ns, claimName, choice, node string) {
	t.Helper()
	c, err := client.ResourceV1().ResourceClaims(ns).Get(t.Context(), claimName, metav1.GetOptions{})
	if err != nil || c.Status.Allocation == nil {
		t.Fatalf("claim %s: %v, %+v", claimName, err, c)
	}
	if got := c.Status.Allocation.Devices.Results[0]; got.Request != "gpu/"+choice || got.Pool != node {
		t.Errorf("claim %s has %s of request %s on %s, want %s on %s", claimName, got.Device, got.Request, got.Pool, choice, node)
	}
}

// startOn starts a pod on a node and returns the UUID of its device.
func startOn(t *testing.T, ns, node, name string, r request) string {
	t.Helper()
	apply(t, ns, claim(name, r, "")+podOn(node, name, []container{{"main", listAndStay, []string{name}}}))
	waitRunning(t, ns, name)
	return lastUUID(t, waitLog(t, ns, name, "main", "UUID: "))
}

// lastUUID is that of a partition where a pod sees one, as the GPU is listed before its partitions.
func lastUUID(t *testing.T, listed string) string {
	t.Helper()
	found := append(gpuUUID.FindAllString(listed, -1), migUUID.FindAllString(listed, -1)...)
	if len(found) == 0 {
		t.Fatalf("no device is listed:\n%s", listed)
	}
	return found[len(found)-1]
}

// waitNodeGone waits until there is no Node object and nothing is published for it.
func waitNodeGone(t *testing.T, node string) {
	t.Helper()
	eventually(t, "node "+node+" and its slices to be gone", func(ctx context.Context) (bool, string) {
		_, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return false, fmt.Sprintf("the node: %v", err)
		}
		left, err := slicesOf(ctx, node)
		return err == nil && len(left) == 0, fmt.Sprintf("%d slices, %v", len(left), err)
	})
}
