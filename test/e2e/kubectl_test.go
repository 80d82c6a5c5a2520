//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kubectlSuite is the suite of kubectl gpu, on nodes like those of suite fleet.
const kubectlSuite = "kubectl"

// What kubectl gpu ends with.
const (
	exitFine  = 0
	exitFound = 2
)

// site is where a puzzle is set up.
type site struct {
	ns string
	// gpus are those of the nodes, in the order of their PCI addresses. A puzzle has some for itself; the table of puzzles says which.
	hopper, ampere, mixed []simulatedGPU
}

// puzzle is a pod, p, that does not start, and what is said about it.
type puzzle struct {
	name string
	// setUp makes the pod, and what is wrong.
	setUp func(t *testing.T, s site)
	// waits until the pod is in the state that is to be explained. Without it, until the scheduler has said that it finds no node.
	waits func(t *testing.T, s site)
	// cause is the first that the explanation names.
	cause string
	// remedy is a part of what it says would help.
	remedy string
	// fix does that.
	fix func(t *testing.T, s site)
}

// explanation is the part of what kubectl gpu explain -o json prints that the tests use.
type explanation struct {
	Verdict string
	Reasons []struct{ Cause, Text string }
	// Suggestions are for pods that wait; what helps one that is stuck is with its cause.
	Suggestions []struct{ Kind, Text string }
	Stuck       []struct{ Kind, Text, Remedy string }
}

// cause returns the first cause.
func (e explanation) cause() string {
	switch {
	case len(e.Reasons) > 0:
		return e.Reasons[0].Cause
	case len(e.Stuck) > 0:
		return e.Stuck[0].Kind
	}
	return "none"
}

// remedies returns what would help, a line each. Some reasons say that already.
func (e explanation) remedies() string {
	var all []string
	for _, r := range e.Reasons {
		all = append(all, r.Text)
	}
	for _, s := range e.Suggestions {
		all = append(all, s.Kind+": "+s.Text)
	}
	for _, s := range e.Stuck {
		all = append(all, s.Remedy)
	}
	return strings.Join(all, "\n")
}

// solved counts the puzzles whose pods ran in the end.
type solved struct{ waiting, stuck atomic.Int32 }

// TestKubectl asks kubectl gpu about pods that do not start, as their owners would, and does what it says: then they run.
func TestKubectl(t *testing.T) {
	if suite != kubectlSuite {
		t.Skip("needs the nodes of suite " + kubectlSuite)
	}
	var s site
	s.hopper, s.ampere, s.mixed = gpusOf(t, hopperNode), gpusOf(t, ampereNode), gpusOf(t, mixedNode)
	for _, node := range fleetNodes {
		waitPool(t, node)
	}
	var count solved
	t.Run("puzzles", func(t *testing.T) {
		for _, p := range waitingPuzzles() {
			t.Run("waiting/"+p.name, func(t *testing.T) { t.Parallel(); p.solve(t, s, &count.waiting) })
		}
		for _, p := range stuckPuzzles() {
			t.Run("stuck/"+p.name, func(t *testing.T) { t.Parallel(); p.solve(t, s, &count.stuck) })
		}
		// On a node of their own, but one after the other, since each concerns all of it.
		t.Run("node", func(t *testing.T) {
			t.Parallel()
			for _, p := range waitingNodePuzzles() {
				t.Run("waiting/"+p.name, func(t *testing.T) { p.solve(t, s, &count.waiting) })
			}
		})
	})
	// What concerns the driver of all nodes.
	for _, p := range driverPuzzles() {
		t.Run("stuck/"+p.name, func(t *testing.T) { p.solve(t, s, &count.stuck) })
	}
	t.Logf("%d cases of pods that waited and run, %d of pods that were stuck and run", count.waiting.Load(), count.stuck.Load())
	if count.waiting.Load() < 15 || count.stuck.Load() < 10 {
		t.Error("want at least 15 and 10")
	}
}

// solve sets up a puzzle, asks why its pod does not start, does what would help, and waits until it runs.
func (p puzzle) solve(t *testing.T, s site, count *atomic.Int32) {
	s.ns = makeNamespace(t)
	t.Cleanup(func() { removeNamespace(t, s.ns) })
	p.setUp(t, s)
	if p.waits == nil {
		p.waits = waitUnschedulable
	}
	p.waits(t, s)
	// The events that the explanation is about may be about to arrive.
	eventually(t, fmt.Sprintf("the cause %s and the remedy %q", p.cause, p.remedy), func(context.Context) (bool, string) {
		code, out, errors := kubectlGPU(t, "explain", "pod/p", "-n", s.ns, "-o", "json")
		var e explanation
		if err := json.Unmarshal([]byte(out), &e); err != nil {
			return false, fmt.Sprintf("exit code %d: %v\n%s%s", code, err, out, errors)
		}
		return code == exitFound && e.cause() == p.cause && strings.Contains(e.remedies(), p.remedy),
			fmt.Sprintf("exit code %d, cause %s, remedies:\n%s\n%s%s", code, e.cause(), e.remedies(), out, errors)
	})
	_, out, errors := kubectlGPU(t, "explain", "pod/p", "-n", s.ns)
	t.Logf("kubectl gpu explain:\n%s%s", out, errors)
	p.fix(t, s)
	waitReady(t, s.ns, "p")
	if code, out, errors := kubectlGPU(t, "explain", "pod/p", "-n", s.ns); code != exitFine {
		t.Errorf("of the pod that runs kubectl gpu explain ends with %d:\n%s%s", code, out, errors)
	}
	count.Add(1)
}

// kubectlGPU runs the plugin as users do, through kubectl.
func kubectlGPU(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "kubectl", append([]string{"gpu"}, args...)...) // also at the end of a test
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("kubectl gpu %s: %v", strings.Join(args, " "), err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

func gpusOf(t *testing.T, node string) []simulatedGPU {
	t.Helper()
	machine, err := machineOf(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	return machine.GPUs
}

// waitUnschedulable waits until the scheduler has found no node for the pod.
func waitUnschedulable(t *testing.T, s site) {
	t.Helper()
	waitPod(t, s.ns, "unschedulable", func(p *corev1.Pod) bool {
		return condition(p, corev1.PodScheduled).Status == corev1.ConditionFalse
	})
}

// waitReady waits until a pod runs, whatever has happened to it before.
func waitReady(t *testing.T, ns, _ string) {
	t.Helper()
	waitPod(t, ns, "ready", func(p *corev1.Pod) bool {
		return p.DeletionTimestamp == nil && condition(p, corev1.PodReady).Status == corev1.ConditionTrue
	})
}

// waitPod waits for a state of pod p.
func waitPod(t *testing.T, ns, state string, is func(*corev1.Pod) bool) {
	t.Helper()
	eventually(t, "pod p "+state, func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, "p", metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		return is(p), fmt.Sprintf("phase %s; events: %s", p.Status.Phase, strings.Join(events(ctx, ns, "p"), " | "))
	})
}

// waitsFor returns a function that waits for an event of the pod.
func waitsFor(reason, part string) func(*testing.T, site) {
	return func(t *testing.T, s site) { t.Helper(); waitEvent(t, s.ns, "p", reason, part) }
}

// notPrepared waits until the kubelet was told why a claim of the pod cannot be prepared.
func notPrepared(part string) func(*testing.T, site) {
	return waitsFor("FailedPrepareDynamicResources", part)
}

// replace deletes pod p and its claim c, if it has one, and makes others.
func replace(t *testing.T, s site, manifest string) {
	t.Helper()
	kubectl(t, "delete", "pod/p", "resourceclaim/c", "-n", s.ns, "--ignore-not-found", "--timeout="+waitLimit.String())
	apply(t, s.ns, manifest)
}

// applies returns a function that applies a manifest.
func applies(manifest func(s site) string) func(*testing.T, site) {
	return func(t *testing.T, s site) { t.Helper(); apply(t, s.ns, manifest(s)) }
}

// replaces returns a function that makes the pod, and its claim, anew.
func replaces(manifest func(s site) string) func(*testing.T, site) {
	return func(t *testing.T, s site) { t.Helper(); replace(t, s, manifest(s)) }
}

// podFor returns claim c with a request, as YAML, and pod p that uses it.
func podFor(claimRequest string) string { return claimFor("c", claimRequest, "") + podUsing("p", "c") }

// exactly returns a request of a claim as YAML.
func exactly(r request) string { return fmt.Sprintf("{name: gpu, exactly: %s}", r) }

// tolerating is exactly for a device with any taint. Only a toleration that names the effect NoExecute keeps a pod from being evicted.
func tolerating(r request) string {
	return fmt.Sprintf("{name: gpu, exactly: {tolerations: [{operator: Exists}, {operator: Exists, effect: NoExecute}], %s}", strings.TrimPrefix(r.String(), "{"))
}

// simulate runs a command of the simulator on a GPU of a node, also while the test is cleaned up, and returns what it printed.
func simulate(t *testing.T, node string, gpu simulatedGPU, args ...string) string {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	machine, err := machineOf(ctx, node)
	if err != nil {
		t.Fatal(err)
	}
	index := slices.IndexFunc(machine.GPUs, func(g simulatedGPU) bool { return g.UUID == gpu.UUID })
	command := append([]string{"bin/gpusim"}, append(args, "--gpu", strconv.Itoa(index), "--root", machineRoot)...)
	out, err := onNode(ctx, node, command...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// fault lets calls about a GPU of a node go wrong until the test ends or the returned function is called.
func fault(t *testing.T, node string, gpu simulatedGPU, args ...string) (end func()) {
	t.Helper()
	id := simulate(t, node, gpu, append([]string{"fault", "add"}, args...)...)
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		if _, err := onNode(context.WithoutCancel(t.Context()), node, "bin/gpusim", "fault", "rm", "--root", machineRoot, id); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(end)
	return end
}

// waitNoPods waits until a DaemonSet of the driver has no pods.
func waitNoPods(t *testing.T, daemonSet string) {
	t.Helper()
	eventually(t, "no pods of "+daemonSet, func(ctx context.Context) (bool, string) {
		pods, err := client.CoreV1().Pods(driverNamespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		var left []string
		for _, p := range pods.Items {
			if strings.HasPrefix(p.Name, daemonSet+"-") {
				left = append(left, p.Name)
			}
		}
		return len(left) == 0, strings.Join(left, ", ")
	})
}
