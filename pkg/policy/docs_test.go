// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/docs/schema"
	"github.com/partage-dev/partage/test/expect"
)

const policyPage = "docs/reference/policy.md"

// TestDocs writes the fields of a policy into their page, or compares it. All of it is in
// schema.json, which other tests hold to what Decode accepts.
func TestDocs(t *testing.T) {
	w := schemaWalk{t: t, written: map[string]bool{}}
	w.section(PolicyKind, schema.Load(t, "schema.json"))
	if t.Logf("%d cases", w.fields); w.fields < 30 {
		t.Errorf("only %d fields", w.fields)
	}
	page.Generated(t, *update, policyPage, w.text.String())
}

// schemaWalk writes a section for each object of a schema.
type schemaWalk struct {
	t       *testing.T
	text    strings.Builder
	fields  int
	written map[string]bool
}

// section writes a section, and then those of the objects in it that have none yet.
func (w *schemaWalk) section(title string, s *schema.Schema) {
	w.written[title] = true
	table := page.NewTable("field", "type", "default", "meaning")
	var titles []string
	objects := map[string]*schema.Schema{}
	for _, name := range s.Properties() {
		w.fields++
		p := s.Property(name)
		meaning, kind := strings.TrimSuffix(p.Text("description"), "."), p.Type()
		if meaning == "" {
			w.t.Errorf("%s of %s has no description", name, title)
		}
		if sub, object := objectOf(title, name, p); object != nil {
			titles, objects[sub] = append(titles, sub), object
			kind = fmt.Sprintf("[%s](#%s)", sub, anchor(sub))
			if p.Items() != nil {
				kind = "list of " + kind
			}
		}
		if s.Requires(name) {
			kind += "; required"
		}
		value := p.Default()
		if value != "" {
			value = page.Code(value)
		}
		table.Row(page.Code(name), kind, value, meaning)
	}
	fmt.Fprintf(&w.text, "### %s\n\n", title)
	if says := s.Text("description"); says != "" {
		fmt.Fprintf(&w.text, "%s\n\n", says)
	}
	fmt.Fprintf(&w.text, "%s\n", table)
	for _, sub := range titles {
		if !w.written[sub] {
			w.section(sub, objects[sub])
		}
	}
}

// objectOf is the object that a property is, or is a list of, if any, with the title of its
// section: the name of its definition, or its path.
func objectOf(title, name string, p *schema.Schema) (sub string, object *schema.Schema) {
	object = p
	if items := p.Items(); items != nil {
		object = items
	}
	switch {
	case len(object.Properties()) == 0:
		return "", nil
	case object.Ref != "":
		return object.Ref, object
	case title == PolicyKind:
		return name, object
	}
	return title + "." + name, object
}

// anchor is GitHub's for a heading.
func anchor(title string) string { return strings.ReplaceAll(strings.ToLower(title), ".", "") }

// everything has every section of a policy, and no values.
const everything = head + `default: {mig: {shares: [{profiles: [1g.10gb], mps: {}, timeslice: {}}]}, mps: {}, timeslice: {}}
health: {}
`

// TestDefaults: a value that the schema has as the default changes nothing.
func TestDefaults(t *testing.T) {
	want := decoded(t, everything)
	defaults := 0
	root := schema.Load(t, "schema.json")
	offer, health := root.Property("default"), root.Property("health")
	shares := offer.Property("mig").Property("shares").Items()
	for place, s := range map[string]*schema.Schema{
		"default: {": offer, "mig: {": offer.Property("mig"), "}, mps: {": offer.Property("mps"), "}, timeslice: {": offer.Property("timeslice"),
		"[1g.10gb], mps: {": shares.Property("mps"), "[1g.10gb], mps: {}, timeslice: {": shares.Property("timeslice"), "health: {": health,
	} {
		for _, name := range s.Properties() {
			value := s.Property(name).Default()
			if value == "" {
				continue
			}
			defaults++
			entry := fmt.Sprintf("%s%s: %s, ", place, name, value)
			at := strings.LastIndex(everything, place)
			text := everything[:at] + entry + everything[at+len(place):]
			expect.Same(t, decoded(t, text), want, entry)
		}
	}
	quietPeriod := fmt.Sprintf("duration, %s to %s", page.Duration(minQuietPeriod), page.Duration(maxQuietPeriod))
	expect.Same(t, health.Property("quietPeriod").Type(), quietPeriod, "type of the quiet period")
	if t.Logf("%d cases", defaults); defaults < 15 {
		t.Errorf("only %d defaults", defaults)
	}
}

// decoded is a policy, with what is empty and stands for something written out.
func decoded(t *testing.T, text string) *Policy {
	t.Helper()
	p, err := Decode([]byte(text))
	if err != nil {
		t.Fatalf("%v:\n%s", err, text)
	}
	for _, o := range []*MPSOffer{p.Default.MPS, p.Default.Partition.Shares[0].MPS} {
		o.OnClientKilled, o.ClientPriority = cmp.Or(o.OnClientKilled, KilledReport), cmp.Or(o.ClientPriority, PriorityNormal)
	}
	return p
}

// TestExamples: the policies of the page are valid.
func TestExamples(t *testing.T) {
	s := compiled(t)
	examples := page.Examples(t, policyPage)
	for _, example := range examples {
		if _, err := Decode([]byte(example)); err != nil {
			t.Errorf("%v:\n%s", err, example)
		}
		if err := validate(t, s, []byte(example)); err != nil {
			t.Errorf("%v:\n%s", err, example)
		}
	}
	if t.Logf("%d cases", len(examples)); len(examples) == 0 {
		t.Error("no policies")
	}
}
