// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package grafana

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
)

// Values are the values of variables. More than one is all of them, or several chosen.
type Values map[string][]string

// rateInterval is what $__rate_interval stands for with samples every minute.
const rateInterval = "4m"

var (
	reference   = regexp.MustCompile(`\$(?:(\w+)|\{(\w+)\})`)
	labelValues = regexp.MustCompile(`^label_values\((.*), *(\w+)\)$`)
)

// Resolve asks for the values of all variables at a time. Of those that cannot be several,
// the one in chosen is taken, or else the first.
func (d Dashboard) Resolve(ctx context.Context, api v1.API, at time.Time, chosen map[string]string) (Values, error) {
	values := Values{}
	for _, variable := range d.Templating.List {
		if variable.Type != "query" {
			continue
		}
		parts := labelValues.FindStringSubmatch(variable.Definition)
		if parts == nil {
			return nil, fmt.Errorf("variable %s: %q is not label_values(selector, label)", variable.Name, variable.Definition)
		}
		found, _, err := api.LabelValues(ctx, parts[2], []string{values.inQuery(parts[1])}, at.Add(-5*time.Minute), at)
		if err != nil {
			return nil, fmt.Errorf("variable %s: %w", variable.Name, err)
		}
		options := texts(found)
		slices.Sort(options)
		want, isChosen := chosen[variable.Name]
		switch {
		case len(options) == 0:
			return nil, fmt.Errorf("variable %s: there is nothing to choose from", variable.Name)
		case isChosen && !slices.Contains(options, want):
			return nil, fmt.Errorf("variable %s: there is no %s; there are %v", variable.Name, want, options)
		case isChosen:
			options = []string{want}
		case !variable.IncludeAll:
			options = options[:1]
		}
		values[variable.Name] = options
	}
	return values, nil
}

func texts(values model.LabelValues) []string {
	all := make([]string, 0, len(values))
	for _, value := range values {
		all = append(all, string(value))
	}
	return all
}

// inQuery puts values into a query: several as a regular expression.
func (v Values) inQuery(query string) string {
	return v.replace(query, func(values []string) string {
		if len(values) == 1 {
			return values[0]
		}
		quoted := make([]string, len(values))
		for i, value := range values {
			quoted[i] = strings.ReplaceAll(regexp.QuoteMeta(value), `\`, `\\`)
		}
		return "(" + strings.Join(quoted, "|") + ")"
	})
}

// inText puts values into a text.
func (v Values) inText(text string) string {
	return v.replace(text, func(values []string) string { return strings.Join(values, " + ") })
}

func (v Values) replace(text string, with func(values []string) string) string {
	return reference.ReplaceAllStringFunc(text, func(found string) string {
		parts := reference.FindStringSubmatch(found)
		name := parts[1] + parts[2]
		if values, ok := v[name]; ok {
			return with(values)
		}
		if name == "__rate_interval" {
			return rateInterval
		}
		return found
	})
}
