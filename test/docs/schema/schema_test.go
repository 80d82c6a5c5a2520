// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package schema

import (
	"os"
	"path/filepath"
	"testing"
)

func TestType(t *testing.T) {
	const document = `{
  "$defs": {"port": {"title": "port number", "type": "integer"}, "name": {"type": "string", "maxLength": 63}},
  "required": ["one"],
  "properties": {
    "one": {"$ref": "#/$defs/port", "default": 80},
    "many": {"type": "array", "items": {"$ref": "#/$defs/port"}},
    "name": {"$ref": "#/$defs/name"},
    "ratio": {"type": "number", "minimum": 1, "maximum": 100},
    "seconds": {"type": "integer", "minimum": 30},
    "text": {"type": "string", "minLength": 1},
    "memory": {"type": ["string", "number"]},
    "choice": {"enum": ["a", "b"]},
    "version": {"const": "v1"},
    "either": {"oneOf": [{"const": ""}, {"$ref": "#/$defs/name", "minLength": 2}]},
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    "anything": {"type": "object", "default": {"a": [1, "2"]}}
  }
}`
	path := filepath.Join(t.TempDir(), "schema.json")
	if err := os.WriteFile(path, []byte(document), 0o600); err != nil {
		t.Fatal(err)
	}
	s := Load(t, path)
	want := map[string]string{
		"one": "port number", "many": "list of port numbers", "name": "string, at most 63 characters", "ratio": "number, 1 to 100",
		"seconds": "integer, at least 30", "text": "string", "memory": "string or number", "choice": "`a`, `b`", "version": "`v1`",
		"either": "`\"\"` or string, 2 to 63 characters", "labels": "map of strings", "anything": "object",
	}
	for _, name := range s.Properties() {
		if got := s.Property(name).Type(); got != want[name] {
			t.Errorf("%s: got %q, want %q", name, got, want[name])
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("not among the properties: %v", want)
	}
	if one := s.Property("one"); one.Default() != "80" || !s.Requires("one") || s.Requires("many") {
		t.Errorf("the default is %q", one.Default())
	}
	if got := s.Property("anything").Default(); got != `{a: [1, "2"]}` {
		t.Errorf("the default is %s", got)
	}
}
