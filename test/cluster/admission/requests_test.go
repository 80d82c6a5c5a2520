// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

// What the warnings and refusals of the rules have in common.
const (
	ofAnyProfile  = "for more than 4 partitions of any profile"
	allOfAny      = "for all partitions (allocationMode: All)"
	tooMany       = "for more than 12 devices"
	manyRequests  = "more than 5 requests are for class"
	allDevices    = "for all devices of a class (allocationMode: All)"
	selectProfile = `selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'"}}]`
	selectMemory  = `selectors: [{cel: {expression: "device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('10Gi'))"}}]`
)

// claim is what a claim asks for, and what is said about it.
type claim struct {
	name string
	// requests and constraints are those of the claim, in YAML; it may have neither.
	requests, constraints string
	// annotations are those of the object.
	annotations string
	// by is who writes it; nil: somebody.
	by *user.DefaultInfo
	// want are parts of the warnings, or of the refusal.
	want []string
}

// one is a request for devices of a class.
func one(class, more string) string { return "[" + named("r", class, more) + "]" }

func named(name, class, more string) string {
	return fmt.Sprintf("{name: %s, exactly: {deviceClassName: %s, %s}}", name, class, more)
}

// many are so many requests for devices of a class.
func many(n int, class string) string {
	var all []string
	for i := range n {
		all = append(all, named(fmt.Sprint("r", i), class, selectProfile))
	}
	return "[" + strings.Join(all, ", ") + "]"
}

// slowRequests are the rule of docs/how-to/slow-requests.md for tools that check manifests.
var slowRequests = []claim{
	{name: "one partition", requests: one("mig.nvidia.com", "")},
	{name: "four partitions", requests: one("mig.nvidia.com", "count: 4")},
	{name: "five partitions", requests: one("mig.nvidia.com", "count: 5"), want: []string{"request r is " + ofAnyProfile}},
	{name: "five of a size", requests: one("mig.nvidia.com", "count: 5, "+selectMemory), want: []string{"request r is " + ofAnyProfile}},
	{name: "five of a profile", requests: one("mig.nvidia.com", "count: 5, "+selectProfile)},
	{
		name: "five of a size and a profile", requests: one("mig.nvidia.com",
			"count: 5, "+strings.TrimSuffix(selectMemory, "]")+", "+strings.TrimPrefix(selectProfile, "selectors: [")),
	},
	{name: "twelve of a profile", requests: one("mig.nvidia.com", "count: 12, "+selectProfile)},
	{name: "thirteen of a profile", requests: one("mig.nvidia.com", "count: 13, "+selectProfile), want: []string{"request r is " + tooMany}},
	{name: "thirteen of any", requests: one("mig.nvidia.com", "count: 13"), want: []string{ofAnyProfile, tooMany}},
	{
		name: "seven of one GPU", requests: one("mig.nvidia.com", "count: 7"), constraints: "[{matchAttribute: gpu.nvidia.com/parentUUID}]",
		want: []string{ofAnyProfile},
	},
	{name: "seven of one profile", requests: one("mig.nvidia.com", "count: 7"), constraints: "[{matchAttribute: gpu.nvidia.com/profile}]"},
	{
		name: "seven of one profile, by name", requests: one("mig.nvidia.com", "count: 7"),
		constraints: "[{requests: [r], matchAttribute: gpu.nvidia.com/profile}]",
	},
	{
		name: "others of one profile", requests: "[" + named("r", "mig.nvidia.com", "count: 7") + ", " + named("other", "mig.nvidia.com", "count: 2") + "]",
		constraints: "[{requests: [other], matchAttribute: gpu.nvidia.com/profile}]", want: []string{"request r is " + ofAnyProfile},
	},
	{name: "all partitions", requests: one("mig.nvidia.com", "allocationMode: All"), want: []string{"request r is " + allOfAny}},
	{name: "all of a profile", requests: one("mig.nvidia.com", "allocationMode: All, "+selectProfile)},
	{name: "twelve whole GPUs", requests: one("gpu.nvidia.com", "count: 12")},
	{name: "thirteen whole GPUs", requests: one("gpu.nvidia.com", "count: 13"), want: []string{tooMany}},
	{name: "all whole GPUs", requests: one("gpu.nvidia.com", "allocationMode: All")},
	{name: "thirteen shares", requests: one("mps.partage.dev", "count: 13"), want: []string{tooMany}},
	{name: "thirteen time slices", requests: one("timeslice.partage.dev", "count: 13"), want: []string{tooMany}},
	{name: "all observers", requests: one("observer.partage.dev", "allocationMode: All, adminAccess: true")},
	{name: "five requests", requests: many(5, "mig.nvidia.com")},
	{name: "six requests", requests: many(6, "mig.nvidia.com"), want: []string{manyRequests + " mig.nvidia.com"}},
	{
		name: "six requests for two classes", requests: strings.TrimSuffix(many(5, "mig.nvidia.com"), "]") + ", " + named("gpu", "gpu.nvidia.com", "") + "]",
	},
	{name: "thirty of another driver", requests: one("tpu.example.com", "count: 30")},
	{name: "all of another driver", requests: one("tpu.example.com", "allocationMode: All")},
	{name: "six requests to another driver", requests: many(6, "tpu.example.com")},
	{name: "a class that only looks like ours", requests: one("xmig.nvidia.com", "count: 30")},
	{
		name: "the second choice", requests: "[{name: r, firstAvailable: [{name: a, deviceClassName: gpu.nvidia.com}, {name: b, deviceClassName: mig.nvidia.com, count: 7}]}]",
		want: []string{"request r/b is " + ofAnyProfile},
	},
	{
		name: "every choice", requests: "[{name: r, firstAvailable: [{name: a, deviceClassName: gpu.nvidia.com, count: 16}, {name: b, deviceClassName: mig.nvidia.com, count: 14, " +
			selectProfile + "}]}, " + named("s", "mps.partage.dev", "count: 20") + "]",
		want: []string{"request r/a, r/b, s is " + tooMany},
	},
	{
		name: "no bad choice", requests: "[{name: r, firstAvailable: [{name: a, deviceClassName: gpu.nvidia.com}, {name: b, deviceClassName: tpu.example.com, count: 30}]}]",
	},
	{
		name: "choices of one profile", requests: "[{name: r, firstAvailable: [{name: a, deviceClassName: mig.nvidia.com, count: 5}, " +
			"{name: b, deviceClassName: mig.nvidia.com, count: 7}]}]",
		constraints: "[{requests: [r/a], matchAttribute: gpu.nvidia.com/profile}]", want: []string{"request r/b is " + ofAnyProfile},
	},
	{name: "made from a template", requests: one("mig.nvidia.com", "count: 16"), annotations: "{resource.kubernetes.io/pod-claim-name: gpus}"},
	{name: "for a resource name", by: scheduler, requests: one("mig.nvidia.com", "count: 16"), annotations: `{resource.kubernetes.io/extended-resource-claim: "true"}`},
	{
		name: "said to be for a resource name", requests: one("mig.nvidia.com", "count: 16"), annotations: `{resource.kubernetes.io/extended-resource-claim: "true"}`,
		want: []string{ofAnyProfile, tooMany},
	},
	{name: "with another annotation", requests: one("mig.nvidia.com", "count: 16"), annotations: "{a: b}", want: []string{ofAnyProfile, tooMany}},
	{name: "nothing", requests: "[]"},
	{name: "no requests"},
}

// documents are the claim and the template, in every version of the API.
func (r *claim) documents(t *testing.T) map[string][]byte {
	t.Helper()
	devices := "{"
	if r.requests != "" {
		devices += "requests: " + r.requests
	}
	if r.constraints != "" {
		devices += ", constraints: " + r.constraints
	}
	devices += "}"
	annotations := r.annotations
	if annotations == "" {
		annotations = "{}"
	}
	all := map[string][]byte{}
	for kind, spec := range map[string]string{"ResourceClaim": "{devices: %s}", "ResourceClaimTemplate": "{spec: {devices: %s}}"} {
		document := []byte(fmt.Sprintf("apiVersion: resource.k8s.io/v1\nkind: %s\nmetadata: {name: example, annotations: %s}\nspec: "+spec,
			kind, annotations, devices))
		all[kind+" v1"] = document
		for _, version := range []string{"v1beta1", "v1beta2"} {
			all[kind+" "+version] = in(t, version, mustDecode(t, document))
		}
	}
	return all
}

// contains reports whether there is one text for each part, in their order.
func contains(texts, parts []string) bool {
	for i, text := range texts {
		if i < len(parts) && !strings.Contains(text, parts[i]) {
			return false
		}
	}
	return len(texts) == len(parts)
}

// TestSlowRequests: who writes a slow request hears what to write instead, and it is taken.
func TestSlowRequests(t *testing.T) {
	server := newAPIServer(t, "defaults")
	cases := 0
	for _, r := range slowRequests {
		for form, document := range r.documents(t) {
			cases++
			warnings, refused := server.ask(t, request{by: cmp.Or(r.by, somebody), operation: admission.Create, namespace: "restricted", object: mustDecode(t, document)})
			if refused != nil || !contains(warnings, r.want) {
				t.Errorf("%s, %s: warnings %q, %v, want %q", r.name, form, warnings, refused, r.want)
			}
			for _, w := range warnings {
				if !strings.Contains(w, "ValidatingAdmissionPolicy 'partage-slow-requests'") || !strings.HasSuffix(w, "docs/how-to/slow-requests.md") {
					t.Errorf("%s, %s: the warning %q does not name the policy and the page", r.name, form, w)
				}
			}
		}
	}
	t.Logf("%d cases", cases)
	if cases < 200 {
		t.Errorf("only %d cases", cases)
	}
}

// TestSlowRequestsDenied: the chart's values make it a refusal, and know more classes.
func TestSlowRequestsDenied(t *testing.T) {
	server := startAPIServer(t, enforced(t, "everything", "-slow-requests")...)
	cases := 0
	for _, r := range append(slowRequests[:len(slowRequests):len(slowRequests)],
		claim{name: "thirteen of a class for a profile", requests: one("mig-1g.10gb.nvidia.com", "count: 13"), want: []string{tooMany}},
		claim{name: "five of a class for a profile", requests: one("mig-1g.10gb.nvidia.com", "count: 5")},
		claim{name: "a class of the administrator", requests: one("small-gpus.example.com", "count: 13"), want: []string{tooMany}},
	) {
		if r.name == "made from a template" {
			// The template may be older than the policy.
			r.want = []string{ofAnyProfile}
		}
		for form, document := range r.documents(t) {
			cases++
			warnings, refused := server.ask(t, request{by: cmp.Or(r.by, somebody), operation: admission.Create, namespace: "restricted", object: mustDecode(t, document)})
			switch {
			case len(warnings) > 0:
				t.Errorf("%s, %s: warnings %q", r.name, form, warnings)
			case (refused != nil) != (len(r.want) > 0), refused != nil && !strings.Contains(refused.Error(), r.want[0]):
				t.Errorf("%s, %s: got %v, want %q", r.name, form, refused, r.want)
			}
		}
	}
	t.Logf("%d cases", cases)
	if cases < 240 {
		t.Errorf("only %d cases", cases)
	}
}

// TestAllDevices: where a claim for all devices may crash the scheduler it is refused. What
// crashes is tested in test/allocators.
func TestAllDevices(t *testing.T) {
	refused, taken := []string{allDevices}, []string(nil)
	cases := 0
	for golden, extra := range map[string][]claim{
		"scheduler-crashes": {
			{name: "whole GPUs", requests: one("gpu.nvidia.com", "allocationMode: All"), want: refused},
			{name: "whole GPUs, with admin access", requests: one("gpu.nvidia.com", "allocationMode: All, adminAccess: true"), want: refused},
			{name: "partitions of a profile", requests: one("mig.nvidia.com", "allocationMode: All, "+selectProfile), want: refused},
			{name: "shares", requests: one("mps.partage.dev", "allocationMode: All"), want: refused},
			{name: "time slices", requests: one("timeslice.partage.dev", "allocationMode: All"), want: refused},
			{name: "of a class of the administrator", requests: one("small-gpus.example.com", "allocationMode: All"), want: refused},
			{
				name: "made from a template", requests: one("gpu.nvidia.com", "allocationMode: All"),
				annotations: "{resource.kubernetes.io/pod-claim-name: gpus}", want: refused,
			},
			{
				name: "a second choice", want: []string{"request r/b is " + allDevices},
				requests: "[{name: r, firstAvailable: [{name: a, deviceClassName: tpu.example.com}, " +
					"{name: b, deviceClassName: gpu.nvidia.com, allocationMode: All}]}]",
			},
			{
				name: "a second request", want: []string{"request s is " + allDevices},
				requests: "[" + named("r", "gpu.nvidia.com", "") + ", " + named("s", "gpu.nvidia.com", "allocationMode: All") + "]",
			},
			{name: "observers", requests: one("observer.partage.dev", "allocationMode: All, adminAccess: true"), want: taken},
			{name: "of another driver", requests: one("tpu.example.com", "allocationMode: All"), want: taken},
			{name: "a count", requests: one("gpu.nvidia.com", "count: 8"), want: taken},
			{name: "the default", requests: one("gpu.nvidia.com", ""), want: taken},
			{name: "nothing", requests: "[]", want: taken},
			{name: "no requests", want: taken},
		},
		"defaults": {
			{name: "whole GPUs", requests: one("gpu.nvidia.com", "allocationMode: All"), want: taken},
			{name: "shares", requests: one("mps.partage.dev", "allocationMode: All"), want: taken},
		},
		"everything": {
			{name: "whole GPUs", requests: one("gpu.nvidia.com", "allocationMode: All"), want: refused},
			{name: "of a class for a profile", requests: one("mig-1g.10gb.nvidia.com", "allocationMode: All"), want: refused},
			{name: "observers", requests: one("observer.partage.dev", "allocationMode: All, adminAccess: true"), want: taken},
		},
	} {
		server := newAPIServer(t, golden)
		for _, r := range extra {
			for form, document := range r.documents(t) {
				cases++
				_, err := server.create(t, "restricted", document)
				if (err != nil) != (len(r.want) > 0) || err != nil && !strings.Contains(err.Error(), r.want[0]) {
					t.Errorf("%s: %s, %s: got %v, want %q", golden, r.name, form, err, r.want)
				}
			}
		}
	}
	t.Logf("%d cases", cases)
	if cases < 100 {
		t.Errorf("only %d cases", cases)
	}
}

// TestUpdates: a claim that is older than the policy can be changed, so that its finalizers
// can be removed. What it asks for cannot be changed anyway.
func TestUpdates(t *testing.T) {
	r := claim{requests: one("gpu.nvidia.com", "allocationMode: All")}
	for _, golden := range []string{"scheduler-crashes", "everything"} {
		server := newAPIServer(t, golden)
		for form, document := range r.documents(t) {
			if _, err := server.create(t, "restricted", document); golden == "scheduler-crashes" && err == nil {
				t.Errorf("%s: created", form)
			}
			stored := mustDecode(t, document)
			update := request{by: somebody, operation: admission.Update, namespace: "restricted", object: stored, old: stored}
			if warnings, err := server.ask(t, update); err != nil || len(warnings) > 0 {
				t.Errorf("%s, %s: %q, %v", golden, form, warnings, err)
			}
		}
	}
}

// TestDemos: nothing that the project shows is refused or slow.
func TestDemos(t *testing.T) {
	server := newAPIServer(t, "scheduler-crashes")
	claims := 0
	judge := func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		for _, object := range objects(t, path) {
			if resources[kindOf(t, object).Kind] == "" {
				continue
			}
			claims++
			create := request{by: somebody, operation: admission.Create, namespace: "restricted", object: object}
			if warnings, refused := server.ask(t, create); refused != nil || len(warnings) > 0 {
				t.Errorf("%s: %q, %v", path, warnings, refused)
			}
		}
		return nil
	}
	if err := errors.Join(filepath.WalkDir(demos, judge), filepath.WalkDir(templates, judge)); err != nil || claims < 30 {
		t.Errorf("%d objects, %v", claims, err)
	}
}
