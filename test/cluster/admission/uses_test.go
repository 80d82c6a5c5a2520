// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/admission"
)

// use is what a claim asks for with which configurations, and what is said about it.
type use struct {
	name              string
	requests, configs []string
	// want is a part of the refusal, or empty.
	want string
	// fromTemplate says that it is taken nevertheless if it was made from a template.
	fromTemplate bool
}

// forRequests is a configuration of the driver for requests, which are all of them if there is
// none.
func forRequests(kind, sharing string, requests ...string) string {
	return forDriver("gpu.nvidia.com", kind, sharing, requests...)
}

func forDriver(driver, kind, sharing string, requests ...string) string {
	return fmt.Sprintf("{requests: [%s], opaque: {driver: %s, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: %s, sharing: %s}}}",
		strings.Join(requests, ", "), driver, kind, sharing)
}

// firstOf is a request with alternatives for classes, named a, b, ….
func firstOf(name string, classes ...string) string {
	var all []string
	for i, class := range classes {
		all = append(all, fmt.Sprintf("{name: %c, deviceClassName: %s}", 'a'+i, class))
	}
	return fmt.Sprintf("{name: %s, firstAvailable: [%s]}", name, strings.Join(all, ", "))
}

const (
	gpuClass, migClass, mpsClass, sliceClass = "gpu.nvidia.com", "mig.nvidia.com", "mps.partage.dev", "timeslice.partage.dev"

	anyMPS   = "{strategy: MPS}"
	priority = "{strategy: MPS, mpsConfig: {defaultClientPriority: BelowNormal, multiUser: null}}"
	short    = "{strategy: TimeSlicing, timeSlicingConfig: {interval: Short}}"
	usual    = "{strategy: TimeSlicing}"
)

func list(texts ...string) []string { return texts }

var uses = []use{
	{name: "a GPU", requests: list(named("r", gpuClass, "")), configs: list(forRequests("GpuConfig", anyMPS, "r"))},
	{name: "a GPU, for all", requests: list(named("r", gpuClass, "")), configs: list(forRequests("GpuConfig", short))},
	{name: "a partition", requests: list(named("r", migClass, "")), configs: list(forRequests("MigDeviceConfig", anyMPS, "r"))},
	{name: "a priority of a share", requests: list(named("r", mpsClass, "")), configs: list(forRequests("GpuConfig", priority, "r"))},
	{name: "a priority of a share of a partition", requests: list(named("r", mpsClass, "")), configs: list(forRequests("MigDeviceConfig", priority))},
	{name: "a class of somebody", requests: list(named("r", "any.example.com", "")), configs: list(forRequests("MigDeviceConfig", anyMPS, "r"))},
	{name: "another driver with its class", requests: list(named("r", "nic.example.com", "")), configs: list(forDriver("nic.example.com", "Any", "7", "r"))},
	{
		name: "a config for each of two", requests: list(named("g", gpuClass, ""), named("m", migClass, "")),
		configs: list(forRequests("GpuConfig", anyMPS), forRequests("MigDeviceConfig", anyMPS)),
	},
	{name: "alternatives, a config for one", requests: list(firstOf("r", gpuClass, mpsClass)), configs: list(forRequests("GpuConfig", anyMPS, "r"))},
	{name: "alternatives, one of somebody", requests: list(firstOf("r", sliceClass, "any.example.com")), configs: list(forRequests("GpuConfig", anyMPS, "r"))},
	{name: "an alternative", requests: list(firstOf("r", gpuClass, mpsClass)), configs: list(forRequests("GpuConfig", anyMPS, "r/a"))},
	{name: "a config without requests", configs: list(forRequests("GpuConfig", anyMPS))},
	{name: "admin access, nothing changed", requests: list(named("r", gpuClass, "adminAccess: true")), configs: list(forRequests("GpuConfig", usual, "r"))},
	{name: "admin access, for all", requests: list(named("r", gpuClass, "adminAccess: true")), configs: list(forRequests("GpuConfig", anyMPS))},
	{name: "an observer", requests: list(named("r", "observer.partage.dev", "adminAccess: true"))},
	{name: "a driver and the class of another one", requests: list(named("r", gpuClass, ""), named("o", "nic.example.com", "")), configs: list(forDriver("nic.example.com", "Any", "7"))},

	{
		name: "MPS for a share", requests: list(named("r", mpsClass, "")), configs: list(forRequests("GpuConfig", anyMPS, "r")),
		want: "config[0]: GpuConfig does not apply to request r, whose class is mps.partage.dev: an MPS share has the limits that the claim asks for in capacity.requests",
	},
	{
		name: "a limit and a priority for a share", requests: list(named("r", mpsClass, "")),
		configs: list(forRequests("GpuConfig", "{strategy: MPS, mpsConfig: {defaultClientPriority: Normal, multiUser: true}}", "r")), want: "config[0]: GpuConfig does not apply",
	},
	{
		name: "a share and settings by device", requests: list(named("r", mpsClass, "")),
		configs: list(forRequests("GpuConfig", "{strategy: MPS, mpsConfig: {defaultClientPriority: Normal, defaultPerDevicePinnedMemoryLimit: {}}}", "r")), want: "config[0]: GpuConfig does not apply",
	},
	{
		name: "nothing for a share", requests: list(named("r", mpsClass, "")), configs: list(forRequests("GpuConfig", "null", "r")),
		want: "config[0]: GpuConfig does not apply to request r",
	},
	{
		name: "a time-slice share", requests: list(named("r", sliceClass, "")), configs: list(forRequests("GpuConfig", short, "r")),
		want: "whose class is timeslice.partage.dev: how a time-slice share is shared is for the SharingPolicy of the administrator to say",
	},
	{
		name: "a config for partitions", requests: list(named("r", gpuClass, "")), configs: list(forRequests("MigDeviceConfig", usual, "r")),
		want: "config[0]: MigDeviceConfig does not apply to request r, whose class is gpu.nvidia.com: a whole GPU takes a GpuConfig",
	},
	{
		name: "a config for GPUs", requests: list(named("o", "nic.example.com", ""), named("r", migClass, "")),
		configs: list(forDriver("nic.example.com", "Any", "7"), forRequests("GpuConfig", usual, "o", "r")),
		want:    "config[1]: GpuConfig does not apply to request r, whose class is mig.nvidia.com: a MIG partition takes a MigDeviceConfig",
	},
	{
		name: "a wrong alternative", requests: list(firstOf("r", gpuClass, sliceClass)), configs: list(forRequests("GpuConfig", anyMPS, "r/b")),
		want: "GpuConfig does not apply to request r/b, whose class is timeslice.partage.dev",
	},
	{
		name: "admin access", requests: list(named("r", gpuClass, "adminAccess: true")), configs: list(forRequests("GpuConfig", short, "r")),
		want: "config[0]: GpuConfig does not apply to request r, which has admin access",
	},
	{
		name: "admin access to a share", requests: list(named("r", mpsClass, "adminAccess: true")), configs: list(forRequests("GpuConfig", priority, "r")),
		want: "config[0]: GpuConfig does not apply to request r, which has admin access",
	},
	{
		name: "an observer with a config", requests: list(named("r", "observer.partage.dev", "adminAccess: true")), configs: list(forRequests("GpuConfig", usual, "r")),
		want: "whose class is observer.partage.dev: an observer only looks",
	},
	{name: "an observer without access", requests: list(named("r", "observer.partage.dev", "")), want: "request r is for class observer.partage.dev, whose devices only look, and has no admin access"},
	{name: "an observer as an alternative", requests: list(firstOf("r", gpuClass, "observer.partage.dev")), want: "request r/b is for class observer.partage.dev"},

	{
		name: "for all, of none", requests: list(named("r", mpsClass, ""), named("s", sliceClass, "")), configs: list(forRequests("GpuConfig", anyMPS)),
		want: "config[0]: GpuConfig applies to none of its requests: class of request", fromTemplate: true,
	},
	{
		name: "alternatives, of none", requests: list(firstOf("r", mpsClass, sliceClass)), configs: list(forRequests("GpuConfig", anyMPS, "r")),
		want: "config[0]: GpuConfig applies to none of its requests: class of request r/a is mps.partage.dev, and", fromTemplate: true,
	},
	{
		name: "another driver", requests: list(named("r", gpuClass, "")), configs: list(forDriver("gpu.nvidia.org", "GpuConfig", anyMPS, "r")),
		want: `config[0].opaque.driver: Invalid value: "gpu.nvidia.org": no request that the configuration is for has devices of that driver, so that it would be ignored: write gpu.nvidia.com`, fromTemplate: true,
	},
	{
		name: "another driver, for all", requests: list(named("r", gpuClass, ""), firstOf("s", mpsClass, migClass)), configs: list(forDriver("gpu.nvidia.org", "GpuConfig", anyMPS)),
		want: `config[0].opaque.driver: Invalid value: "gpu.nvidia.org"`, fromTemplate: true,
	},
	{
		name: "another driver for one of two", requests: list(named("r", gpuClass, ""), named("o", "nic.example.com", "")),
		configs: list(forDriver("nic.example.com", "Any", "7", "r")), want: `config[0].opaque.driver: Invalid value: "nic.example.com"`, fromTemplate: true,
	},
	{
		name: "ten bytes", requests: list(named("r", mpsClass, "capacity: {requests: {memory: 10}}")),
		want: `request r: capacity.requests.memory: Invalid value: "10": must be at least 64Mi; a number without a suffix is in bytes`, fromTemplate: true,
	},
	{
		name: "in full", requests: list(named("r", sliceClass, "capacity: {requests: {gpu.nvidia.com/memory: 63Mi}}")),
		want: `request r: capacity.requests.gpu.nvidia.com/memory: Invalid value: "63Mi": must be at least 64Mi`, fromTemplate: true,
	},
	{
		name: "a small alternative", fromTemplate: true, want: `request r/a: capacity.requests.memory: Invalid value: "16"`,
		requests: list("{name: r, firstAvailable: [{name: a, deviceClassName: mps.partage.dev, capacity: {requests: {memory: 16}}}, {name: b, deviceClassName: gpu.nvidia.com}]}"),
	},
	{name: "64Mi", requests: list(named("r", mpsClass, "capacity: {requests: {memory: 64Mi}}"))},
	{name: "other capacities", requests: list(named("r", mpsClass, "capacity: {requests: {smPercent: 10, other.example.com/memory: 1}}"))},
	{
		name: "ten bytes of a partition", requests: list(named("r", migClass, "capacity: {requests: {memory: 10}}")),
		want: `request r: capacity.requests.memory: Invalid value: "10": must be at least 1Mi; a number without a suffix is in bytes`, fromTemplate: true,
	},
	{
		name: "less than nothing of a GPU", requests: list(named("r", gpuClass, "capacity: {requests: {gpu.nvidia.com/memory: -10Gi}}")),
		want: `request r: capacity.requests.gpu.nvidia.com/memory: Invalid value: "-10Gi": must be at least 1Mi`, fromTemplate: true,
	},
	{
		name: "less than nothing of a share", requests: list(named("r", mpsClass, "capacity: {requests: {memory: -10Gi}}")),
		want: `request r: capacity.requests.memory: Invalid value: "-10Gi": must be at least 64Mi`, fromTemplate: true,
	},
	{
		name: "a negative percentage", requests: list(named("r", mpsClass, "capacity: {requests: {smPercent: -25}}")),
		want: `request r: capacity.requests.smPercent: Invalid value: "-25": must be at least 1;`, fromTemplate: true,
	},
	{
		name: "no percentage", requests: list(named("r", sliceClass, "capacity: {requests: {gpu.nvidia.com/smPercent: 0}}")),
		want: `request r: capacity.requests.gpu.nvidia.com/smPercent: Invalid value: "0": must be at least 1;`, fromTemplate: true,
	},
	{
		name: "no share", requests: list(named("r", mpsClass, "capacity: {requests: {shares: 0}}")),
		want: `request r: capacity.requests.shares: Invalid value: "0": must be at least 1;`, fromTemplate: true,
	},
	{
		name: "fewer than no multiprocessors", requests: list(named("r", migClass, "capacity: {requests: {multiprocessors: -14}}")),
		want: `request r: capacity.requests.multiprocessors: Invalid value: "-14": must be at least 0;`, fromTemplate: true,
	},
	{
		name: "two of them", requests: list(named("r", mpsClass, "capacity: {requests: {memory: 1, smPercent: -1}}")),
		want: `must be at least 64Mi; a number without a suffix is in bytes; request r: capacity.requests.smPercent: Invalid value: "-1": must be at least 1;`, fromTemplate: true,
	},
	{name: "a little of a partition", requests: list(named("r", migClass, "capacity: {requests: {memory: 1Mi, multiprocessors: 0}}"))},
	{name: "no part of a GPU", requests: list(named("r", gpuClass, "capacity: {requests: {smPercent: 0}}"))},
	{name: "ten bytes of a class of somebody", requests: list(named("r", "any.example.com", "capacity: {requests: {memory: 10}}"))},
	{name: "nothing"},
}

// documents are the claim and the template in every version of the API, and the claim as it is
// made from a template.
func (u use) documents(t *testing.T) map[string][]byte {
	t.Helper()
	devices := fmt.Sprintf("{devices: {requests: [%s], config: [%s]}}", strings.Join(u.requests, ", "), strings.Join(u.configs, ", "))
	all := map[string][]byte{}
	for form, text := range map[string]string{
		"claim":    "kind: ResourceClaim\nmetadata: {name: example}\nspec: " + devices,
		"made":     "kind: ResourceClaim\nmetadata: {name: example, annotations: {resource.kubernetes.io/pod-claim-name: gpus}}\nspec: " + devices,
		"template": "kind: ResourceClaimTemplate\nmetadata: {name: example}\nspec: {spec: " + devices + "}",
	} {
		document := []byte("apiVersion: resource.k8s.io/v1\n" + text)
		for _, version := range []string{"v1", "v1beta1", "v1beta2"} {
			all[form+" "+version] = in(t, version, mustDecode(t, document))
		}
	}
	return all
}

// TestUses: configurations that can apply to none of a claim's requests are refused, and so are
// shares of nearly no memory. What is not certain from the names of classes is taken.
func TestUses(t *testing.T) {
	server := newAPIServer(t, "defaults")
	cases, refusals := 0, 0
	for _, u := range uses {
		for form, document := range u.documents(t) {
			cases++
			want := u.want
			if u.fromTemplate && strings.HasPrefix(form, "made") {
				want = ""
			}
			_, refused := server.create(t, "default", document)
			if (refused != nil) != (want != "") || refused != nil && !strings.Contains(refused.Error(), want) {
				t.Errorf("%s, %s:\ngot  %v\nwant %s", u.name, form, refused, want)
			}
			if refused != nil {
				refusals++
			}
		}
	}
	if t.Logf("%d cases, %d refused", cases, refusals); cases != 9*len(uses) || len(uses) < 44 || refusals < 9*18 {
		t.Errorf("%d cases, %d refused", cases, refusals)
	}
}

// TestUsesOfClasses: the chart's values say more of classes, or that nothing is known of them.
func TestUsesOfClasses(t *testing.T) {
	for golden, cases := range map[string][]use{
		"scheduler-crashes": {
			{
				name: "a class for a profile", requests: list(named("r", "mig-1g.10gb.nvidia.com", "")), configs: list(forRequests("GpuConfig", usual, "r")),
				want: "whose class is mig-1g.10gb.nvidia.com: a MIG partition takes a MigDeviceConfig",
			},
			{
				name: "a class for MPS shares", requests: list(named("r", "shared.example.com", "")), configs: list(forRequests("GpuConfig", anyMPS, "r")),
				want: "whose class is shared.example.com: an MPS share",
			},
			{name: "a class with any devices", requests: list(named("r", "small-gpus.example.com", "")), configs: list(forDriver("gpu.nvidia.org", "GpuConfig", anyMPS, "r"))},
		},
	} {
		server := newAPIServer(t, golden)
		for _, u := range cases {
			document := u.documents(t)["template v1"]
			_, refused := server.create(t, "restricted", document)
			if (refused != nil) != (u.want != "") || refused != nil && !strings.Contains(refused.Error(), u.want) {
				t.Errorf("%s: %s: got %v, want %s", golden, u.name, refused, u.want)
			}
		}
	}
}

// TestUpdatesOfClaims: a claim that is older than the policy keeps its life: its labels,
// finalizers and status change.
func TestUpdatesOfClaims(t *testing.T) {
	server := newAPIServer(t, "defaults")
	u := use{requests: list(named("r", mpsClass, "capacity: {requests: {memory: 1}}")), configs: list(forRequests("Wrong", anyMPS, "r"))}
	cases := 0
	for form, document := range u.documents(t) {
		for _, subresource := range []string{"", "status"} {
			cases++
			stored := mustDecode(t, document)
			update := request{by: somebody, operation: admission.Update, namespace: "default", object: stored, old: stored, subresource: subresource}
			if warnings, err := server.ask(t, update); err != nil || len(warnings) > 0 {
				t.Errorf("%s/%s: %q, %v", form, subresource, warnings, err)
			}
		}
		deletion := request{by: somebody, operation: admission.Delete, namespace: "default", old: mustDecode(t, document)}
		if _, err := server.ask(t, deletion); err != nil {
			t.Errorf("%s: deletion: %v", form, err)
		}
	}
	if cases != 18 {
		t.Errorf("%d cases", cases)
	}
}
