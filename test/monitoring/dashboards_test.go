// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"

	"github.com/partage-dev/partage/test/monitoring/fleet"
	"github.com/partage-dev/partage/test/monitoring/grafana"
	"github.com/partage-dev/partage/test/monitoring/prometheus"
)

// corePanels come with every Grafana. @grafana/ui has what draws them, so that
// test/dashboard can.
var corePanels = []string{"row", "stat", "bargauge", "table", "timeseries"}

// dashboards returns those that the chart delivers, which must be its files, by name.
func dashboards(t *testing.T) map[string]grafana.Dashboard {
	t.Helper()
	files := glob(t, chart+"/dashboards/*.json")
	objects := render(t, "dashboards.yaml", "partage", "partage", "dashboards.create=Always")
	all := map[string]grafana.Dashboard{}
	for _, o := range objects {
		if o.Kind != "ConfigMap" || o.Metadata.Labels["grafana_dashboard"] != "1" || len(o.Data) != 1 {
			t.Errorf("%s %s with labels %v and %d files, want a ConfigMap that Grafana's sidecar loads", o.Kind, o.Metadata.Name, o.Metadata.Labels, len(o.Data))
		}
		for name, data := range o.Data {
			name = strings.TrimPrefix(name, "partage-")
			if strings.TrimSpace(data) != strings.TrimSpace(read(t, filepath.Join(chart, "dashboards", name))) {
				t.Errorf("ConfigMap %s: it is not what the file %s has", o.Metadata.Name, name)
			}
			d, err := grafana.Parse(name, []byte(data))
			if err != nil {
				t.Fatal(err)
			}
			all[strings.TrimSuffix(name, ".json")] = d
		}
	}
	if len(all) != len(files) || len(all) < 3 {
		t.Errorf("%d dashboards in the chart's objects, %d files; want as many, and 3 at least", len(all), len(files))
	}
	return all
}

// TestDashboards: the dashboards work with any Grafana and data source, and explain
// themselves.
func TestDashboards(t *testing.T) {
	all := dashboards(t)
	for name, d := range all {
		checkLinks(t, name, all)
		if d.UID != "partage-"+name || d.Title == "" || d.Description == "" || !slices.Contains(d.Tags, "partage") {
			t.Errorf("%s: UID %q, title %q, description %q, tags %v", name, d.UID, d.Title, d.Description, d.Tags)
		}
		if len(d.Links) != 1 || d.Links[0].Type != "dashboards" || !slices.Equal(d.Links[0].Tags, []string{"partage"}) {
			t.Errorf("%s: links %v, want one to the other dashboards", name, d.Links)
		}
		for i, v := range d.Templating.List {
			switch {
			case i == 0 && v.Type == "datasource" && v.Name == "datasource":
			case i > 0 && v.Type == "query" && v.Datasource != nil && v.Datasource.UID == "${datasource}" && v.Label != "":
			default:
				t.Errorf("%s: variable %s of type %s: want a datasource first, then queries of it", name, v.Name, v.Type)
			}
		}
		checkPanels(t, name, d.Panels)
	}
}

var (
	dataLink     = regexp.MustCompile(`"/d/([^?"]*)\?([^"]*)"`)
	linkVariable = regexp.MustCompile(`\bvar-(\w+)=`)
)

// checkLinks: links of data lead to dashboards that exist and set variables that these have.
func checkLinks(t *testing.T, name string, all map[string]grafana.Dashboard) {
	t.Helper()
	links := dataLink.FindAllStringSubmatch(read(t, filepath.Join(chart, "dashboards", name+".json")), -1)
	for _, link := range links {
		to, ok := all[strings.TrimPrefix(link[1], "partage-")]
		if !ok {
			t.Errorf("%s: a link leads to the dashboard %s", name, link[1])
		}
		for _, set := range linkVariable.FindAllStringSubmatch(link[2], -1) {
			if !slices.ContainsFunc(to.Templating.List, func(v grafana.Variable) bool { return v.Name == set[1] }) {
				t.Errorf("%s: a link to %s sets the variable %s, which is not there", name, link[1], set[1])
			}
		}
	}
	if len(links) == 0 {
		t.Errorf("%s: no links to what is shown", name)
	}
}

// checkPanels: panels are of known types and do not overlap.
func checkPanels(t *testing.T, name string, panels []grafana.Panel) {
	t.Helper()
	ids, cells := map[int]bool{}, map[[2]int]string{}
	for _, p := range panels {
		if ids[p.ID] {
			t.Errorf("%s: panel %q: the ID %d is another's, too", name, p.Title, p.ID)
		}
		ids[p.ID] = true
		if !slices.Contains(corePanels, p.Type) || p.Title == "" || len(p.Transformations) > 0 {
			t.Errorf("%s: panel %q: type %s, transformations %s; want one of %v, and none", name, p.Title, p.Type, p.Transformations, corePanels)
		}
		if p.Type != "row" && (p.Description == "" || p.Datasource == nil || p.Datasource.UID != "${datasource}") {
			t.Errorf("%s: panel %q: want a description, and the datasource of the variable", name, p.Title)
		}
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := cells[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("%s: panels %q and %q overlap, or are too wide", name, p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
	}
}

// hour is the last one of the recording.
func hour(w io.Writer) error { return fleet.Write(w, time.Hour, time.Minute) }

// TestPanels: every query of every panel returns data of a fleet, for each of the values
// that the variables can have, or for all at once.
func TestPanels(t *testing.T) {
	all := dashboards(t)
	server, err := prometheus.Start(t.Context(), root, t.TempDir(), hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	queries := 0
	for name, d := range all {
		// A node whose GPUs have all that can be seen: a condition, throttling, shares.
		data := map[string]bool{}
		for _, chosen := range choices(t, server, name) {
			values, err := d.Resolve(t.Context(), server, fleet.End, chosen)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			for _, p := range d.Expand(values) {
				for _, target := range p.Targets {
					n, err := samples(t.Context(), server, target)
					if queries++; err != nil {
						t.Errorf("%s: panel %q: %v in\n%s", name, p.Title, err, target.Expr)
					}
					key := fmt.Sprintf("%d %s", p.ID, target.RefID)
					data[key] = data[key] || n > 0
				}
			}
		}
		for _, p := range d.Panels {
			for _, target := range p.Targets {
				if key := fmt.Sprintf("%d %s", p.ID, target.RefID); !data[key] {
					t.Errorf("%s: panel %q: no data ever for\n%s", name, p.Title, target.Expr)
				}
			}
		}
	}
	t.Logf("%d cases", queries)
}

// TestFleetAlerts: what fires in the fleet is what the rules say of it. All of it has lasted for long enough.
func TestFleetAlerts(t *testing.T) {
	server, err := prometheus.Start(t.Context(), root, t.TempDir(), hour)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	firing := 0
	for _, a := range alerts(t, shipped(t, "partage", "partage")) {
		want, err := samples(t.Context(), server, grafana.Target{Expr: a.Expr, Instant: true})
		if err != nil {
			t.Fatal(err)
		}
		got, err := samples(t.Context(), server, grafana.Target{Expr: fmt.Sprintf("ALERTS{alertname=%q}", a.Alert), Instant: true})
		if err != nil || got != want {
			t.Errorf("%s: fires %d times in the fleet, %v, and %d times by the rule", a.Alert, got, err, want)
		}
		firing += got
	}
	if t.Logf("%d cases", firing); firing < 3 {
		t.Errorf("only %d alerts fire", firing)
	}
}

// choices are the values of the variables of a dashboard that is about one node or claim.
func choices(t *testing.T, api v1.API, dashboard string) (all []map[string]string) {
	t.Helper()
	of := func(label, selector string) []string {
		found, _, err := api.LabelValues(t.Context(), label, []string{selector}, fleet.End.Add(-time.Minute), fleet.End)
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, value := range found {
			texts = append(texts, string(value))
		}
		return texts
	}
	switch dashboard {
	case "node":
		for _, node := range of("node", "partage_gpu_info") {
			all = append(all, map[string]string{"node": node})
		}
	case "claim":
		for _, namespace := range of("namespace", "partage_claim_info") {
			for _, claim := range of("resourceclaim_name", fmt.Sprintf("partage_claim_info{namespace=%q}", namespace)) {
				all = append(all, map[string]string{"namespace": namespace, "claim": claim})
			}
		}
	default:
		all = append(all, nil)
	}
	return all
}

// samples returns how many values the query of a panel has.
func samples(ctx context.Context, api v1.API, target grafana.Target) (int, error) {
	if target.Instant {
		value, _, err := api.Query(ctx, target.Expr, fleet.End)
		if err != nil {
			return 0, err
		}
		vector, ok := value.(model.Vector)
		if !ok {
			return 0, fmt.Errorf("it returns a %s", value.Type())
		}
		return len(vector), nil
	}
	value, _, err := api.QueryRange(ctx, target.Expr, v1.Range{Start: fleet.End.Add(-30 * time.Minute), End: fleet.End, Step: time.Minute})
	if err != nil {
		return 0, err
	}
	matrix, ok := value.(model.Matrix)
	if !ok {
		return 0, fmt.Errorf("it returns a %s", value.Type())
	}
	return len(matrix), nil
}
