// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"encoding/csv"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
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
	files := glob(t, "testdata/alerts/*.yaml")
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
			data := read(t, file)
			write(t, dir, "test.yaml", data)
			promtool(t.Context(), t, dir, "test", "rules", "test.yaml")

			var test promtoolTest
			if err := yaml.Unmarshal([]byte(data), &test); err != nil {
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
	data := read(t, "testdata/healthy.yaml")
	write(t, dir, "test.yaml", data)
	promtool(t.Context(), t, dir, "test", "rules", "test.yaml")

	// Every metric that an alert looks at is in it.
	metric := regexp.MustCompile(`\b(partage_\w+|kube_\w+|up)\b[{\[ )]`)
	for _, a := range alerts(t, shipped(t, "partage", "partage")) {
		for _, found := range metric.FindAllStringSubmatch(a.Expr+" ", -1) {
			if !strings.Contains(data, "'"+found[1]+"{") {
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

// TestXIDs: the alerts about XIDs take those for errors, and for errors of programs, that
// the driver does.
func TestXIDs(t *testing.T) {
	const table = root + "/pkg/policy/xid/xids.csv"
	r := csv.NewReader(strings.NewReader(read(t, table)))
	r.Comment = '#'
	rows, err := r.ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	scopes, effects := map[string]string{}, map[string]string{}
	for _, row := range rows[1:] {
		scopes[row[0]], effects[row[0]] = row[slices.Index(rows[0], "scope")], row[slices.Index(rows[0], "effect")]
	}
	numbers := func(alert, operator string) *regexp.Regexp {
		for _, a := range alerts(t, shipped(t, "partage", "partage")) {
			if found := regexp.MustCompile(`xid` + operator + `"([^"]+)"`).FindStringSubmatch(a.Expr); a.Alert == alert && found != nil {
				return regexp.MustCompile("^(?:" + found[1] + ")$")
			}
		}
		t.Fatalf("%s does not look at xid%s", alert, operator)
		return nil
	}
	ignored, programs := numbers("PartageGPUXIDErrors", "!~"), numbers("PartageProgramXIDErrors", "=~")
	for n := range 1000 {
		xid := strconv.Itoa(n)
		if got, want := ignored.MatchString(xid), effects[xid] == "Ignore"; got != want {
			t.Errorf("XID %s: ignored by the alert: %t, by the driver: %t", xid, got, want)
		}
		if got, want := programs.MatchString(xid), scopes[xid] == "application"; got != want {
			t.Errorf("XID %s: a program's for the alert: %t, for the driver: %t", xid, got, want)
		}
	}
}

// TestRunbooks: the alerts point to headings or anchors that exist.
func TestRunbooks(t *testing.T) {
	const page = "/docs/how-to/troubleshoot.md"
	headings := map[string]bool{}
	for _, found := range regexp.MustCompile(`(?m)^#+ +(.*)$`).FindAllStringSubmatch(read(t, root+page), -1) {
		anchor := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(found[1]), "")
		headings[strings.ReplaceAll(strings.TrimSpace(anchor), " ", "-")] = true
	}
	for _, found := range regexp.MustCompile(`<a id="([^"]*)">`).FindAllStringSubmatch(read(t, root+page), -1) {
		headings[found[1]] = true
	}
	for _, a := range alerts(t, shipped(t, "partage", "partage")) {
		_, anchor, ok := strings.Cut(a.Annotations["runbook_url"], page+"#")
		if !ok || !headings[anchor] {
			t.Errorf("%s: docs/how-to/troubleshoot.md has no heading for %s", a.Alert, a.Annotations["runbook_url"])
		}
	}
}

// TestPageOfAlerts: docs/how-to/monitoring.md lists the alerts as they are.
func TestPageOfAlerts(t *testing.T) {
	_, rest, ok := strings.Cut(read(t, root+"/docs/how-to/monitoring.md"), "<!-- alerts -->\n")
	table, _, ok2 := strings.Cut(rest, "<!-- end -->")
	if !ok || !ok2 {
		t.Fatal("docs/how-to/monitoring.md has no table between <!-- alerts --> and <!-- end -->")
	}
	var want strings.Builder
	want.WriteString("\n| Alert | Severity | After | Says |\n|---|---|---|---|\n")
	label := regexp.MustCompile(`\{\{ *\$labels\.(\w+) *\}\}`)
	for _, a := range alerts(t, shipped(t, "partage", "partage")) {
		after := a.For
		if after == "" {
			after = "at once"
		}
		says := label.ReplaceAllString(a.Annotations["summary"], "*$1*")
		fmt.Fprintf(&want, "| `%s` | %s | %s | %s |\n", a.Alert, a.Labels["severity"], after, says)
	}
	want.WriteString("\n")
	if diff := cmp.Diff(want.String(), table); diff != "" {
		t.Errorf("docs/how-to/monitoring.md: the table of alerts: -want +got:\n%s\nIt should be\n%s", diff, want.String())
	}
}
