// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package monitoring tests the alerts and dashboards of the chart as the chart delivers
// them, with Prometheus' own programs.
package monitoring

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/monitoring/prometheus"
)

const (
	root  = "../.."
	chart = root + "/deployments/helm/partage"
)

// object is what is looked at of an object that the chart renders.
type object struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name      string            `json:"name"`
		Namespace string            `json:"namespace"`
		Labels    map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec ruleFile          `json:"spec"`
	Data map[string]string `json:"data"`
}

// ruleFile is a file of rules, and the spec of a PrometheusRule.
type ruleFile struct {
	Groups []group `json:"groups"`
}

type group struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

type rule struct {
	Alert       string            `json:"alert,omitempty"`
	Record      string            `json:"record,omitempty"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// render returns the objects of a template, with values as helm's --set takes them.
func render(t *testing.T, template, release, namespace string, values ...string) []object {
	t.Helper()
	helm := os.Getenv("HELM")
	if helm == "" {
		helm = root + "/_output/cluster/bin/helm"
	}
	args := []string{"template", release, chart, "--namespace", namespace, "--show-only", "templates/" + template, "--set", "image.repository=example.com/x"}
	for _, value := range values {
		args = append(args, "--set", value)
	}
	cmd := exec.CommandContext(t.Context(), helm, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("helm %v (make test-monitoring builds helm): %v\n%s", args, err, stderr.String())
	}
	var objects []object
	for document := range strings.SplitSeq(string(out), "\n---\n") {
		var o object
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		if o.Kind != "" {
			objects = append(objects, o)
		}
	}
	return objects
}

// shipped returns the rules that the chart delivers, as a file of rules.
func shipped(t *testing.T, release, namespace string) ruleFile {
	t.Helper()
	objects := render(t, "alerts.yaml", release, namespace, "alerts.create=Always")
	if len(objects) != 1 || objects[0].Kind != "PrometheusRule" {
		t.Fatalf("the chart makes %v, want one PrometheusRule", objects)
	}
	return objects[0].Spec
}

// writeYAML writes a value into a file of a folder.
func writeYAML(t *testing.T, dir, name string, value any) {
	t.Helper()
	data, err := yaml.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, name, string(data))
}

// write writes a file of a folder.
func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// promtool runs promtool, which must find nothing wrong.
func promtool(ctx context.Context, t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, err := prometheus.Promtool(ctx, root, dir, args...)
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return out
}

// read returns the text of a file.
func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// glob returns the files of a pattern, of which there must be some.
func glob(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no files %s: %v", pattern, err)
	}
	return files
}
