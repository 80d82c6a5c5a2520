// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package manifest writes the objects that commands make, with their fields in the
// order in which people write them.
package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/util/quote"
)

const apiVersion = "resource.k8s.io/v1"

// classes are those that the chart makes, by the type of their devices.
var classes = map[string]string{"gpu": "gpu.nvidia.com", "mig": "mig.nvidia.com", "mps": "mps.partage.dev", "timeslice": "timeslice.partage.dev"}

// ClassOf returns the class for a type of device, which is a kind of the sharing policy.
func ClassOf[K ~string](kind K) string { return classes[string(kind)] }

// Request is a request for devices.
type Request struct {
	Name  string
	Class string
	// Count is how many devices, at least 1.
	Count int
	// Selectors are expressions in CEL, all of which must hold.
	Selectors []string
	// Memory, such as 20Gi, and SMPercent are how much of a shared device, or at least; "" and 0 for what the class gives by itself.
	Memory    string
	SMPercent int
}

// object is one with its fields in the order in which people write them: keys and values in turn, of which zeros are left out.
type object []any

// MarshalYAML implements yaml.Marshaler.
func (o object) MarshalYAML() (any, error) {
	n := &yaml.Node{Kind: yaml.MappingNode}
	for i := 0; i < len(o); i += 2 {
		if value := reflect.ValueOf(o[i+1]); !value.IsValid() || value.IsZero() {
			continue
		}
		var key, value yaml.Node
		if err := errors.Join(key.Encode(o[i]), value.Encode(o[i+1])); err != nil {
			return nil, err
		}
		n.Content = append(n.Content, &key, &value)
	}
	return n, nil
}

func selectors(expressions []string) (list []object) {
	for _, expression := range expressions {
		list = append(list, object{"cel", object{"expression", expression}})
	}
	return list
}

// ClaimTemplate returns a ResourceClaimTemplate. An empty namespace is left out.
func ClaimTemplate(namespace, name string, requests []Request) ([]byte, error) {
	var all []object
	for _, r := range requests {
		all = append(all, object{"name", r.Name, "exactly", r.Exactly()})
	}
	return Marshal(object{
		"apiVersion", apiVersion, "kind", "ResourceClaimTemplate", "metadata", object{"name", name, "namespace", namespace},
		"spec", object{"spec", object{"devices", object{"requests", all}}},
	})
}

// Exactly returns the request without its name, for YAML.
func (r Request) Exactly() any {
	count, capacity := r.Count, object(nil)
	if count == 1 {
		count = 0
	}
	if r.Memory != "" || r.SMPercent > 0 {
		capacity = object{"requests", object{"memory", r.Memory, "smPercent", r.SMPercent}}
	}
	return object{"deviceClassName", r.Class, "count", count, "selectors", selectors(r.Selectors), "capacity", capacity}
}

// DeviceClass returns a DeviceClass. An empty extended resource name is left out.
func DeviceClass(name, extendedResource string, expressions ...string) ([]byte, error) {
	return Marshal(object{
		"apiVersion", apiVersion, "kind", "DeviceClass", "metadata", object{"name", name},
		"spec", object{"extendedResourceName", extendedResource, "selectors", selectors(expressions)},
	})
}

// Marshal returns a value in YAML.
func Marshal(value any) ([]byte, error) { return Encode(value, true) }

// Encode does the same, with or without lists that are as far to the left as their key.
func Encode(value any, compact bool) ([]byte, error) {
	var text bytes.Buffer
	encoder := yaml.NewEncoder(&text)
	encoder.SetIndent(2)
	if compact {
		encoder.CompactSeqIndent()
	}
	if err := encoder.Encode(value); err != nil {
		return nil, fmt.Errorf("write %T as YAML: %w", value, err)
	}
	if err := encoder.Close(); err != nil {
		return nil, fmt.Errorf("write %T as YAML: %w", value, err)
	}
	return text.Bytes(), nil
}

// Join makes one stream of documents.
func Join(documents [][]byte) []byte { return bytes.Join(documents, []byte("---\n")) }

// Attribute returns the expression of a device's attribute.
func Attribute(driver, name string) string {
	return fmt.Sprintf("device.attributes['%s'].%s", driver, name)
}

// Selector returns the expression that an attribute has one of some values.
func Selector(driver, name string, values ...string) string {
	left := Attribute(driver, name)
	if len(values) == 1 {
		return left + " == " + quote.CEL(values[0])
	}
	literals := make([]string, len(values))
	for i, value := range values {
		literals[i] = quote.CEL(value)
	}
	return fmt.Sprintf("%s in [%s]", left, strings.Join(literals, ", "))
}

// ProfileText returns a profile as a part of an object's name, as the device plugin has it in
// names of resources: 1g.10gb.me for 1g.10gb+me.
func ProfileText(profile string) string { return strings.ReplaceAll(profile, "+", ".") }
