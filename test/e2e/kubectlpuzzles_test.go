//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// Which GPUs the puzzles have for themselves, by index of their node. What all others get comes from the spare one.
const (
	occupiedGPU = iota // of the node of Hopper
	taintedGPU
	failingGPU
	hangingGPU
	brokenGPU
	strangersGPU
	sharedGPU
	spareGPU
)

const (
	a30GPU = 2 // of the mixed node
	t4GPU  = 4
	rtxGPU = 5
)

const (
	a100Large = "NVIDIA A100-SXM4-80GB" // on the mixed node
	profile   = "device.attributes['gpu.nvidia.com'].profile == "
)

// spare returns a request for a partition that is there for all.
func spare(s site) request { return oneSlice.on(s.hopper[spareGPU]) }

// fixedBySpare makes the pod anew with a partition that there is.
func fixedBySpare(t *testing.T, s site) { t.Helper(); replace(t, s, podFor(exactly(spare(s)))) }

// waitingPuzzles are pods that wait for one reason each.
func waitingPuzzles() []puzzle {
	return append(append(wrongRequests(), wrongReferences()...), takenDevices()...)
}

// wrongRequests ask for what no node has.
func wrongRequests() []puzzle {
	mig := request{class: "mig.nvidia.com"}
	wants := func(r request) func(*testing.T, site) {
		return applies(func(site) string { return podFor(exactly(r)) })
	}
	return []puzzle{
		{
			name:  "partition too large",
			setUp: wants(mig.where("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('200Gi')) >= 0")),
			cause: "NoDeviceSelected", remedy: "in place of 200Gi",
			fix: fixedBySpare,
		},
		{
			name:  "profile misspelt",
			setUp: wants(mig.where(profile + "'1g.10g'")),
			cause: "NoDeviceSelected", remedy: "with profile 1g.10gb in place of 1g.10g",
			fix: fixedBySpare,
		},
		{
			name:  "share over the limit",
			setUp: applies(func(s site) string { return podFor(exactly(mpsShare("100Gi", 10).on(s.mixed[a30GPU]))) }),
			cause: "CapacityTooLarge", remedy: "in place of 100Gi",
			fix: replaces(func(s site) string { return podFor(exactly(mpsShare("4Gi", 10).on(s.mixed[a30GPU]))) }),
		},
		{
			name:  "capacity out of range",
			setUp: applies(func(s site) string { return podFor(exactly(mpsShare("4Gi", 250).on(s.mixed[a30GPU]))) }),
			cause: "CapacityTooLarge", remedy: "with smPercent 100 in place of 250",
			fix: replaces(func(s site) string { return podFor(exactly(mpsShare("4Gi", 25).on(s.mixed[a30GPU]))) }),
		},
		{
			name:  "CEL expression that fails",
			setUp: wants(mig.where("device.attributes['gpu.nvidia.com'].memorySize == '10Gi'")),
			cause: "SelectorError", remedy: "without selector 0: device.attributes['gpu.nvidia.com'].memorySize",
			fix: fixedBySpare,
		},
		{
			name: "no alternative",
			setUp: applies(func(site) string {
				return podFor(anyOf(mig.where(profile+"'9g.90gb'"), mig.where(profile+"'8g.80gb'")))
			}),
			cause: "NoDeviceSelected", remedy: "with profile 1g.10gb in place of 8g.80gb",
			fix: replaces(func(s site) string { return podFor(anyOf(mig.where(profile+"'9g.90gb'"), spare(s))) }),
		},
		{
			name:  "constraint",
			setUp: applies(func(site) string { return podOfTwo("constraints: [{matchAttribute: gpu.nvidia.com/productName}]") }),
			cause: "NotTogether", remedy: "without the constraint on gpu.nvidia.com/productName",
			fix: replaces(func(site) string { return podOfTwo("") }),
		},
		{
			name: "devices of two nodes",
			setUp: applies(func(s site) string {
				return claim("c", spare(s), "") + claim("other", wholeGPU.of(a100Large), "") + pod("p", []container{{"main", listAndStay, []string{"c", "other"}}})
			}),
			cause: "NotTogether", remedy: "without selector 1",
			fix: func(t *testing.T, s site) {
				t.Helper()
				kubectl(t, "delete", "pod/p", "resourceclaim/c", "-n", s.ns)
				apply(t, s.ns, claim("c", oneSlice, "")+pod("p", []container{{"main", listAndStay, []string{"c", "other"}}}))
			},
		},
	}
}

// podOfTwo returns a pod with an L4 and a T4 in one claim; constraints are the claim's, as YAML.
func podOfTwo(constraints string) string {
	requests := fmt.Sprintf("{name: a, exactly: %s}, {name: b, exactly: %s}", wholeGPU.of(l4), wholeGPU.of(teslaT))
	return claimFor("c", requests, constraints) + podUsing("p", "c")
}

// wrongReferences name what does not exist, or must not be had.
func wrongReferences() []puzzle {
	return []puzzle{
		{
			name: "class missing",
			setUp: applies(func(s site) string {
				r := spare(s)
				r.class = "mig.nvidia.con"
				return podFor(exactly(r))
			}),
			cause: "ClassMissing", remedy: "with deviceClassName mig.nvidia.com",
			fix: fixedBySpare,
		},
		{
			name: "class of another driver",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				t.Cleanup(func() { kubectl(t, "delete", "deviceclass/"+s.ns, "--ignore-not-found") })
				apply(t, s.ns, fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: %s}
spec: {selectors: [{cel: {expression: "device.driver == 'fpga.example.com'"}}]}
---`, s.ns)+podFor(exactly(request{class: s.ns})))
			},
			cause: "NoDeviceOfClass", remedy: "devices is of class e2e-",
			fix: fixedBySpare,
		},
		{
			// The scheduler does not even look at the pod, and says so nowhere.
			name:  "claim missing",
			setUp: applies(func(site) string { return podUsing("p", "c") }),
			waits: func(*testing.T, site) {},
			cause: "ClaimMissing", remedy: "with a claim c",
			fix: applies(func(s site) string { return claim("c", spare(s), "") }),
		},
		{
			name:  "template missing",
			setUp: applies(func(site) string { return podOfTemplate("c") }),
			waits: waitsFor("FailedResourceClaimCreation", ""),
			cause: "TemplateMissing", remedy: "with a claim template c",
			fix: applies(func(s site) string { return template("c", exactly(spare(s))) }),
		},
		{
			name: "admin access without the namespace's label",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				kubectl(t, "label", "namespace", s.ns, adminLabel)
				apply(t, s.ns, template("c", observer(s)))
				kubectl(t, "label", "namespace", s.ns, strings.Split(adminLabel, "=")[0]+"-")
				apply(t, s.ns, podOfTemplate("c"))
			},
			waits: waitsFor("FailedResourceClaimCreation", ""),
			cause: "AdminAccessForbidden", remedy: "kubectl label namespace",
			fix: func(t *testing.T, s site) { t.Helper(); kubectl(t, "label", "namespace", s.ns, adminLabel) },
		},
		{
			name: "node selector",
			setUp: applies(func(s site) string {
				return claim("c", spare(s), "") + podOn(ampereNode, "p", []container{{"main", listAndStay, []string{"c"}}})
			}),
			cause: "NodeExcluded", remedy: "with a nodeSelector that node n1 has",
			fix: fixedBySpare,
		},
		{
			name: "scheduling gate",
			setUp: applies(func(s site) string {
				return claim("c", spare(s), "") + strings.Replace(podUsing("p", "c"), "spec:\n", "spec:\n  schedulingGates: [{name: example.com/wait}]\n", 1)
			}),
			cause: "SchedulingGated", remedy: "scheduling gates have been removed by what set them: example.com/wait",
			fix: func(t *testing.T, s site) {
				t.Helper()
				kubectl(t, "patch", "pod/p", "-n", s.ns, "--type=json", `-p=[{"op": "remove", "path": "/spec/schedulingGates"}]`)
			},
		},
		{
			name: "too many processors",
			setUp: applies(func(s site) string {
				return claim("c", spare(s), "") + strings.Replace(podUsing("p", "c"), "resources: {", "resources: {requests: {cpu: 1000}, ", 1)
			}),
			cause: "NodeExcluded", remedy: "with less CPU",
			fix: fixedBySpare,
		},
	}
}

const adminLabel = "resource.kubernetes.io/admin-access=true"

// observer returns a request, as YAML, for a look at a GPU, whatever others have of it.
func observer(s site) string {
	r := request{class: "observer.partage.dev"}.on(s.hopper[spareGPU])
	return fmt.Sprintf("{name: gpu, exactly: {adminAccess: true, tolerations: [{key: gpu.nvidia.com/admin-access, operator: Exists}], %s}",
		strings.TrimPrefix(r.String(), "{"))
}

// takenDevices are there, and somebody or something is in the way.
func takenDevices() []puzzle {
	return []puzzle{
		{
			name: "occupied",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				gpu := wholeGPU.on(s.hopper[occupiedGPU])
				apply(t, s.ns, claim("taken", gpu, "")+podUsing("holder", "taken"))
				waitRunning(t, s.ns, "holder")
				apply(t, s.ns, podFor(exactly(gpu)))
			},
			cause: "DeviceHeld", remedy: "/taken ends",
			fix: func(t *testing.T, s site) { t.Helper(); kubectl(t, "delete", "pod/holder", "-n", s.ns) },
		},
		{
			name: "shared",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				apply(t, s.ns, claim("taken", mpsShare("10Gi", 25).on(s.hopper[sharedGPU]), "")+podUsing("holder", "taken"))
				waitRunning(t, s.ns, "holder")
				apply(t, s.ns, podFor(exactly(oneSlice.on(s.hopper[sharedGPU]))))
			},
			cause: "PartOfGPUHeld", remedy: "/taken ends",
			fix: func(t *testing.T, s site) { t.Helper(); kubectl(t, "delete", "pod/holder", "-n", s.ns) },
		},
		{
			name: "claim used on another node",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				apply(t, s.ns, claim("c", spare(s), "")+podUsing("holder", "c"))
				waitRunning(t, s.ns, "holder")
				apply(t, s.ns, podOn(mixedNode, "p", []container{{"main", listAndStay, []string{"c"}}}))
			},
			cause: "NodeExcluded", remedy: "with a nodeSelector that node n1 has",
			fix: func(t *testing.T, s site) {
				t.Helper()
				kubectl(t, "delete", "pod/p", "-n", s.ns)
				apply(t, s.ns, podUsing("p", "c"))
			},
		},
		{
			name: "device taint",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				t.Cleanup(func() { kubectl(t, "delete", "devicetaintrule/"+s.ns, "--ignore-not-found") })
				apply(t, s.ns, taintRule(s.ns, s.hopper[taintedGPU]))
				apply(t, s.ns, podFor(exactly(wholeGPU.on(s.hopper[taintedGPU]))))
			},
			cause: "DevicesTainted", remedy: "with a toleration of the device taint example.com/maintenance=fan:NoSchedule",
			fix: replaces(func(s site) string {
				return podFor(fmt.Sprintf("{name: gpu, exactly: {tolerations: [{key: example.com/maintenance, operator: Exists, effect: NoSchedule}], %s}",
					strings.TrimPrefix(wholeGPU.on(s.hopper[taintedGPU]).String(), "{")))
			}),
		},
	}
}

// waitingNodePuzzles want what a whole node of Ampere has.
func waitingNodePuzzles() []puzzle {
	gpu := wholeGPU.of(a100)
	extended := func(count int) string {
		return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %s}
  containers:
  - {name: main, image: %s, imagePullPolicy: Never, command: [sh, -c, '%s'], resources: {limits: {nvidia.com/gpu: %d}}}
---`, ampereNode, demoImage, listAndStay, count)
	}
	return []puzzle{
		{
			name:  "nine GPUs of eight",
			setUp: applies(func(site) string { return podFor(exactly(gpu.times(9))) }),
			cause: "TooFewDevices", remedy: "with count 8 in place of 9",
			fix: replaces(func(site) string { return podFor(exactly(gpu.times(8))) }),
		},
		{
			name:  "extended resource",
			setUp: applies(func(site) string { return extended(9) }),
			cause: "TooFewDevices", remedy: "no node has more than 8",
			fix: replaces(func(site) string { return extended(1) }),
		},
		{
			name: "node cordoned",
			setUp: func(t *testing.T, s site) {
				t.Helper()
				t.Cleanup(func() { kubectl(t, "uncordon", ampereNode) })
				kubectl(t, "cordon", ampereNode)
				apply(t, s.ns, podFor(exactly(gpu)))
			},
			cause: "NodeExcluded", remedy: "after kubectl uncordon n2",
			fix: func(t *testing.T, _ site) { t.Helper(); kubectl(t, "uncordon", ampereNode) },
		},
	}
}

// template returns the manifest of a ResourceClaimTemplate with a request, as YAML.
func template(name, claimRequest string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %s}
spec: {spec: {devices: {requests: [%s]}}}
---`, name, claimRequest)
}

// podOfTemplate returns pod p with a claim of a template.
func podOfTemplate(name string) string {
	return strings.ReplaceAll(podUsing("p", name), "resourceClaimName: ", "resourceClaimTemplateName: ")
}

// taintRule returns the manifest of a rule with which an administrator takes a GPU of the node of Hopper out of use.
func taintRule(name string, gpu simulatedGPU) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata: {name: %s}
spec:
  deviceSelector: {driver: %s, pool: %s, device: %s}
  taint: {key: example.com/maintenance, value: fan, effect: NoSchedule}
---`, name, driverName, hopperNode, gpu.deviceName())
}
