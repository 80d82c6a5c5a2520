// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	v1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"

	"github.com/partage-dev/partage/test/monitoring/fleet"
	"github.com/partage-dev/partage/test/monitoring/grafana"
)

// page is what src/page.jsx draws.
type page struct {
	Title     string     `json:"title"`
	Variables []variable `json:"variables"`
	// Range is the time range, in seconds.
	Range  [2]int64 `json:"range"`
	Panels []panel  `json:"panels"`
}

type variable struct {
	Label string `json:"label"`
	Value string `json:"value"`
}

type panel struct {
	grafana.Panel
	Results []result `json:"results"`
}

// result is the answer to a query, as Prometheus gives it.
type result struct {
	Target grafana.Target `json:"target"`
	Result model.Value    `json:"result"`
}

// load asks all queries of a dashboard.
func load(ctx context.Context, api v1.API, d grafana.Dashboard, chosen map[string]string) (page, error) {
	start := fleet.End.Add(-shown)
	p := page{Title: d.Title, Range: [2]int64{start.Unix(), fleet.End.Unix()}}
	values, err := d.Resolve(ctx, api, fleet.End, chosen)
	if err != nil {
		return page{}, err
	}
	for _, v := range d.Templating.List {
		value := "Prometheus"
		if all, ok := values[v.Name]; ok {
			value = all[0]
			if v.IncludeAll {
				value = "All"
			}
		}
		p.Variables = append(p.Variables, variable{v.Label, value})
	}
	for _, one := range d.Expand(values) {
		drawn := panel{Panel: one}
		for _, target := range one.Targets {
			value, err := ask(ctx, api, target, start)
			if err != nil {
				return page{}, fmt.Errorf("panel %q: %w in\n%s", one.Title, err, target.Expr)
			}
			drawn.Results = append(drawn.Results, result{target, value})
		}
		p.Panels = append(p.Panels, drawn)
	}
	return p, nil
}

// ask asks one query.
func ask(ctx context.Context, api v1.API, target grafana.Target, start time.Time) (model.Value, error) {
	if target.Instant {
		value, _, err := api.Query(ctx, target.Expr, fleet.End)
		return value, err
	}
	value, _, err := api.QueryRange(ctx, target.Expr, v1.Range{Start: start, End: fleet.End, Step: time.Minute})
	return value, err
}

// height is how high the page is, in pixels.
func (p page) height() int {
	rows := 0
	for _, one := range p.Panels {
		rows = max(rows, one.GridPos.Y+one.GridPos.H)
	}
	return header + rows*cell + gap
}
