// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"flag"
	"go/ast"
	"slices"
	"strings"
	"testing"
	"unicode"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/docs/source"
)

var update = flag.Bool("update", false, "rewrite the documentation")

const configPage = "docs/reference/claim-config.md"

// TestDocs writes the fields of the configurations into their page, or compares it. What is
// said of a field is the comment of its struct's field.
func TestDocs(t *testing.T) {
	w := fieldWalk{t: t, files: source.Files(t, "."), kinds: map[string][]string{}}
	for _, kind := range []string{GpuConfigKind, MigDeviceConfigKind} {
		w.walk(kind, kind, "")
	}
	table := page.NewTable("field", "kind", "type", "meaning")
	for _, row := range w.rows {
		kinds := "both"
		if all := w.kinds[row]; len(all) == 1 {
			kinds = page.Code(all[0])
		}
		cells := strings.Split(row, "\t")
		table.Row(page.Code(cells[0]), kinds, cells[1], cells[2])
	}
	if t.Logf("%d cases", len(w.rows)); len(w.rows) < 10 {
		t.Errorf("only %d fields", len(w.rows))
	}
	page.Generated(t, *update, configPage, table.String())
}

// fieldWalk collects the fields of structs: path, type and meaning, with tabs between them.
type fieldWalk struct {
	t     *testing.T
	files []*ast.File
	rows  []string
	// kinds are the kinds of configurations that have a row.
	kinds map[string][]string
}

func (w *fieldWalk) walk(kind, structure, prefix string) {
	w.t.Helper()
	for _, f := range source.Fields(w.t, w.files, structure) {
		if f.Name == "" || f.Type == "TypeMeta" {
			continue
		}
		path := prefix + f.Name
		meaning, says := strings.CutPrefix(f.Doc, f.Name+" ")
		if !says {
			w.t.Errorf("the comment of %s begins with %q, and not with its name in JSON", path, f.Doc)
		}
		meaning = strings.TrimSuffix(strings.TrimPrefix(meaning, "is "), ".")
		name := strings.TrimPrefix(f.Type, "*")
		shown, isObject := w.typeOf(name)
		if !f.Optional {
			shown += "; required"
		}
		row := strings.Join([]string{path, shown, meaning}, "\t")
		if !slices.Contains(w.rows, row) {
			w.rows = append(w.rows, row)
		}
		w.kinds[row] = append(w.kinds[row], kind)
		if isObject {
			w.walk(kind, name, path+".")
		}
	}
}

// typeOf is the type as users write it.
func (w *fieldWalk) typeOf(name string) (shown string, isObject bool) {
	switch name {
	case "int":
		return "integer", false
	case "bool":
		return "boolean", false
	case "MemoryLimit":
		return "quantity, such as `10Gi`", false
	case "map[string]MemoryLimit":
		return "map of quantities", false
	}
	if values := source.Constants(w.files, name); len(values) > 0 {
		var texts []string
		for _, c := range values {
			texts = append(texts, c.Value)
		}
		return page.Codes(texts), false
	}
	if !unicode.IsUpper(rune(name[0])) {
		w.t.Errorf("what users write for a %s is not known", name)
	}
	return "object", true
}

// TestExamples: the claims of the page are claims, and their configurations are valid.
func TestExamples(t *testing.T) {
	configs := 0
	for _, example := range page.Examples(t, configPage) {
		claim := resourceapi.ResourceClaim{}
		if err := yaml.UnmarshalStrict([]byte(example), &claim); err != nil {
			t.Errorf("%v:\n%s", err, example)
		}
		for _, c := range claim.Spec.Devices.Config {
			config, err := Decode(c.Opaque.Parameters)
			if err == nil {
				err = config.Validate()
			}
			if err != nil {
				t.Errorf("%v:\n%s", err, example)
			}
			configs++
		}
	}
	if t.Logf("%d cases", configs); configs < 2 {
		t.Errorf("only %d configurations", configs)
	}
}

// TestRanges: the ranges in the comments are those of Validate.
func TestRanges(t *testing.T) {
	comments := map[string]string{}
	for _, f := range source.Fields(t, source.Files(t, "."), "MPSConfig") {
		comments[f.Name] = f.Doc
	}
	for name, r := range map[string]struct {
		says            string
		inside, outside []string
	}{
		"defaultActiveThreadPercentage":  {"from 0 to 100", []string{"0", "100"}, []string{"-1", "101"}},
		"defaultPinnedDeviceMemoryLimit": {"at least 1Mi", []string{`"1Mi"`}, []string{`"1023Ki"`}},
	} {
		if !strings.Contains(comments[name], r.says) {
			t.Errorf("the comment of %s does not say %q", name, r.says)
		}
		for _, value := range append(slices.Clone(r.inside), r.outside...) {
			config, err := Decode(runtime.RawExtension{Raw: []byte(gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"` + name + `":` + value + `}}`))})
			if err != nil {
				t.Fatal(err)
			}
			if err := config.Validate(); (err == nil) != slices.Contains(r.inside, value) {
				t.Errorf("%s: %s: %v", name, value, err)
			}
		}
	}
}
