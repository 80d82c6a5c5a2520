// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var (
	componentLabel = regexp.MustCompile(`\bapp\.kubernetes\.io/component=([a-z-]+)`)
	chartObject    = regexp.MustCompile(`\b(?:daemonset|job)s?/(partage-[a-z-]+)`)
	policySetting  = regexp.MustCompile("`((?:mig|mps|timeslice)(?:\\.[A-Za-z]+)?: [^`]+|kinds: [^`]+)`")
)

// missingInChart returns the names of objects and components in a page that a rendered chart does not have.
func missingInChart(page, chart string) (wrong []string, names int) {
	for _, found := range componentLabel.FindAllStringSubmatch(page, -1) {
		if names++; !strings.Contains(chart, "app.kubernetes.io/component: "+found[1]+"\n") {
			wrong = append(wrong, found[0])
		}
	}
	for _, found := range chartObject.FindAllStringSubmatch(page, -1) {
		if names++; !strings.Contains(chart, "\n  name: "+found[1]+"\n") {
			wrong = append(wrong, found[0])
		}
	}
	return wrong, names
}

// TestNamesOfChart: DaemonSets, Jobs and components that commands select are those of the chart.
func TestNamesOfChart(t *testing.T) {
	chart, err := os.ReadFile(filepath.Join(root, "deployments/helm/testdata/defaults.golden.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	all := 0
	for path, page := range rawPages(t) {
		wrong, names := missingInChart(page, string(chart))
		all += names
		for _, name := range wrong {
			t.Errorf("%s: the chart has no %s", path, name)
		}
	}
	if t.Logf("%d cases", all); all < 8 {
		t.Errorf("only %d names", all)
	}
	for text, want := range map[string]int{
		"rollout status daemonset/partage-gpu-kubelet-plugin": 0, "rollout status daemonset/partage-kubelet-plugin": 1,
		"app.kubernetes.io/component=mps-supervisor": 0, "app.kubernetes.io/component=supervisor": 1,
	} {
		if wrong, _ := missingInChart(text, string(chart)); len(wrong) != want {
			t.Errorf("%s: %q", text, wrong)
		}
	}
}

// checkSetting: the driver takes a setting of an offer that a sentence names, such as mps.clients: 10.
func checkSetting(text string) error {
	name, value, _ := strings.Cut(text, ": ")
	var content any
	if err := yaml.Unmarshal([]byte(value), &content); err != nil {
		return fmt.Errorf("decode %s: %w", text, err)
	}
	if section, field, is := strings.Cut(name, "."); is {
		name, content = section, map[string]any{field: content}
	}
	return checkPolicy(map[string]any{"default": map[string]any{name: content}})
}

// TestSettingsInProse: settings of the sharing policy that sentences name are right.
func TestSettingsInProse(t *testing.T) {
	settings := 0
	for path, page := range pages(t) {
		if path == "CHANGELOG.md" {
			continue
		}
		for _, found := range policySetting.FindAllStringSubmatch(page, -1) {
			settings++
			if err := checkSetting(found[1]); err != nil {
				t.Errorf("%s: %s: %v", path, found[1], err)
			}
		}
	}
	if t.Logf("%d cases", settings); settings < 12 {
		t.Errorf("only %d settings", settings)
	}
	for text, want := range map[string]bool{
		"mps.onClientKilled: Restart": true, "mps.onClientKilled: Restarts": false, "kinds: [cpu]": false, "mps: {client: 4}": false,
	} {
		if err := checkSetting(text); (err == nil) != want {
			t.Errorf("%s: %v", text, err)
		}
	}
}
