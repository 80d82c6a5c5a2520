// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/admission"
)

// TestNamespaceLabels: with namespacePolicy, claims may ask for MPS, time-slicing and admin access
// only in namespaces with a label.
func TestNamespaceLabels(t *testing.T) {
	server := newAPIServer(t, "everything")
	cases := 0
	for _, c := range []use{
		{name: "a GPU", requests: list(named("r", gpuClass, ""))},
		{name: "MPS", requests: list(named("r", mpsClass, "")), want: "claims may ask for MPS only in namespaces with the label example.com/gpu=mps, which namespace unlabelled lacks"},
		{name: "MPS as an alternative", requests: list(firstOf("r", gpuClass, "shared.example.com")), want: "for MPS only"},
		{name: "MPS by configuration", requests: list(named("r", gpuClass, "")), configs: list(forRequests("GpuConfig", anyMPS)), want: "for MPS only"},
		{name: "time-slicing", requests: list(named("r", sliceClass, "")), want: "for time-slicing only in namespaces with the label example.com/time-slicing=true"},
		{name: "time-slicing as an alternative", requests: list(firstOf("r", gpuClass, sliceClass)), want: "for time-slicing only"},
		{name: "time-slicing by a class of the administrator", requests: list(named("r", "turns.example.com", "")), want: "for time-slicing only"},
		{name: "time-slicing by configuration", requests: list(named("r", gpuClass, "")), configs: list(forRequests("GpuConfig", short)), want: "for time-slicing only"},
		{name: "admin access", requests: list(named("r", "observer.partage.dev", "adminAccess: true")), want: "for admin access only in namespaces with the label example.com/observes="},
		{name: "no admin access", requests: list(named("r", gpuClass, "adminAccess: false"))},
		{name: "nothing"},
	} {
		for form, document := range c.documents(t) {
			for _, namespace := range []string{"restricted", "unlabelled"} {
				cases++
				want := c.want
				if namespace == "restricted" {
					want = ""
				}
				_, refused := server.create(t, namespace, document)
				if (refused != nil) != (want != "") || refused != nil && !strings.Contains(refused.Error(), want) {
					t.Errorf("%s, %s in %s: got %v, want %s", c.name, form, namespace, refused, want)
				}
			}
		}
	}
	if cases != 11*9*2 {
		t.Errorf("%d cases", cases)
	}
}

// TestWithoutProfile: with requestPolicy.withoutProfile, several partitions are of one profile.
func TestWithoutProfile(t *testing.T) {
	server := newAPIServer(t, "everything")
	const refused = "is for several partitions and names no profile"
	cases := 0
	for _, c := range []claim{
		{name: "one", requests: one("mig.nvidia.com", "")},
		{name: "one, counted", requests: one("mig.nvidia.com", "count: 1")},
		{name: "two", requests: one("mig.nvidia.com", "count: 2"), want: []string{"request r " + refused}},
		{name: "two of a size", requests: one("mig.nvidia.com", "count: 2, capacity: {requests: {memory: 18Gi}}"), want: []string{refused}},
		{name: "two of a profile", requests: one("mig.nvidia.com", "count: 2, "+selectProfile)},
		{name: "two of one profile", requests: one("mig.nvidia.com", "count: 2"), constraints: "[{matchAttribute: gpu.nvidia.com/profile}]"},
		{name: "two of one GPU", requests: one("mig.nvidia.com", "count: 2"), constraints: "[{matchAttribute: gpu.nvidia.com/parentUUID}]", want: []string{refused}},
		{name: "two of a class for a profile", requests: one("mig-1g.10gb.nvidia.com", "count: 2")},
		{name: "two GPUs", requests: one("gpu.nvidia.com", "count: 2")},
		{
			name: "an alternative", want: []string{"request r/b " + refused},
			requests: "[{name: r, firstAvailable: [{name: a, deviceClassName: gpu.nvidia.com}, {name: b, deviceClassName: mig.nvidia.com, count: 3}]}]",
		},
		{name: "for a resource name", by: scheduler, requests: one("mig.nvidia.com", "count: 2"), annotations: `{resource.kubernetes.io/extended-resource-claim: "true"}`},
		{name: "made from a template", requests: one("mig.nvidia.com", "count: 2"), annotations: "{resource.kubernetes.io/pod-claim-name: gpus}"},
	} {
		for form, document := range c.documents(t) {
			cases++
			_, err := server.ask(t, request{by: cmp.Or(c.by, somebody), operation: admission.Create, namespace: "restricted", object: mustDecode(t, document)})
			if (err != nil) != (len(c.want) > 0) || err != nil && !strings.Contains(err.Error(), c.want[0]) {
				t.Errorf("%s, %s: got %v, want %q", c.name, form, err, c.want)
			}
		}
	}
	if cases != 12*6 {
		t.Errorf("%d cases", cases)
	}
}

// TestPodsWithMPS: with mpsPodPolicy, pods that may run as root get no MPS, as far as their
// resources or the templates of their claims say so.
func TestPodsWithMPS(t *testing.T) {
	template := func(namespace, name string, u use) []byte {
		return []byte(fmt.Sprintf("apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {namespace: %s, name: %s}\nspec: {spec: {devices: {requests: [%s], config: [%s]}}}",
			namespace, name, strings.Join(u.requests, ", "), strings.Join(u.configs, ", ")))
	}
	shares, whole := use{requests: list(named("r", mpsClass, ""))}, use{requests: list(named("r", gpuClass, ""))}
	server := newAPIServer(t, "everything",
		mustDecode(t, template("team", "shares", shares)), mustDecode(t, template("team", "whole", whole)),
		mustDecode(t, template("team", "alternative", use{requests: list(firstOf("r", gpuClass, mpsClass))})),
		mustDecode(t, template("team", "configured", use{requests: list(named("r", gpuClass, "")), configs: list(forRequests("GpuConfig", anyMPS))})),
		// The name means something else in another namespace.
		mustDecode(t, template("default", "whole", shares)))
	const (
		noRoot = "securityContext: {runAsNonRoot: true}"
		number = "securityContext: {runAsUser: 1000}"
		root   = "securityContext: {runAsUser: 0}"
		never  = "securityContext: {allowPrivilegeEscalation: false}" // becomes root
	)
	and := func(context string) string {
		return strings.Replace(context, "}", ", allowPrivilegeEscalation: false}", 1)
	}
	resource := "resources: {limits: {nvidia.com/gpu.mps: 1}}"
	cases := 0
	for _, c := range []struct{ name, pod, container, template, want string }{
		{name: "a whole GPU", template: "whole"},
		{name: "no claim"},
		{name: "a claim that exists", template: "none"},
		{name: "a share", template: "shares", want: "containers that share a GPU through MPS may not run as root, and c may"},
		{name: "a share, perhaps", template: "alternative", want: "and c may"},
		{name: "MPS by configuration", template: "configured", want: "and c may"},
		{name: "a pod not as root", template: "shares", pod: noRoot, container: never},
		{name: "a pod as a user", template: "shares", pod: number, container: never},
		{name: "a container not as root", template: "shares", container: and(noRoot)},
		{name: "a container as a user", template: "shares", container: and(number)},
		{name: "a container as root", template: "shares", pod: noRoot, container: and(root), want: "and c may"},
		{name: "a container that says otherwise", template: "shares", pod: noRoot, container: and("securityContext: {runAsNonRoot: false}"), want: "and c may"},
		{name: "a container that can become root", template: "shares", pod: number, container: noRoot, want: "and c may: set securityContext.allowPrivilegeEscalation: false"},
		{name: "a pod as root", template: "shares", pod: root, want: "and c may"},
		{name: "by a resource", container: resource, want: "and c may"},
		{name: "by a resource, not as root", pod: noRoot, container: resource + ", " + never},
		{name: "by the resource of a class", container: "resources: {limits: {deviceclass.resource.kubernetes.io/mps.partage.dev: 1}}", want: "and c may"},
		{name: "by the resource of a class of the administrator", container: "resources: {limits: {deviceclass.resource.kubernetes.io/shared.example.com: 1}}", want: "and c may"},
		{name: "by the resource of another class", container: "resources: {limits: {deviceclass.resource.kubernetes.io/gpu.nvidia.com: 1}}"},
		{name: "another resource", container: "resources: {limits: {nvidia.com/gpu: 1}}"},
	} {
		for _, kind := range []string{"containers", "initContainers"} {
			cases++
			var more []string
			if c.pod != "" {
				more = append(more, c.pod)
			}
			if c.template != "" {
				more = append(more, fmt.Sprintf("resourceClaims: [{name: gpu, resourceClaimTemplateName: %s}]", c.template))
			}
			if kind == "initContainers" {
				more = append(more, "containers: [{name: d, image: i, "+and(number)+"}]")
			}
			container := "{name: c, image: i"
			if c.container != "" {
				container += ", " + c.container
			}
			document := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: team}\nspec: {%s: [%s}], %s}", kind, container, strings.Join(more, ", "))
			_, refused := server.ask(t, request{by: somebody, operation: admission.Create, namespace: "team", object: mustDecode(t, []byte(document))})
			if (refused != nil) != (c.want != "") || refused != nil && !strings.Contains(refused.Error(), c.want) {
				t.Errorf("%s, %s: got %v, want %s", c.name, kind, refused, c.want)
			}
		}
	}
	if cases != 40 {
		t.Errorf("%d cases", cases)
	}
}
