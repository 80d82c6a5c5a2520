// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package terraform

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

// plain makes values of nodes; what is not evaluated is in angle brackets.
func plain(n *yaml.Node) any {
	switch n.Kind {
	case yaml.MappingNode:
		object := map[string]any{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			object[n.Content[i].Value] = plain(n.Content[i+1])
		}
		return object
	case yaml.SequenceNode:
		list := []any{}
		for _, item := range n.Content {
			list = append(list, plain(item))
		}
		return list
	default:
		if n.Tag == ExpressionTag {
			return "<" + n.Value + ">"
		}
		if n.Tag == "!!str" {
			return n.Value
		}
		return strings.TrimPrefix(n.Tag, "!!") + " " + n.Value
	}
}

type (
	object = map[string]any
	list   = []any
)

func TestParse(t *testing.T) {
	for in, want := range map[string]any{
		"":            object{},
		"# a comment": object{},
		"a = 1 // one\n/* two\nlines */ b = -2.5e3 # three": object{"a": "int 1", "b": "float -2.5e3"},
		`a = "b"`:                                           object{"a": "b"},
		`a = "x\"y\\z\n\u00e4 $${b} %%{c}"`:                 object{"a": "x\"y\\z\nä ${b} %{c}"},
		"a = true\nb = false\nc = null":                     object{"a": "bool true", "b": "bool false", "c": "null null"},
		"a = []\nb = [1, \"x\",\n  [2],\n]":                 object{"a": list{}, "b": list{"int 1", "x", list{"int 2"}}},
		"a = {}\nb = { c = 1, \"d e\" : 2\n f = 3\n}":       object{"a": object{}, "b": object{"c": "int 1", "d e": "int 2", "f": "int 3"}},
		"a { b = 1 }":                                       object{"a": object{"b": "int 1"}},
		"a {}\na {\n}\na {}":                                object{"a": list{object{}, object{}, object{}}},
		"r \"x\" \"y\" {}\nr \"x\" \"z\" { b = 1 }\nr w {}": object{"r": object{"x": object{"y": object{}, "z": object{"b": "int 1"}}, "w": object{}}},
		"a = var.b # c\nd = e // f\n":                       object{"a": "<var.b>", "d": "<e>"},
		"a = var.b":                                         object{"a": "<var.b>"},
		"a = trueish":                                       object{"a": "<trueish>"},
		"a = 1 + 2":                                         object{"a": "<1 + 2>"},
		"a = \"x${b(\"}\")}y\"":                             object{"a": `<"x${b("}")}y">`},
		"a = [for x in y : x]\nb = 1":                       object{"a": "<[for x in y : x]>", "b": "int 1"},
		"a = {for k, v in y : k => v}":                      object{"a": "<{for k, v in y : k => v}>"},
		"a = { (b) = 1 }":                                   object{"a": "<{ (b) = 1 }>"},
		"a = f(\n  1,\n  \"2\"\n)\nb = c ? [1] : [2]":       object{"a": "<f(\n  1,\n  \"2\"\n)>", "b": "<c ? [1] : [2]>"},
		"a = [b.c[0], 2]":                                   object{"a": list{"<b.c[0]>", "int 2"}},
		"a = <<EOT\n }{ \" \nEOT\nb = 1":                    object{"a": "<<<EOT\n }{ \" \nEOT>", "b": "int 1"},
		"a = <<-EOT\n x\n  EOT\n":                           object{"a": "<<<-EOT\n x\n  EOT>"},
	} {
		root, err := Parse([]byte(in))
		if err != nil {
			t.Errorf("%q: %v", in, err)
			continue
		}
		if diff := cmp.Diff(want, plain(root)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", in, diff)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for in, want := range map[string]string{
		"\xff":                               "is no text in UTF-8",
		"= 1":                                `line 1: want a name, found "= 1"`,
		"a":                                  "line 1: after a: want = and a value, or a block in braces",
		"a b":                                "line 1: after a: want = and a value, or a block in braces",
		"a == 1":                             "line 1: after a: want = and a value, or a block in braces",
		"\na {\n b = 1":                      "line 3: a closing } is missing",
		"a = 1\na = 2":                       "line 2: a is given more than once",
		"a = {b = 1, b = 2}":                 `line 1: a: "b" is given more than once`,
		"a = 1\na {}":                        "a is given both as a value and as a block",
		"a {}\na \"b\" {}\na {}\na \"c\" {}": "a has blocks with and without labels",
		"a = ":                               "line 1: a: want a value, found the end of the file",
		"a = [1":                             "line 1: a: in a list: want , or ], found the end of the file",
		"a = {b}":                            `line 1: a: in an object, after the key "b": want = and a value, found "}"`,
		"a = \"b":                            `line 1: a: a string has no end, "`,
		"a = \"b\nc\"":                       `line 1: a: a string has no end, ", in its line`,
		`a = "\q"`:                           `line 1: a: a string has the unknown escape`,
		"a = f(1":                            "line 1: a: a closing bracket is missing",
		"a = <<EOT\nb":                       "line 1: a: the text after <<EOT has no end",
		"/* a":                               "line 1: a comment has no end, */",
		"\"${a}\" {}":                        "line 1: want a name",
		"a \"${b}\" {}":                      "want a plain string, found an expression",
		strings.Repeat("a {\n", 70):          "blocks are nested more than 64 deep",
		"a = " + strings.Repeat("[", 70):     "values are nested more than 64 deep",
	} {
		_, err := Parse([]byte(in))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q:\ngot  %v\nwant %s", in, err, want)
		}
	}
}

// FuzzParse: nothing panics, and what is read has no node without a kind.
func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("../testdata/castai/*.tf")
	if err != nil || len(files) == 0 {
		f.Fatalf("no examples: %v", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<14 {
			t.Skip("too long")
		}
		root, err := Parse(data)
		if err != nil {
			return
		}
		checkNode(t, root)
	})
}

func checkNode(t *testing.T, n *yaml.Node) {
	t.Helper()
	if n.Tag == "" || n.Kind == yaml.MappingNode && len(n.Content)%2 != 0 || n.Kind == yaml.ScalarNode && len(n.Content) > 0 {
		t.Errorf("odd node %+v", n)
	}
	for _, child := range n.Content {
		checkNode(t, child)
	}
}
