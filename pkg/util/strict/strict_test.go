// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package strict

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func TestParseJSON(t *testing.T) {
	for name, test := range map[string]struct{ in, want string }{
		"nothing":       {"", "unexpected end"},
		"YAML":          {"a: 1", "invalid character"},
		"two":           {"{}{}", "after the top-level value"},
		"comma at end":  {`{"a":1,}`, "invalid character"},
		"a tag":         {`{"a":!!int 1}`, "invalid character"},
		"a key of null": {`{null:1}`, "invalid character"},
		"a key of list": {`{[]:1}`, "invalid character"},
		"cut off":       {`{"a":[1`, "unexpected end"},
		"the wrong end": {`{"a":[1}}`, "invalid character"},
	} {
		if root, err := ParseJSON([]byte(test.in)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, %v, want %q", name, root, err, test.want)
		}
	}
}

func TestReader(t *testing.T) {
	type values struct {
		Text string
		Int  int
		Bool bool
		Map  map[string]string
		List []string
	}
	read := func(in string) (values, error) {
		root, err := ParseJSON([]byte(in))
		if err != nil {
			t.Fatal(err)
		}
		var v values
		var r Reader
		text := func(n *yaml.Node, at *field.Path) string {
			value, _ := r.String(n, at)
			return value
		}
		r.Object(root, nil, map[string]Read{
			"text": Optional(Into(&v.Text, text)),
			"int":  Into(&v.Int, func(n *yaml.Node, at *field.Path) int { return r.IntBetween(n, at, -1, 9, "") }),
			"bool": Into(&v.Bool, r.Bool),
			"map": func(n *yaml.Node, at *field.Path) {
				v.Map = map[string]string{}
				r.Map(n, at, func(key string, n *yaml.Node, at *field.Path) { v.Map[key] = text(n, at) })
			},
			"list": func(n *yaml.Node, at *field.Path) {
				r.List(n, at, 2, func(n *yaml.Node, at *field.Path) { v.List = append(v.List, text(n, at)) })
			},
		})
		return v, r.Err()
	}
	got, err := read(`{"text": "a\/\u0062", "int": -1e0, "bool": true, "map": {"k": "v", "": "empty"}, "list": ["x", "y"]}`)
	if err != nil {
		t.Fatal(err)
	}
	want := values{"a/b", -1, true, map[string]string{"k": "v", "": "empty"}, []string{"x", "y"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for in, want := range map[string]string{
		`{"text": null}`:                     "",
		`{"int": null}`:                      "int: Invalid value: must be a whole number, is empty; leave the field out",
		`{"int": 1e300}`:                     "int: Invalid value: 1e+300: must be between -1 and 9",
		`{"int": -99999999999999999999}`:     "int: Invalid value: -1e+20: must be between -1 and 9",
		`{"bool": "yes"}`:                    `bool: Invalid value: "yes": must be true or false, is a string`,
		`{"map": []}`:                        "map: Invalid value: must be an object, is a list",
		`{"map": {"k": 1, "k": "2"}}`:        `[map[k]: Invalid value: 1: must be a string, is a whole number, map[k]: Invalid value: is given more than once]`,
		`{"list": ["a", 1]}`:                 "list[1]: Invalid value: 1: must be a string, is a whole number",
		`{"list": ["a", "b", "c"]}`:          "list: Too many: 3: must have at most 2 items",
		`{"other": 1}`:                       "other: Invalid value: unknown field, known here: bool, int, list, map, text",
		`[` + strings.Repeat(`1,`, 9) + `1]`: "<nil>: Invalid value: must be an object, is a list",
	} {
		_, err := read(in)
		if got := ""; err != nil && err.Error() != want || err == nil && got != want {
			t.Errorf("%s:\ngot  %v\nwant %s", in, err, want)
		}
	}
}
