// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
)

// refusal is what a decoder does not take, and how its error ends.
type refusal struct{ in, want string }

func checkRefusals(t *testing.T, translate func([]byte, Options) (*Result, error), tests map[string]refusal) {
	t.Helper()
	for name, test := range tests {
		r, err := translate([]byte(test.in), Options{Driver: "gpu.nvidia.com"})
		if err == nil || r != nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s:\ngot  %v\nwant %s", name, err, test.want)
		}
	}
}

func timeSlicing(resource string) string {
	return "version: v1\nsharing: {timeSlicing: {resources: [" + resource + "]}}"
}

func TestDevicePluginRefuses(t *testing.T) {
	checkRefusals(t, DevicePlugin, map[string]refusal{
		"nothing":          {"# nothing\n", "is empty"},
		"a list":           {"[]", "must be an object, is a list"},
		"not YAML":         {"version: [", "document in line 1: yaml: "},
		"other version":    {"version: v2", `version: Unsupported value: "v2": supported values: "v1"`},
		"other kind":       {"apiVersion: v1\nkind: Secret", `kind: Unsupported value: "Secret"`},
		"no data":          {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}", "ConfigMap a: data: Required value"},
		"data of the map":  {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {b: 7}", "ConfigMap a: data[b]: Invalid value: must be a text"},
		"bad YAML in it":   {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {b: '['}", "ConfigMap a: data[b]: yaml: "},
		"bad config in it": {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {b: 'version: v3'}", `ConfigMap a: data[b]: invalid configuration of the device plugin: version: Unsupported value: "v3"`},
		"in a list":        {"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Pod}]", `items[0]: kind: Unsupported value: "Pod"`},
		"twice":            {"version: v1\n---\nversion: v1", "more than one configuration has the name"},
		"MIG strategy":     {"version: v1\nflags: {migStrategy: both}", `flags.migStrategy: Unsupported value: "both": supported values: "none", "single", "mixed"`},
		"no resources":     {"version: v1\nsharing: {mps: {}}", "sharing.mps.resources: Required value"},
		"empty resources":  {"version: v1\nsharing: {mps: {resources: []}}", "sharing.mps.resources: Required value"},
		"no name":          {timeSlicing("{replicas: 2}"), "sharing.timeSlicing.resources[0].name: Required value"},
		"no replicas":      {timeSlicing("{name: nvidia.com/gpu}"), "sharing.timeSlicing.resources[0].replicas: Required value"},
		"one replica":      {timeSlicing("{name: nvidia.com/gpu, replicas: 1}"), "sharing.timeSlicing.resources[0].replicas: Invalid value: 1: must be between 2 and 1024"},
		"many replicas":    {timeSlicing("{name: nvidia.com/gpu, replicas: 2000}"), "replicas: Invalid value: 2000: must be between 2 and 1024"},
		"half a replica":   {timeSlicing("{name: nvidia.com/gpu, replicas: 2.5}"), "replicas: Invalid value: 2.5: must be a whole number"},
		"other resource":   {timeSlicing("{name: nvidia.com/vgpu, replicas: 2}"), `name: Invalid value: "nvidia.com/vgpu": must be "nvidia.com/gpu", or "nvidia.com/mig-" and a MIG profile`},
		"other vendor":     {timeSlicing("{name: amd.com/gpu, replicas: 2}"), `name: Invalid value: "amd.com/gpu"`},
		"a resource twice": {timeSlicing("{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 3}"), `resources[1].name: Duplicate value: "nvidia.com/gpu"`},
		"a field twice":    {"version: v1\nversion: v1", "is given more than once"},
		"by letter case":   {"version: v1\nVersion: v1", `Version: Duplicate value: "Version"`},
		"rename as text":   {"version: v1\nsharing: {mps: {renameByDefault: no thanks, resources: [{name: gpu, replicas: 2}]}}", "sharing.mps.renameByDefault: Invalid value"},
		"an alias":         {"version: v1\nflags: &f {}\nsharing: *f", "sharing: Invalid value: must be an object, is an alias"},
	})
}

func entry(fields string) string {
	return "version: v1\nmig-configs: {a: [{" + fields + "}]}"
}

func TestMIGPartedRefuses(t *testing.T) {
	checkRefusals(t, MIGParted, map[string]refusal{
		"nothing":         {"", "is empty"},
		"no version":      {"mig-configs: {a: [{devices: all, mig-enabled: false}]}", "version: Required value"},
		"other version":   {"version: v2\nmig-configs: {a: [{devices: all, mig-enabled: false}]}", `version: Unsupported value: "v2"`},
		"no layouts":      {"version: v1\nmig-configs: null", "mig-configs: "},
		"unknown field":   {"version: v1\nmore: 1\nmig-configs: {}", "more: Invalid value: unknown field"},
		"empty layout":    {"version: v1\nmig-configs: {a: []}", "mig-configs[a]: Required value: at least one entry"},
		"unknown in one":  {entry("devices: all, mig-enabled: false, more: 1"), "mig-configs[a][0].more: Invalid value: unknown field"},
		"no devices":      {entry("mig-enabled: false"), "mig-configs[a][0].devices: Required value"},
		"not enabled":     {entry("devices: all"), "mig-configs[a][0].mig-enabled: Required value"},
		"no partitions":   {entry("devices: all, mig-enabled: true"), "mig-configs[a][0].mig-devices: Required value"},
		"partitions":      {entry("devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}"), "mig-configs[a][0].mig-devices: Forbidden: mig-enabled is false"},
		"other devices":   {entry("devices: some, mig-enabled: false"), `mig-configs[a][0].devices: Invalid value: "some": must be "all" or a list of indexes`},
		"negative device": {entry("devices: [-1], mig-enabled: false"), "mig-configs[a][0].devices[0]: Invalid value: -1"},
		"profile":         {entry("devices: all, mig-enabled: true, mig-devices: {small: 1}"), `mig-configs[a][0].mig-devices[small]: Invalid value: "small": must be the name of a MIG profile`},
		"count":           {entry("devices: all, mig-enabled: true, mig-devices: {1g.5gb: many}"), `mig-configs[a][0].mig-devices["1g.5gb"]: Invalid value: "many"`},
		"large count":     {entry("devices: all, mig-enabled: true, mig-devices: {1g.5gb: 65}"), "Invalid value: 65: must be between 0 and 64"},
		"filter":          {entry("device-filter: A100, devices: all, mig-enabled: false"), `mig-configs[a][0].device-filter: Invalid value: "A100": must be device and vendor`},
		"filter in list":  {entry("device-filter: ['0x20B210DE', '1:2:3'], devices: all, mig-enabled: false"), `mig-configs[a][0].device-filter[1]: Invalid value: "1:2:3"`},
		"a layout twice":  {entry("devices: all, mig-enabled: false") + "\n---\n" + entry("devices: all, mig-enabled: false"), `mig-configs[a]: Duplicate value: "a"`},
	})
}

func TestCastAIRefuses(t *testing.T) {
	gpu := func(fields string) string { return `{"gpu": {` + fields + `}}` }
	const strategy = `"sharingStrategy": "GPU_SHARING_STRATEGY_MPS", `
	checkRefusals(t, CastAI, map[string]refusal{
		"nothing":        {" \n", "is not the JSON"},
		"no template":    {`{"name": "a", "gpu": {}}`, "gpu: Required value: there is no node template with a section gpu"},
		"a constraint":   {`{"constraints": {"gpu": {"minCount": 1}}}`, "gpu: Required value"},
		"not JSON":       {`{"gpu": `, "is not the JSON of Cast AI's API or of terraform show -json: "},
		"a plan":         {`{"format_version": "1.2", "planned_values": {"root_module": {"resources": [{"values": {"name": "a", "gpu": [{"sharing_strategy": "mps"}]}}]}}}`, "is a plan"},
		"Terraform":      {"gpu {\n  sharing_strategy = var.strategy\n}\n", "is not the JSON of Cast AI's API"},
		"no resources":   {`{"format_version": "1.0"}`, "gpu: Required value"},
		"strategy":       {gpu(`"sharingStrategy": "FAIR"`), `gpu.sharingStrategy: Unsupported value: "FAIR": supported values: "mps", "time-sharing", "none"`},
		"no strategy":    {gpu(`"defaultSharedClientsPerGpu": 4`), "gpu.sharingStrategy: Required value"},
		"no clients":     {gpu(strategy + `"defaultSharedClientsPerGpu": -1`), "gpu.defaultSharedClientsPerGpu: Invalid value: -1: must be between 1 and 48"},
		"many clients":   {gpu(strategy + `"defaultSharedClientsPerGpu": 49`), "gpu.defaultSharedClientsPerGpu: Invalid value: 49: must be between 1 and 48"},
		"many for one":   {gpu(strategy + `"sharingConfiguration": {"nvidia-l4": {"sharedClientsPerGpu": 49}}`), "gpu.sharingConfiguration[nvidia-l4].sharedClientsPerGpu: Invalid value: 49"},
		"none for one":   {gpu(strategy + `"sharingConfiguration": {"nvidia-l4": {}}`), "gpu.sharingConfiguration[nvidia-l4]: Required value"},
		"no name":        {gpu(strategy + `"sharingConfiguration": [{"sharedClientsPerGpu": 4}]`), "gpu.sharingConfiguration[0]: Required value"},
		"both spellings": {gpu(strategy + `"sharing_strategy": "mps"`), `gpu.sharing_strategy: Duplicate value: "sharing_strategy"`},
	})
}

// TestGPUNames: the names that clouds have are those of products.
func TestGPUNames(t *testing.T) {
	for name, want := range map[string]string{
		"nvidia-tesla-t4": "Tesla T4", "T4": "Tesla T4", "nvidia-l4": "NVIDIA L4", "NVIDIA L40S": "NVIDIA L40S", "A10G": "NVIDIA A10G",
		"nvidia-a100-80gb": "NVIDIA A100*80GB*", "nvidia_tesla_a100": "NVIDIA A100*", "voodoo": "",
	} {
		if got, _, known := productOf(name); got != want || known != (want != "") {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// TestRuleName: every name of a configuration gives a name for a rule.
func TestRuleName(t *testing.T) {
	for name, want := range map[string]string{
		"t4": "t4", "config.yaml": "config.yaml", "-a b/c-": "a-b-c", "": "migrated", "ü": "migrated", strings.Repeat("x", 70): strings.Repeat("x", 63),
	} {
		if got := ruleName(name); got != want {
			t.Errorf("%q: got %q, want %q", name, got, want)
		}
	}
}

// TestEveryFlagIsTold: no flag of the device plugin vanishes without a word.
func TestEveryFlagIsTold(t *testing.T) {
	for section, reasons := range map[string]map[string]string{"flags": flagReasons, "flags.plugin": pluginFlagReasons, "flags.gfd": discoveryFlagReasons} {
		for name := range reasons {
			text := "version: v1\nflags: {" + name + ": set}"
			if _, sub, ok := strings.Cut(section, "."); ok {
				text = "version: v1\nflags: {" + sub + ": {" + name + ": set}}"
			}
			r, err := DevicePlugin([]byte(text), Options{Driver: "gpu.nvidia.com"})
			if err != nil {
				t.Fatal(err)
			}
			if len(r.Findings) != 1 || r.Findings[0].Kind != finding.Lost || r.Findings[0].Path != section+"."+name || r.Findings[0].Value != "set" {
				t.Errorf("%s.%s: %v", section, name, r.Findings)
			}
		}
	}
}
