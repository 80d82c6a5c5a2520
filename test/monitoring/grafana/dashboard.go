// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package grafana reads dashboards of Grafana and does with their variables what Grafana
// does: asks for the values, puts them into queries, and repeats panels.
package grafana

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
)

// Dashboard is the part of a dashboard's JSON that is looked at.
type Dashboard struct {
	UID         string   `json:"uid"`
	Title       string   `json:"title"`
	Description string   `json:"description"`
	Tags        []string `json:"tags"`
	Links       []Link   `json:"links"`
	Templating  struct {
		List []Variable `json:"list"`
	} `json:"templating"`
	Panels []Panel `json:"panels"`
}

// Link leads to other dashboards.
type Link struct {
	Type string   `json:"type"`
	Tags []string `json:"tags"`
}

// Variable is a choice that people make.
type Variable struct {
	Type       string          `json:"type"`
	Name       string          `json:"name"`
	Label      string          `json:"label"`
	Definition string          `json:"definition"`
	Datasource *Datasource     `json:"datasource"`
	Query      json.RawMessage `json:"query"`
	IncludeAll bool            `json:"includeAll"`
}

// Datasource says where a panel's data are from.
type Datasource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

// Panel is one panel, or a row, which is a heading.
type Panel struct {
	ID              int             `json:"id"`
	Type            string          `json:"type"`
	Title           string          `json:"title"`
	Description     string          `json:"description"`
	Datasource      *Datasource     `json:"datasource"`
	GridPos         GridPos         `json:"gridPos"`
	Targets         []Target        `json:"targets"`
	Repeat          string          `json:"repeat,omitempty"`
	MaxPerRow       int             `json:"maxPerRow,omitempty"`
	Transformations json.RawMessage `json:"transformations,omitempty"`
	FieldConfig     json.RawMessage `json:"fieldConfig"`
	Options         json.RawMessage `json:"options"`
}

// GridPos is a place in a grid of 24 columns.
type GridPos struct {
	X int `json:"x"`
	Y int `json:"y"`
	W int `json:"w"`
	H int `json:"h"`
}

// Target is one query of a panel.
type Target struct {
	RefID        string      `json:"refId"`
	Expr         string      `json:"expr"`
	LegendFormat string      `json:"legendFormat"`
	Instant      bool        `json:"instant"`
	Format       string      `json:"format"`
	Datasource   *Datasource `json:"datasource"`
}

// Load reads a file.
func Load(path string) (Dashboard, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Dashboard{}, err
	}
	return Parse(path, data)
}

// Parse reads what a file with that name has.
func Parse(name string, data []byte) (Dashboard, error) {
	var d Dashboard
	if err := json.Unmarshal(data, &d); err != nil {
		return Dashboard{}, fmt.Errorf("dashboard %s: %w", name, err)
	}
	return d, nil
}

// Expand returns the panels as Grafana shows them: repeated for the values of a variable,
// with the values in titles and queries.
func (d Dashboard) Expand(values Values) []Panel {
	var panels []Panel
	down := 0
	for _, p := range d.Panels {
		p.GridPos.Y += down
		chosen, repeated := values[p.Repeat]
		if p.Repeat == "" || !repeated {
			panels = append(panels, p.with(values))
			continue
		}
		perRow := max(1, min(p.MaxPerRow, len(chosen)))
		height := p.GridPos.H
		for i, value := range chosen {
			one := p
			one.GridPos = GridPos{X: i % perRow * (24 / perRow), Y: p.GridPos.Y + i/perRow*height, W: 24 / perRow, H: height}
			mine := maps.Clone(values)
			mine[p.Repeat] = []string{value}
			panels = append(panels, one.with(mine))
		}
		down += (len(chosen) - 1) / perRow * height
	}
	return panels
}

// with returns the panel with the values of variables.
func (p Panel) with(values Values) Panel {
	p.Title = values.inText(p.Title)
	targets := make([]Target, len(p.Targets))
	for i, target := range p.Targets {
		target.Expr = values.inQuery(target.Expr)
		targets[i] = target
	}
	p.Targets = targets
	return p
}
