// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/docs/snippet"
)

// others are programs whose configuration pages show. A block of one says so in its first line,
// which helps readers, too, and needs only to be YAML.
var others = regexp.MustCompile(`^# .*\b(of|for) (NVIDIA's|the GPU Operator|Prometheus|Kueue|kube-scheduler|the scheduler|Karpenter|the autoscaler|cluster-autoscaler|dcgm-exporter|the kubelet|containerd|GPU feature discovery)`)

// checkYAML returns what is wrong with a block: it must be a manifest, values of the chart, or a
// part of one of these.
func checkYAML(r repository, text string) error {
	if others.MatchString(text) {
		var anything any
		if err := yaml.Unmarshal([]byte(text), &anything); err != nil {
			return fmt.Errorf("decode it: %w", err)
		}
		return nil
	}
	var all []error
	for document := range strings.SplitSeq(text, "\n---\n") {
		all = append(all, checkDocument(r, unindented(document)))
	}
	return errors.Join(all...)
}

func checkDocument(r repository, document string) error {
	var content map[string]any
	if err := yaml.UnmarshalStrict([]byte(document), &content); err != nil {
		return fmt.Errorf("decode it: %w", err)
	}
	switch {
	case content["kind"] == policy.PolicyKind:
		return checkPolicy(content)
	case content["apiVersion"] != nil && content["kind"] != nil:
		return checkManifest(content, document)
	case isValues(r, content):
		return checkValues(r, content)
	}
	return checkPart(content, document)
}

// unindented is a part of a larger document without the spaces that it has there.
func unindented(document string) string {
	least := -1
	for line := range strings.Lines(document) {
		if text := strings.TrimLeft(line, " "); strings.TrimSpace(text) != "" {
			if n := len(line) - len(text); least < 0 || n < least {
				least = n
			}
		}
	}
	if least <= 0 {
		return document
	}
	var b strings.Builder
	for line := range strings.Lines(document) {
		b.WriteString(strings.TrimPrefix(line, strings.Repeat(" ", least)))
	}
	return b.String()
}

func isValues(r repository, content map[string]any) bool {
	for key := range content {
		if _, has := r.values[key]; !has {
			return false
		}
	}
	// A container has "resources" as well, and a policy "health".
	return len(content) > 0 && content["resources"] == nil
}

// checkValues: the chart's schema takes the values with the defaults for all others, and its
// sharing policy is one that the driver takes.
func checkValues(r repository, content map[string]any) error {
	schema, err := jsonschema.NewCompiler().Compile(filepath.Join(root, "deployments/helm/partage/values.schema.json"))
	if err != nil {
		return fmt.Errorf("compile the schema of the chart's values: %w", err)
	}
	merged, isMap := merge(r.values, content).(map[string]any)
	if !isMap {
		return errors.New("the values are no map")
	}
	// The one value without a default.
	merged["image"] = merge(map[string]any{"repository": "registry.example.com/image"}, merged["image"])
	if err := schema.Validate(merged); err != nil {
		return fmt.Errorf("the chart refuses these values: %w", err)
	}
	if sharing, has := content["sharingPolicy"].(map[string]any); has {
		return checkPolicy(sharing)
	}
	return nil
}

// merge lays values over defaults, as helm does.
func merge(defaults, values any) any {
	old, isMap := defaults.(map[string]any)
	added, areMaps := values.(map[string]any)
	if !isMap || !areMaps {
		return values
	}
	all := map[string]any{}
	for key, value := range old {
		all[key] = value
	}
	for key, value := range added {
		if all[key] != nil {
			value = merge(all[key], value)
		}
		all[key] = value
	}
	return all
}

// checkPolicy: the driver takes a sharing policy, or a part of one.
func checkPolicy(content map[string]any) error {
	complete := merge(content, map[string]any{"apiVersion": policy.Version, "kind": policy.PolicyKind})
	document, err := yaml.Marshal(complete)
	if err != nil {
		return fmt.Errorf("encode the policy: %w", err)
	}
	if _, err := policy.Decode(document); err != nil {
		return fmt.Errorf("the driver refuses this policy: %w", err)
	}
	return nil
}

// TestYAML: manifests, values and policies that pages show are taken by what they are for.
func TestYAML(t *testing.T) {
	r, blocks, files := readRepository(t), 0, 0
	for path, page := range rawPages(t) {
		for _, b := range snippet.Blocks(path, page, "yaml") {
			if blocks++; fileComment.MatchString(b.Before) {
				continue // TestFiles compares it with the file
			}
			if err := checkYAML(r, b.Text); err != nil {
				t.Errorf("%v: %v", b, err)
			}
		}
	}
	for _, folder := range []string{"docs/examples", "demo", "templates"} {
		for _, path := range yamlFiles(t, folder) {
			content, err := os.ReadFile(filepath.Join(root, path))
			if err != nil {
				t.Fatal(err)
			}
			if files++; others.MatchString(withoutLicence(string(content))) {
				continue
			}
			if err := checkYAML(r, string(content)); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
	if t.Logf("%d cases", blocks+files); blocks < 30 || files < 35 {
		t.Errorf("only %d blocks and %d files", blocks, files)
	}
}

func withoutLicence(content string) string {
	lines := strings.Split(content, "\n")
	return strings.Join(slices.DeleteFunc(lines, func(line string) bool {
		return strings.HasPrefix(line, "# SPDX-") || line == "#"
	}), "\n")
}

func yamlFiles(t *testing.T, folder string) []string {
	t.Helper()
	var paths []string
	err := snippet.Files(filepath.Join(root, folder), ".yaml", func(path, _ string) { paths = append(paths, folder+"/"+path) })
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// TestBrokenYAML: a page with a wrong block fails.
func TestBrokenYAML(t *testing.T) {
	r := readRepository(t)
	const claim = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: x}\nspec:\n  devices:\n"
	for text, want := range map[string]string{
		claim + "    requests: [{name: a, exactly: {deviceClassName: mig.nvidia.com, capacity: {requests: {memory: 18Gi}}}}]\n":                                        "",
		claim + "    requests: [{name: a, exactly: {deviceClasName: mig.nvidia.com}}]\n":                                                                               "unknown field",
		claim + "    requests: [{name: a, exactly: {deviceClassName: mig.nvidia.con}}]\n":                                                                              "no class mig.nvidia.con",
		claim + "    requests: [{name: a, exactly: {deviceClassName: mps.partage.dev, capacity: {requests: {mem: 1Gi}}}}]\n":                                           "no capacity mem",
		claim + "    requests: [{name: a, exactly: {deviceClassName: mps.partage.dev, selectors: [{cel: {expression: 'device.x'}}]}}]\n":                               "undefined field",
		claim + "    requests: [{name: a, exactly: {deviceClassName: mps.partage.dev}}]\n    constraints: [{matchAttribute: gpu.nvidia.com/nosuch}]\n":                 "no attribute nosuch",
		claim + "    config: [{opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: Mps}}}}]\n": "Mps",
		"selectors:\n- cel:\n    expression: device.attributes['gpu.nvidia.com'].profil == '1g.10gb'\n":                                                                "no attribute profil",
		"exactly:\n  deviceClassName: timeslice.partage.dev\n":                                                                                                         "",
		"exactly:\n  deviceClas: timeslice.partage.dev\n":                                                                                                              "unknown field",
		"sharing:\n  strategy: TimeSlicing\n  timeSlicingConfig: {interval: Long}\n":                                                                                   "",
		"sharing:\n  strategy: TimeSlicing\n  timeSlicingConfig: {interval: Forever}\n":                                                                                "Forever",
		"kubeletPlugin: {gpuNodesOnly: true}\n":                                                                                                                        "",
		"kubeletPlugin: {gpuNodeOnly: true}\n":                                                                                                                         "gpuNodeOnly",
		"sharingPolicy: {default: {kinds: [gpu]}}\n":                                                                                                                   "",
		"sharingPolicy: {default: {kinds: [cpu]}}\n":                                                                                                                   "must be one of",
		"sharingPolicy: {rules: [{name: a, match: {model: x}, offer: {}}]}\n":                                                                                          "model",
		"apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a, imag: b}]}\n":                                                                   "unknown field",
		"apiVersion: ray.io/v1\nkind: RayCluster\nspec: {headGroupSpec: {template: {spec: {containers: [{name: a, imag: b}]}}}}\n":                                     "unknown field",
		"apiVersion: ray.io/v1\nkind: RayCluster\nspec: {headGroupSpec: {template: {spec: {containers: [{name: a, resources: {claims: [{name: b}]}}]}}}}\n":            "uses claim b",
		"apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {containers: [{name: a, resources: {claims: [{name: b}]}}]}\n":                                          "uses claim b",
		"replicas: 3\n":     "begins with replicas",
		"something: else\n": "begins with something",
		"# values of NVIDIA's GPU Operator\nsomething: else\n": "",
		"a: [\n": "decode it",
	} {
		err := checkYAML(r, text)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s\n%v, want %q", text, err, want)
		}
	}
}
