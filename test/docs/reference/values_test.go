// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package reference

import (
	"flag"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/docs/schema"
)

var update = flag.Bool("update", false, "rewrite the documentation")

const chart = "deployments/helm/partage"

// TestValues writes the values of the chart into their page, or compares it. What is said of a
// value is the comment above it in values.yaml, its type comes from values.schema.json.
func TestValues(t *testing.T) {
	document := &yaml.Node{}
	if err := yaml.Unmarshal([]byte(page.Read(t, chart+"/values.yaml")), document); err != nil {
		t.Fatal(err)
	}
	w := valueWalk{t: t}
	w.section(part{values: document.Content[0], schema: schema.Load(t, filepath.Join(page.Root(t), chart, "values.schema.json"))})
	if t.Logf("%d cases", w.values); w.values < 90 {
		t.Errorf("only %d values", w.values)
	}
	page.Generated(t, *update, "docs/reference/helm-values.md", w.text.String())
}

// valueWalk writes a section for each value that has values below it.
type valueWalk struct {
	t      *testing.T
	text   strings.Builder
	values int
}

// part is a value with values below it.
type part struct {
	name, says string
	values     *yaml.Node
	schema     *schema.Schema
}

// section writes the values below one, first those that have none below them.
func (w *valueWalk) section(p part) {
	if p.name != "" {
		fmt.Fprintf(&w.text, "%s\n\n", strings.TrimSpace("### "+p.name+"\n\n"+p.says))
	}
	table := page.NewTable("value", "type", "default", "meaning")
	before := w.values
	sections := w.rows(table, p)
	if w.values > before {
		fmt.Fprintf(&w.text, "%s\n", table)
	}
	for _, section := range sections {
		w.section(section)
	}
}

// rows adds a row for each value, and returns what gets a section of its own: what is at the
// top, or has a description.
func (w *valueWalk) rows(table *page.Table, p part) []part {
	var sections []part
	for _, name := range p.schema.Properties() {
		if name != "global" && !slices.ContainsFunc(p.values.Content, func(key *yaml.Node) bool { return key.Value == name }) {
			w.t.Errorf("values.yaml does not have %s of %q, which values.schema.json takes", name, p.name)
		}
	}
	for i := 0; i < len(p.values.Content); i += 2 {
		key, value := p.values.Content[i], p.values.Content[i+1]
		sub := part{strings.TrimPrefix(p.name+"."+key.Value, "."), description(key.HeadComment), value, p.schema.Property(key.Value)}
		if sub.schema == nil {
			w.t.Errorf("values.schema.json does not have %s", sub.name)
		}
		switch {
		case !hasDescriptions(value):
			w.row(table, sub)
		case p.name == "" || sub.says != "":
			sections = append(sections, sub)
		default:
			sections = append(sections, w.rows(table, sub)...)
		}
	}
	return sections
}

func (w *valueWalk) row(table *page.Table, p part) {
	w.values++
	if p.says == "" {
		w.t.Errorf("values.yaml does not say what %s is", p.name)
	}
	kind := p.schema.Type()
	if p.schema.Ref == "sharingPolicy" {
		kind = "[SharingPolicy](policy.md)"
	}
	table.Row(page.Code(p.name), kind, page.Code(schema.Flow(p.values)), strings.TrimSuffix(p.says, "."))
}

// hasDescriptions reports whether a value is a section: values below it are described. Others,
// such as resources, are what Kubernetes says.
func hasDescriptions(value *yaml.Node) bool {
	if value.Kind != yaml.MappingNode {
		return false
	}
	for i := 0; i < len(value.Content); i += 2 {
		if value.Content[i].HeadComment != "" || hasDescriptions(value.Content[i+1]) {
			return true
		}
	}
	return false
}

var (
	docsPath = regexp.MustCompile(`docs/[a-z-]+/[a-z-]+\.(?:md|yaml)`)
	// Markdown would take these for HTML.
	html = strings.NewReplacer("<", "&lt;", ">", "&gt;")
)

// description is a comment as Markdown. Only what is not separated from the value by an empty
// line is about it, and lines that are indented further are an example.
func description(comment string) string {
	paragraphs := strings.Split(comment, "\n\n")
	var text, example []string
	for line := range strings.Lines(paragraphs[len(paragraphs)-1]) {
		line = strings.TrimRight(strings.TrimPrefix(strings.TrimSpace(line), "#"), " \n")
		if strings.HasPrefix(line, "   ") {
			example = append(example, html.Replace(strings.TrimPrefix(line, "   ")))
			continue
		}
		text = append(text, strings.TrimSpace(line))
	}
	says := docsPath.ReplaceAllStringFunc(html.Replace(strings.Join(text, " ")), func(found string) string {
		return fmt.Sprintf("[%s](../%s)", path.Base(found), strings.TrimPrefix(found, "docs/"))
	})
	if len(example) > 0 {
		says += "<pre>" + strings.ReplaceAll(strings.Join(example, "<br>"), "  ", "&nbsp;&nbsp;") + "</pre>"
	}
	return says
}
