//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"strings"
)

// request is the device request of a claim.
type request struct {
	class     string
	selectors []string // CEL expressions
	capacity  string   // requested capacity, as YAML
	count     int      // 0 means one device
}

var (
	wholeGPU = request{class: "gpu.nvidia.com"}
	oneSlice = request{class: "mig.nvidia.com"}.where("device.attributes['gpu.nvidia.com'].profile == '1g.10gb'")
	noSuch   = request{class: "mig.nvidia.com"}.where("device.attributes['gpu.nvidia.com'].profile == '9g.999gb'")
)

// mpsShare requests an MPS share with these limits.
func mpsShare(memory string, percent int) request {
	return request{class: "mps.partage.dev", capacity: fmt.Sprintf("{memory: %s, smPercent: %d}", memory, percent)}
}

// where returns the request with one more selector.
func (r request) where(expression string) request {
	r.selectors = append(slices.Clone(r.selectors), expression)
	return r
}

// of returns the request narrowed to devices of GPUs of a product.
func (r request) of(product string) request {
	return r.where(fmt.Sprintf("device.attributes['gpu.nvidia.com'].productName == '%s'", product))
}

// times returns the request for so many devices.
func (r request) times(count int) request {
	r.count = count
	return r
}

// on returns the request narrowed to devices of these GPUs.
func (r request) on(gpus ...simulatedGPU) request {
	uuids := make([]string, len(gpus))
	for i, g := range gpus {
		uuids[i] = "'" + g.UUID + "'"
	}
	return r.where(fmt.Sprintf("device.attributes['gpu.nvidia.com'].parentUUID in [%s]", strings.Join(uuids, ", ")))
}

// String returns the request as YAML.
func (r request) String() string {
	fields := []string{"deviceClassName: " + r.class}
	if r.count > 0 {
		fields = append(fields, fmt.Sprintf("count: %d", r.count))
	}
	if len(r.selectors) > 0 {
		var selectors []string
		for _, expression := range r.selectors {
			selectors = append(selectors, fmt.Sprintf("{cel: {expression: %q}}", expression))
		}
		fields = append(fields, fmt.Sprintf("selectors: [%s]", strings.Join(selectors, ", ")))
	}
	if r.capacity != "" {
		fields = append(fields, fmt.Sprintf("capacity: {requests: %s}", r.capacity))
	}
	return "{" + strings.Join(fields, ", ") + "}"
}

// claim returns the manifest of a ResourceClaim; config is the claim's config as YAML, or empty.
func claim(name string, r request, config string) string {
	return claimFor(name, fmt.Sprintf("{name: gpu, exactly: %s}", r), config)
}

// claimFor is claim with the request as YAML.
func claimFor(name, claimRequest, config string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s}
spec:
  devices:
    requests: [%s]
    %s
---`, name, claimRequest, config)
}

// limitOfNoDevice returns a claim's config that is right in itself, and not for a claim with one device.
func limitOfNoDevice(kind string) string {
	return opaqueConfig(kind, `sharing: {strategy: MPS, mpsConfig: {defaultPerDevicePinnedMemoryLimit: {"7": 1Gi}}}`)
}

// opaqueConfig returns a claim's config with an opaque configuration of this driver.
func opaqueConfig(kind, parameters string) string {
	return fmt.Sprintf(`config: [{requests: [gpu], opaque: {driver: %s, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: %s, %s}}}]`,
		driverName, kind, parameters)
}

// mpsConfig returns a claim's config that asks for MPS with these limits.
func mpsConfig(kind, limits string) string {
	return opaqueConfig(kind, fmt.Sprintf("sharing: {strategy: MPS, mpsConfig: {%s}}", limits))
}

// listAndStay prints the devices of a container and then waits for SIGTERM.
const listAndStay = `nvidia-smi -L; trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done`

// podUsing returns a pod that prints the devices it has and then stays.
func podUsing(name, claimName string) string { return podRunning(name, listAndStay, claimName) }

// podRunning returns a pod that runs a shell command, which must not contain single quotes.
func podRunning(name, command, claimName string) string {
	return pod(name, []container{{"main", command, []string{claimName}}})
}

// container is a container of a test's pod: it runs a shell command and uses some of the pod's claims.
type container struct {
	name, command string
	claims        []string
}

// pod returns the manifest of a pod whose containers use claims.
func pod(name string, containers []container) string { return podOn("", name, containers) }

// podOn returns the manifest of a pod for a node; without a node, the scheduler chooses. The grace period is not zero, because a pod
// without one vanishes from the API before the kubelet has unprepared its claims.
func podOn(node, name string, containers []container) string {
	var lines, claims []string
	for _, c := range containers {
		var used []string
		for _, claimName := range c.claims {
			used = append(used, fmt.Sprintf("{name: %s}", claimName))
			if of := fmt.Sprintf("{name: %[1]s, resourceClaimName: %[1]s}", claimName); !slices.Contains(claims, of) {
				claims = append(claims, of)
			}
		}
		lines = append(lines, fmt.Sprintf("  - {name: %s, image: %s, imagePullPolicy: Never, command: [sh, -c, '%s'], resources: {claims: [%s]}}",
			c.name, demoImage, c.command, strings.Join(used, ", ")))
	}
	selector := ""
	if node != "" {
		selector = "kubernetes.io/hostname: " + node
	}
	return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {%s}
  containers:
%s
  resourceClaims: [%s]
---`, name, selector, strings.Join(lines, "\n"), strings.Join(claims, ", "))
}

// anyOf returns the request of a claim for the first of these that can be had, as YAML. Their names are choice-0, choice-1 and so on.
func anyOf(choices ...request) string {
	var list []string
	for i, r := range choices {
		list = append(list, fmt.Sprintf("{name: choice-%d, %s", i, strings.TrimPrefix(r.String(), "{")))
	}
	return fmt.Sprintf("{name: gpu, firstAvailable: [%s]}", strings.Join(list, ", "))
}

// deployment returns the manifest of a Deployment whose pods list their devices and stay, and have a claim of their own each. Its pods
// leave a lost node at once.
func deployment(name string, replicas int, claimRequest string) string {
	return deploymentRunning(name, replicas, listAndStay, 1, claimRequest)
}

// deploymentRunning is deployment with a command and a grace period in seconds.
func deploymentRunning(name string, replicas int, command string, grace int, claimRequest string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %[1]s}
spec: {spec: {devices: {requests: [%[3]s]}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: %[6]d
      tolerations:
      - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 0}
      - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 0}
      containers:
      - {name: main, image: %[4]s, imagePullPolicy: Never, command: [sh, -c, '%[5]s'], resources: {claims: [{name: gpu}]}}
      resourceClaims: [{name: gpu, resourceClaimTemplateName: %[1]s}]
---`, name, replicas, claimRequest, demoImage, command, grace)
}
