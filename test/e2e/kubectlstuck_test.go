//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// makesInstance is the call with which a partition is made.
const makesInstance = "nvmlDeviceCreateGpuInstanceWithPlacement"

// stuckPuzzles are pods that have a node and do not start there, for one reason each.
func stuckPuzzles() []puzzle {
	return append(append(refusedClaims(), brokenGPUs()...), othersFaults()...)
}

// refusedClaims have what the driver cannot give.
func refusedClaims() []puzzle {
	return []puzzle{
		{
			name: "limit of no device",
			setUp: applies(func(s site) string {
				return claim("c", spare(s), limitOfNoDevice("MigDeviceConfig")) + podUsing("p", "c")
			}),
			waits: notPrepared("defaultPerDevicePinnedMemoryLimit"),
			cause: "InvalidConfiguration", remedy: "make the claim anew",
			fix: fixedBySpare,
		},
	}
}

// brokenGPUs do not do what they should. Their claims tolerate that, or it happens after the scheduler has chosen.
func brokenGPUs() []puzzle {
	var ends func()
	partition := func(index int) func(site) string {
		return func(s site) string { return podFor(tolerating(oneSlice.on(s.hopper[index]))) }
	}
	var hangs func()
	var daemon func()
	stranger := ""
	return []puzzle{
		{
			name: "GPU lost",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				gpu := s.hopper[brokenGPU]
				t.Cleanup(func() { simulate(t, hopperNode, gpu, "reset") })
				simulate(t, hopperNode, gpu, "gpu", "--failure", "lost")
				apply(t, s.ns, partition(brokenGPU)(s))
			},
			waits: notPrepared("lost"),
			cause: "GPUFailed", remedy: "to get another device",
			fix: fixedBySpare,
		},
		{
			name: "NVML fails",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				ends = fault(t, hopperNode, s.hopper[failingGPU], "--function", makesInstance, "--code", "UNKNOWN")
				apply(t, s.ns, partition(failingGPU)(s))
			},
			waits: notPrepared(""),
			cause: "NVMLFailed", remedy: "kernel log of the node",
			fix: func(*testing.T, site) { ends() },
		},
		{
			name: "NVML hangs",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				hangs = fault(t, hopperNode, s.hopper[hangingGPU], "--function", makesInstance, "--hang")
				apply(t, s.ns, partition(hangingGPU)(s))
			},
			waits: notPrepared(""),
			cause: "GPUUnresponsive", remedy: "drain the node and restart it",
			fix: func(*testing.T, site) { hangs() },
		},
		{
			name: "GPU used by a program of the node",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				gpu := s.hopper[strangersGPU]
				stranger = simulate(t, hopperNode, gpu, "proc", "add", "--name", "trainer")
				apply(t, s.ns, partition(strangersGPU)(s))
			},
			waits: notPrepared("held by process"),
			cause: "DeviceInUse", remedy: "end it",
			fix: func(t *testing.T, _ site) {
				t.Helper()
				if _, err := onNode(t.Context(), hopperNode, "bin/gpusim", "proc", "rm", "--root", machineRoot, "--pid", stranger); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "MPS does not start",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				daemon = fault(t, mixedNode, s.mixed[rtxGPU], "--function", "mps_control_start", "--effect", "fail")
				apply(t, s.ns, podFor(exactly(mpsShare("4Gi", 10).on(s.mixed[rtxGPU]))))
			},
			waits: notPrepared(""),
			cause: "MPSNotStarted", remedy: "read the log of MPS on the node",
			fix: func(*testing.T, site) { daemon() },
		},
	}
}

// othersFaults have nothing to do with GPUs, which the explanation has to say.
func othersFaults() []puzzle {
	with := func(replacements ...string) func(*testing.T, site) {
		return applies(func(s site) string {
			return claim("c", spare(s), "") + strings.NewReplacer(replacements...).Replace(podUsing("p", "c"))
		})
	}
	return []puzzle{
		{
			name:  "image missing",
			setUp: with(demoImage, "partage.invalid/dmeo:dev"),
			waits: waitsFor("ErrImageNeverPull", ""),
			cause: "ImagePull", remedy: "correct the name",
			fix: func(t *testing.T, s site) {
				t.Helper()
				kubectl(t, "set", "image", "pod/p", "main="+demoImage, "-n", s.ns)
			},
		},
		{
			name: "secret missing",
			setUp: with("spec:\n", "spec:\n  volumes: [{name: token, secret: {secretName: token}}]\n",
				"resources: {", "volumeMounts: [{name: token, mountPath: /token}], resources: {"),
			waits: waitsFor("FailedMount", "token"),
			cause: "Volume", remedy: "create the object that is named",
			fix: func(t *testing.T, s site) {
				t.Helper()
				kubectl(t, "create", "secret", "generic", "token", "--from-literal=a=b", "-n", s.ns)
			},
		},
		{
			name:  "config map missing",
			setUp: with("resources: {", "envFrom: [{configMapRef: {name: settings}}], resources: {"),
			waits: waitsFor("Failed", "settings"),
			cause: "ContainerConfiguration", remedy: "create the ConfigMap",
			fix: func(t *testing.T, s site) {
				t.Helper()
				kubectl(t, "create", "configmap", "settings", "--from-literal=a=b", "-n", s.ns)
			},
		},
	}
}

// driverPuzzles take away a part of the driver on all nodes.
func driverPuzzles() []puzzle {
	select1 := func(daemonSet, selector string) func(*testing.T) {
		return func(t *testing.T) {
			t.Helper()
			kubectl(t, "patch", "daemonset", daemonSet, "-n", driverNamespace, "--type=merge",
				"-p", fmt.Sprintf(`{"spec": {"template": {"spec": {"nodeSelector": %s}}}}`, selector))
		}
	}
	const nowhere = `{"example.com/nowhere": "true"}`
	var puzzles []puzzle
	for _, part := range []struct {
		name, daemonSet, says, cause string
		r                            func(s site) request
	}{
		{"no plugin on the node", "partage-gpu-kubelet-plugin", "", "DriverPodAbsent", spare},
		{"no MPS supervisor on the node", "partage-mps-supervisor", "supervisor", "MPSUnavailable", func(s site) request { return mpsShare("4Gi", 10).on(s.mixed[t4GPU]) }},
	} {
		away, back := select1(part.daemonSet, nowhere), select1(part.daemonSet, "null")
		puzzles = append(puzzles, puzzle{
			name: part.name,
			setUp: func(t *testing.T, s site) {
				t.Helper()
				t.Cleanup(func() { back(t) })
				away(t)
				waitNoPods(t, part.daemonSet)
				apply(t, s.ns, podFor(tolerating(part.r(s))))
			},
			waits: notPrepared(part.says),
			cause: part.cause, remedy: "label app.kubernetes.io/component=",
			fix: func(t *testing.T, _ site) { t.Helper(); back(t) },
		})
	}
	return puzzles
}
