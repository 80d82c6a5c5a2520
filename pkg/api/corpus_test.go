// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/must"
)

// corpusCase is a configuration of testdata/corpus.yaml.
type corpusCase struct {
	Name       string          `json:"name"`
	Parameters json.RawMessage `json:"parameters"`
	JSON       string          `json:"json"`
	Faults     []string        `json:"faults"`
}

// text is the configuration as a claim has it.
func (c corpusCase) text() string {
	if c.JSON != "" {
		return c.JSON
	}
	return string(c.Parameters)
}

func corpus(t *testing.T) []corpusCase {
	t.Helper()
	data := must.Get(os.ReadFile("testdata/corpus.yaml"))(t)
	var cases []corpusCase
	must.Do(t, yaml.UnmarshalStrict(data, &cases))
	return cases
}

// judge returns what is wrong with a configuration.
func judge(text string) error {
	config, err := decode(text)
	if err != nil {
		return err
	}
	return config.Validate()
}

// TestCorpus: the corpus has the faults that are found here. The chart's admission policy
// finds them too, see test/cluster/admission.
func TestCorpus(t *testing.T) {
	good, bad, names := 0, 0, map[string]bool{}
	for _, c := range corpus(t) {
		if names[c.Name] {
			t.Errorf("%s: there are two", c.Name)
		}
		names[c.Name] = true
		err := judge(c.text())
		if len(c.Faults) == 0 {
			good++
			if err != nil {
				t.Errorf("%s: %v", c.Name, err)
			}
			continue
		}
		bad++
		for _, fault := range c.Faults {
			if err == nil || !strings.Contains(err.Error(), fault) {
				t.Errorf("%s: got %v, want %s", c.Name, err, fault)
			}
		}
	}
	if t.Logf("%d good, %d bad", good, bad); good < 20 || bad < 50 {
		t.Errorf("only %d good and %d bad cases", good, bad)
	}
}

// TestCorpusIsComplete: right configurations of the corpus have every field and every value
// of a table, so that the admission policy knows all of them.
func TestCorpusIsComplete(t *testing.T) {
	used := map[string]bool{}
	for _, c := range corpus(t) {
		if len(c.Faults) > 0 {
			continue
		}
		var object map[string]any
		must.Do(t, json.Unmarshal([]byte(c.text()), &object))
		kind, _ := object["kind"].(string)
		collect(kind, object, used)
	}
	want := map[string]bool{}
	for kind, of := range map[string]reflect.Type{GpuConfigKind: reflect.TypeFor[GpuConfig](), MigDeviceConfigKind: reflect.TypeFor[MigDeviceConfig]()} {
		fieldsOf(kind, of, want)
	}
	fields := len(want)
	for _, strategy := range strategies {
		want["GpuConfig.sharing.strategy="+string(strategy)] = true
		want["MigDeviceConfig.sharing.strategy="+string(strategy)] = true
	}
	for _, interval := range intervals {
		want["GpuConfig.sharing.timeSlicingConfig.interval="+string(interval)] = true
	}
	for _, priority := range clientPriorities {
		want[".sharing.mpsConfig.defaultClientPriority="+string(priority)] = true
	}
	for name := range want {
		if !used[name] && !used[GpuConfigKind+name] && !used[MigDeviceConfigKind+name] {
			t.Errorf("no right configuration of the corpus has %s", name)
		}
	}
	if t.Logf("%d fields, %d values", fields, len(want)-fields); fields < 18 {
		t.Errorf("only %d fields", fields)
	}
}

// collect notes the fields of an object with values, and the texts in them.
func collect(path string, object map[string]any, used map[string]bool) {
	for name, value := range object {
		at := path + "." + name
		switch value := value.(type) {
		case nil:
			continue
		case map[string]any:
			collect(at, value, used)
		case string:
			used[at+"="+value] = true
		}
		used[at] = true
	}
}

// fieldsOf notes the fields of a type in JSON.
func fieldsOf(path string, of reflect.Type, all map[string]bool) {
	for i := range of.NumField() {
		field := of.Field(i)
		inner := field.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		at := path + "." + name
		if options == "inline" {
			at = path
		} else {
			all[at] = true
		}
		if inner.Kind() == reflect.Struct {
			fieldsOf(at, inner, all)
		}
	}
}

// strange are values of every type, right in some place and wrong in most.
var strange = []string{
	`null`, `true`, `0`, `7`, `-1`, `50.5`, `50.0`, `1e300`, `1073741824`, `""`, `"x"`, `"MPS"`, `"TimeSlicing"`, `"Short"`, `"Normal"`, `"64Mi"`,
	`[]`, `{}`, `{"0":"1Gi"}`, `{"interval":"Long"}`, `{"strategy":"MPS"}`,
}

// mutations returns configurations with one change: a field is left out, has another name or
// another value, or there is one more.
func mutations(object map[string]any, emit func()) {
	for _, name := range slices.Sorted(maps.Keys(object)) {
		value := object[name]
		delete(object, name)
		emit()
		for _, other := range []string{strings.ToUpper(name[:1]) + name[1:], name + "s", "interval", "strategy"} {
			if _, taken := object[other]; taken || other == name {
				continue
			}
			object[other] = value
			emit()
			delete(object, other)
		}
		for _, text := range strange {
			var other any
			decoder := json.NewDecoder(strings.NewReader(text))
			decoder.UseNumber()
			if err := decoder.Decode(&other); err != nil {
				panic(err)
			}
			object[name] = other
			emit()
		}
		object[name] = value
		if inner, is := value.(map[string]any); is {
			mutations(inner, emit)
		}
	}
	object["extra"] = true
	emit()
	delete(object, "extra")
}

// TestMutations: testdata/mutations.txt has what Decode and Validate say of some hundred
// configurations that were made from right ones. The admission policy is asked about them,
// too. Rewrite it with -update.
func TestMutations(t *testing.T) {
	const golden = "testdata/mutations.txt"
	seen, good := map[string]bool{}, 0
	var text bytes.Buffer
	for _, c := range corpus(t) {
		if !strings.HasSuffix(c.Name, "everything") && c.Name != "interval Long" {
			continue
		}
		var object map[string]any
		decoder := json.NewDecoder(strings.NewReader(c.text()))
		decoder.UseNumber()
		must.Do(t, decoder.Decode(&object))
		mutations(object, func() {
			mutated := must.Get(json.Marshal(object))(t)
			if seen[string(mutated)] {
				return
			}
			seen[string(mutated)] = true
			verdict := "bad"
			if judge(string(mutated)) == nil {
				verdict = "good"
				good++
			}
			fmt.Fprintln(&text, verdict, string(mutated))
		})
	}
	if t.Logf("%d mutations, %d are right", len(seen), good); len(seen) < 400 || good < 40 || good > len(seen)/2 {
		t.Errorf("%d mutations, %d are right", len(seen), good)
	}
	if *update {
		must.Do(t, os.WriteFile(golden, text.Bytes(), 0o600))
	}
	want := must.Get(os.ReadFile(golden))(t)
	if !bytes.Equal(want, text.Bytes()) {
		t.Errorf("%s is out of date: go test ./pkg/api -run TestMutations -update", golden)
	}
}
