// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"os"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/must"
)

func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	content := must.Get(os.ReadFile("schema.json"))(t)
	document := must.Get(jsonschema.UnmarshalJSON(bytes.NewReader(content)))(t)
	const name = "schema.json"
	compiler := jsonschema.NewCompiler()
	must.Do(t, compiler.AddResource(name, document))
	return must.Get(compiler.Compile(name))(t)
}

// validate converts YAML as helm does.
func validate(t *testing.T, s *jsonschema.Schema, content []byte) error {
	t.Helper()
	converted := must.Get(yaml.YAMLToJSON(content))(t)
	value := must.Get(jsonschema.UnmarshalJSON(bytes.NewReader(converted)))(t)
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
		"default: {mps: {clients: 1}}":                                               true,
		"default: {mps: {clients: 1024}}":                                            true,
		"default: {mps: {clients: 1025}}":                                            false,
		"default: {mps: {clients: -1}}":                                              false,
		"default: {mps: {clients: 2.0}}":                                             true,
		"default: {mps: {memoryOvercommit: 1}}":                                      true,
		"default: {mps: {memoryOvercommit: 0.999}}":                                  false,
		"default: {mps: {memoryOvercommit: 100}}":                                    true,
		"default: {mps: {memoryOvercommit: 100.5}}":                                  false,
		"default: {mps: {reservedMemory: 1099511627776}}":                            true,
		"default: {mps: {reservedMemory: 1099511627777}}":                            false,
		"default: {mps: {reservedMemory: 512Mi}}":                                    true,
		"default: {mps: {reservedMemory: ''}}":                                       false,
		"default: {mps: {reservedMemory: null}}":                                     false,
		"default: {mps: {serverMemory: 60Mi, contextMemory: 326Mi}}":                 true,
		"default: {mps: {serverMemory: 1099511627777}}":                              false,
		"default: {mps: {contextMemory: -1}}":                                        false,
		"default: {mps: {contextMemory: null}}":                                      false,
		"default: {timeslice: {contextMemory: 326Mi}}":                               false,
		"default: {mps: {onClientKilled: Restart}}":                                  true,
		"default: {mps: {onClientKilled: Report}}":                                   true,
		"default: {mps: {onClientKilled: restart}}":                                  false,
		"default: {mps: {onClientKilled: ''}}":                                       false,
		"default: {mps: {clientPriority: Normal}}":                                   true,
		"default: {mps: {clientPriority: BelowNormal}}":                              true,
		"default: {mps: {clientPriority: 1}}":                                        false,
		"default: {mps: {clientPriority: High}}":                                     false,
		"default: {mps: {clientPriority: ''}}":                                       false,
		"default: {timeslice: {clientPriority: Normal}}":                             false,
		"default: {mps: null}":                                                       false,
		"default: {kinds: null}":                                                     false,
		"default: {kinds: [gpu, mig, mps, timeslice]}":                               true,
		"default: {mig: {profiles: [1g.10gb+me.all]}}":                               true,
		"default: {mig: {profiles: [1g]}}":                                           false,
		"default: {mig: {profiles: [''] }}":                                          false,
		"default: {timeslice: {interval: Long}}":                                     true,
		"default: {mig: {shares: [{profiles: [1g.5gb], mps: {}, timeslice: {}}]}}":   true,
		"default: {mig: {shares: [{profiles: [1g.5gb], mps: {}, interval: Short}]}}": false,
		"default: []":                                    false,
		"health: {}":                                     true,
		"health: {quietPeriod: 1h30m}":                   true,
		"health: {quietPeriod: 0.5h}":                    true,
		"health: {quietPeriod: 1500ms}":                  false,
		"health: {quietPeriod: -1m}":                     false,
		"health: {xids: [{xid: 9999, effect: Ignore}]}":  true,
		"health: {xids: [{xid: 10000, effect: Ignore}]}": false,
		"health: {xids: [{xid: 1.5, effect: Ignore}]}":   false,
		"health: {xids: null}":                           false,
		"health: {conditions: [{effect: None}]}":         false,
		"health: null":                                   false,
	} {
		content := []byte(head + text)
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
