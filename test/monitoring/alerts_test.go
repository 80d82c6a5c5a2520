// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// alerts returns all alerts of a file of rules, and fails for what is none.
func alerts(t *testing.T, rules ruleFile) []rule {
	t.Helper()
	var all []rule
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if r.Alert == "" {
				t.Errorf("group %s: rule %s is not an alert", g.Name, r.Record)
			}
			all = append(all, r)
		}
	}
	return all
}

// TestRules: Prometheus takes the rules, and every alert says how bad it is, what it is,
// what to do, and where to read more.
func TestRules(t *testing.T) {
	dir := t.TempDir()
	rules := shipped(t, "partage", "partage")
	writeYAML(t, dir, "rules.yaml", rules)
	promtool(t.Context(), t, dir, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")

	all := alerts(t, rules)
	for _, a := range all {
		if !slices.Contains([]string{"critical", "warning", "info"}, a.Labels["severity"]) {
			t.Errorf("%s: severity %q", a.Alert, a.Labels["severity"])
		}
		for _, name := range []string{"summary", "description", "runbook_url"} {
			if a.Annotations[name] == "" {
				t.Errorf("%s: no %s", a.Alert, name)
			}
		}
		if len(a.Annotations["summary"]) > 120 {
			t.Errorf("%s: the summary is no summary: %s", a.Alert, a.Annotations["summary"])
		}
	}
	if t.Logf("%d cases", len(all)); len(all) < 12 {
		t.Errorf("only %d alerts", len(all))
	}
}

// promtoolTest is what is looked at of a test for promtool.
type promtoolTest struct {
	Tests []struct {
		AlertRuleTest []struct {
			AlertName string `json:"alertname"`
			ExpAlerts []any  `json:"exp_alerts"`
		} `json:"alert_rule_test"`
	} `json:"tests"`
}

// TestAlerts: every alert fires when it should, with the right text, and does not when it
// should not. Each has a file of that, in testdata/alerts.
func TestAlerts(t *testing.T) {
	rules := shipped(t, "partage", "partage")
	files, err := filepath.Glob("testdata/alerts/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, a := range alerts(t, rules) {
		names = append(names, a.Alert)
	}
	cases := 0
	for _, file := range files {
		alert := strings.TrimSuffix(filepath.Base(file), ".yaml")
		if !slices.Contains(names, alert) {
			t.Errorf("%s: there is no such alert", file)
		}
		names = slices.DeleteFunc(names, func(name string) bool { return name == alert })
		t.Run(alert, func(t *testing.T) {
			dir := t.TempDir()
			writeYAML(t, dir, "rules.yaml", rules)
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "test.yaml"), data, 0o600); err != nil {
				t.Fatal(err)
			}
			promtool(t.Context(), t, dir, "test", "rules", "test.yaml")

			var test promtoolTest
			if err := yaml.Unmarshal(data, &test); err != nil {
				t.Fatal(err)
			}
			fires, silent := 0, 0
			for _, one := range test.Tests {
				for _, check := range one.AlertRuleTest {
					switch {
					case check.AlertName != alert:
						t.Errorf("it tests %s", check.AlertName)
					case len(check.ExpAlerts) > 0:
						fires++
					default:
						silent++
					}
				}
			}
			if cases += fires + silent; fires == 0 || silent == 0 {
				t.Errorf("it looks %d times at the alert firing and %d times at it not firing, want both", fires, silent)
			}
		})
	}
	if len(names) > 0 {
		t.Errorf("no file in testdata/alerts for %v", names)
	}
	t.Logf("%d cases", cases)
}

// TestHealthyIdleCluster: no alert fires where all is well and nothing happens.
func TestHealthyIdleCluster(t *testing.T) {
	dir := t.TempDir()
	writeYAML(t, dir, "rules.yaml", shipped(t, "partage", "partage"))
	data, err := os.ReadFile("testdata/healthy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "test.yaml"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t.Context(), t, dir, "test", "rules", "test.yaml")

	// Every metric that an alert looks at is in it.
	metric := regexp.MustCompile(`\b(partage_\w+|kube_\w+|up)\b[{\[ )]`)
	for _, a := range alerts(t, shipped(t, "partage", "partage")) {
		for _, found := range metric.FindAllStringSubmatch(a.Expr+" ", -1) {
			if !strings.Contains(string(data), "'"+found[1]+"{") {
				t.Errorf("testdata/healthy.yaml has no %s, which %s looks at", found[1], a.Alert)
			}
		}
	}
}

// TestRelease: the alerts about the driver itself are about that of the release.
func TestRelease(t *testing.T) {
	all := alerts(t, shipped(t, "team-a", "gpus"))
	found := 0
	for _, a := range all {
		text := a.Expr + a.Annotations["description"]
		if strings.Contains(text, `namespace="partage"`) || regexp.MustCompile(`\bpartage-(gpu-kubelet-plugin|mps-supervisor)`).MatchString(strings.ReplaceAll(text, "team-a-partage-", "")) {
			t.Errorf("%s is about another release:\n%s", a.Alert, text)
		}
		if strings.Contains(text, `namespace="gpus", pod=~"team-a-partage-gpu-kubelet-plugin-.+"`) {
			found++
		}
	}
	if found < 2 {
		t.Errorf("%d alerts look at the pods of the release, want 2 at least", found)
	}
	without := render(t, "alerts.yaml", "partage", "partage", "alerts.create=Always", "alerts.disabled={PartageClaimIdle}", "alerts.labels.release=prometheus")
	if got := len(alerts(t, without[0].Spec)); got != len(all)-1 {
		t.Errorf("%d alerts without one of %d", got, len(all))
	}
	if without[0].Metadata.Labels["release"] != "prometheus" {
		t.Errorf("labels %v", without[0].Metadata.Labels)
	}
}

// TestPageOfAlerts: docs/monitoring.md lists the alerts as they are, and the pages that
// they point to exist.
func TestPageOfAlerts(t *testing.T) {
	page, err := os.ReadFile(root + "/docs/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(page), "<!-- alerts -->\n")
	table, _, ok2 := strings.Cut(rest, "<!-- end -->")
	if !ok || !ok2 {
		t.Fatal("docs/monitoring.md has no table between <!-- alerts --> and <!-- end -->")
	}
	var want strings.Builder
	want.WriteString("\n| Alert | Severity | After | Says | What to do |\n|---|---|---|---|---|\n")
	label := regexp.MustCompile(`\{\{ *\$labels\.(\w+) *\}\}`)
	for _, a := range alerts(t, shipped(t, "partage", "partage")) {
		after := a.For
		if after == "" {
			after = "at once"
		}
		says := label.ReplaceAllString(a.Annotations["summary"], "*$1*")
		_, anchor, _ := strings.Cut(a.Annotations["runbook_url"], "/docs/operations.md#")
		fmt.Fprintf(&want, "| `%s` | %s | %s | %s | [%s](operations.md#%s) |\n", a.Alert, a.Labels["severity"], after, says, strings.ReplaceAll(anchor, "-", " "), anchor)
	}
	want.WriteString("\n")
	if diff := cmp.Diff(want.String(), table); diff != "" {
		t.Errorf("docs/monitoring.md: the table of alerts: -want +got:\n%s\nIt should be\n%s", diff, want.String())
	}
}
