// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"os"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"
)

func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	content, err := os.ReadFile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	const name = "schema.json"
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource(name, document); err != nil {
		t.Fatal(err)
	}
	s, err := compiler.Compile(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// validate converts YAML as helm does.
func validate(t *testing.T, s *jsonschema.Schema, content []byte) error {
	t.Helper()
	converted, err := yaml.YAMLToJSON(content)
	if err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(converted))
	if err != nil {
		t.Fatal(err)
	}
	return s.Validate(value)
}

// TestSchema holds schema.json to the examples: it may let through only what no
// schema can find.
func TestSchema(t *testing.T) {
	s := compiled(t)
	for folder, accepted := range map[string]bool{"valid": true, "invalid": false, "invalid-meaning": true} {
		for path, content := range examples(t, folder) {
			if err := validate(t, s, content); (err == nil) != accepted {
				t.Errorf("%s: the schema says %v", path, err)
			}
		}
	}
}

// TestSchemaBounds tries the values around every bound on both.
func TestSchemaBounds(t *testing.T) {
	s := compiled(t)
	for text, valid := range map[string]bool{
		"{mps: {clients: 1}}":                                               true,
		"{mps: {clients: 1024}}":                                            true,
		"{mps: {clients: 1025}}":                                            false,
		"{mps: {clients: -1}}":                                              false,
		"{mps: {clients: 2.0}}":                                             true,
		"{mps: {memoryOvercommit: 1}}":                                      true,
		"{mps: {memoryOvercommit: 0.999}}":                                  false,
		"{mps: {memoryOvercommit: 100}}":                                    true,
		"{mps: {memoryOvercommit: 100.5}}":                                  false,
		"{mps: {reservedMemory: 1099511627776}}":                            true,
		"{mps: {reservedMemory: 1099511627777}}":                            false,
		"{mps: {reservedMemory: 512Mi}}":                                    true,
		"{mps: {reservedMemory: ''}}":                                       false,
		"{mps: {reservedMemory: null}}":                                     false,
		"{mps: {serverMemory: 60Mi, contextMemory: 326Mi}}":                 true,
		"{mps: {serverMemory: 1099511627777}}":                              false,
		"{mps: {contextMemory: -1}}":                                        false,
		"{mps: {contextMemory: null}}":                                      false,
		"{timeslice: {contextMemory: 326Mi}}":                               false,
		"{mps: {onClientKilled: Restart}}":                                  true,
		"{mps: {onClientKilled: Report}}":                                   true,
		"{mps: {onClientKilled: restart}}":                                  false,
		"{mps: {onClientKilled: ''}}":                                       false,
		"{mps: {clientPriority: Normal}}":                                   true,
		"{mps: {clientPriority: BelowNormal}}":                              true,
		"{mps: {clientPriority: 1}}":                                        false,
		"{mps: {clientPriority: High}}":                                     false,
		"{mps: {clientPriority: ''}}":                                       false,
		"{timeslice: {clientPriority: Normal}}":                             false,
		"{mps: null}":                                                       false,
		"{kinds: null}":                                                     false,
		"{kinds: [gpu, mig, mps, timeslice]}":                               true,
		"{mig: {profiles: [1g.10gb+me.all]}}":                               true,
		"{mig: {profiles: [1g]}}":                                           false,
		"{mig: {profiles: [''] }}":                                          false,
		"{timeslice: {interval: Long}}":                                     true,
		"{mig: {shares: [{profiles: [1g.5gb], mps: {}, timeslice: {}}]}}":   true,
		"{mig: {shares: [{profiles: [1g.5gb], mps: {}, interval: Short}]}}": false,
		"[]": false,
	} {
		content := []byte(head + "default: " + text)
		if _, err := Decode(content); (err == nil) != valid {
			t.Errorf("%s: Decode says %v", text, err)
		}
		if err := validate(t, s, content); (err == nil) != valid {
			t.Errorf("%s: the schema says %v", text, err)
		}
	}
	for text, valid := range map[string]bool{
		"{}":                                     true,
		"{quietPeriod: 1h30m}":                   true,
		"{quietPeriod: 0.5h}":                    true,
		"{quietPeriod: 1500ms}":                  false,
		"{quietPeriod: -1m}":                     false,
		"{xids: [{xid: 9999, effect: Ignore}]}":  true,
		"{xids: [{xid: 10000, effect: Ignore}]}": false,
		"{xids: [{xid: 1.5, effect: Ignore}]}":   false,
		"{xids: null}":                           false,
		"{conditions: [{effect: None}]}":         false,
		"null":                                   false,
	} {
		content := []byte(head + "health: " + text)
		if _, err := Decode(content); (err == nil) != valid {
			t.Errorf("%s: Decode says %v", text, err)
		}
		if err := validate(t, s, content); (err == nil) != valid {
			t.Errorf("%s: the schema says %v", text, err)
		}
	}
	// The schema has a copy of the names of conditions.
	for name := range builtinHealth().Conditions {
		if err := validate(t, s, []byte(head+"health: {conditions: [{condition: "+name+", effect: None}]}")); err != nil {
			t.Errorf("%s: the schema says %v", name, err)
		}
	}
	for _, text := range []string{"", "kind: SharingPolicy", "apiVersion: " + Version, "null", "[]"} {
		if err := validate(t, s, []byte(text)); err == nil {
			t.Errorf("%q: the schema takes it", text)
		}
	}
}
