//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/monitoring/prometheus"
)

// metricsPort is the chart's default.
const metricsPort = "9485"

// watcher is a Prometheus that scrapes the plugin of the node and has the chart's alerts.
type watcher struct{ *prometheus.Server }

// startWatcher starts a Prometheus beside the pods, which ends with the test.
func startWatcher(t *testing.T) watcher {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "rules.yml"), shortRules(t), 0o600); err != nil {
		t.Fatal(err)
	}
	server, err := prometheus.Run(t.Context(), repoRoot, dir, scrapeConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	return watcher{server}
}

// scrapeConfig is that of docs/how-to/monitoring.md with the plugin's address and labels as they are now.
func scrapeConfig(t *testing.T) []byte {
	t.Helper()
	plugin := driverPod(t, pluginComponent)
	config, err := yaml.Marshal(map[string]any{
		"global":     map[string]any{"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
		"rule_files": []string{"rules.yml"},
		"scrape_configs": []any{map[string]any{
			"job_name": "partage-gpu-kubelet-plugin", "honor_labels": true,
			"static_configs": []any{map[string]any{
				"targets": []string{net.JoinHostPort(plugin.Status.PodIP, metricsPort)},
				"labels":  map[string]string{"node": plugin.Spec.NodeName, "pod": plugin.Name, "namespace": plugin.Namespace},
			}},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return config
}

var minutes = regexp.MustCompile(`\b([0-9]+)m\b`)

// shortRules are the chart's rules with a second for each minute: how long an alert waits before it fires, and how far its expression
// looks back, which is also for how long an alert about errors goes on. The real times are tested by promtool in test/monitoring.
func shortRules(t *testing.T) []byte {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "helm", "template", "partage", filepath.Join(repoRoot, "deployments/helm/partage"), "--namespace", driverNamespace,
		"--show-only", "templates/alerts.yaml", "--set", "alerts.create=Always,image.repository=partage.invalid/x")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("rendering the chart's rules: %v\n%s", err, stderr.String())
	}
	var rules struct {
		Spec struct {
			Groups []struct {
				Name  string           `json:"name"`
				Rules []map[string]any `json:"rules"`
			} `json:"groups"`
		} `json:"spec"`
	}
	if err := yaml.Unmarshal(out, &rules); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	shortened := 0
	for _, g := range rules.Spec.Groups {
		for _, r := range g.Rules {
			for _, field := range []string{"expr", "for"} {
				if text, ok := r[field].(string); ok && minutes.MatchString(text) {
					r[field] = minutes.ReplaceAllString(text, "${1}s")
					shortened++
				}
			}
		}
	}
	if shortened == 0 {
		t.Fatalf("the chart's rules have no minutes:\n%s", out)
	}
	short, err := json.Marshal(rules.Spec) // JSON is YAML
	if err != nil {
		t.Fatal(err)
	}
	return short
}

// ask returns the result of a query.
func (w watcher) ask(ctx context.Context, query string) (model.Vector, error) {
	value, _, err := w.Query(ctx, query, time.Now())
	if err != nil {
		return nil, fmt.Errorf("asking Prometheus for %s: %w", query, err)
	}
	vector, ok := value.(model.Vector)
	if !ok {
		return nil, fmt.Errorf("asking Prometheus for %s: the answer is a %s", query, value.Type())
	}
	return vector, nil
}

// wait waits until a query has a result, or has none.
func (w watcher) wait(t *testing.T, query string, want bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("Prometheus to have a result of %s: %v", query, want), func(ctx context.Context) (bool, string) {
		got, err := w.ask(ctx, query)
		if err != nil {
			return false, err.Error()
		}
		return (len(got) > 0) == want, fmt.Sprint(got)
	})
}

// firing selects an alert that fires, on a GPU or, without one, on the node.
func firing(alert, address string) string {
	return fmt.Sprintf(`ALERTS{alertname=%q, alertstate="firing", gpu=%q}`, alert, address)
}

// waitFired waits until an alert fires, or has fired since the test began.
func (w watcher) waitFired(t *testing.T, alert, address string) {
	t.Helper()
	w.wait(t, fmt.Sprintf("last_over_time(%s[1h])", firing(alert, address)), true)
}

// waitEnded waits until no alert is active on a GPU, or on the node.
func (w watcher) waitEnded(t *testing.T, address string) {
	t.Helper()
	eventually(t, "the end of all alerts of GPU "+address, func(ctx context.Context) (bool, string) {
		result, err := w.Alerts(ctx)
		if err != nil {
			return false, err.Error()
		}
		seen := ""
		for _, a := range result.Alerts {
			if string(a.Labels["gpu"]) == address {
				seen += a.Labels.String() + " " + string(a.State) + "; "
			}
		}
		return seen == "", seen
	})
}

// wantNone fails the test if there ever was an alert about a GPU.
func (w watcher) wantNone(t *testing.T, address string) {
	t.Helper()
	if got, err := w.ask(t.Context(), fmt.Sprintf("last_over_time(ALERTS{gpu=%q}[1h])", address)); err != nil || len(got) > 0 {
		t.Errorf("alerts about GPU %s, with which nothing is wrong: %v, %v", address, got, err)
	}
}
