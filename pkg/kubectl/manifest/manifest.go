// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package manifest writes the objects that commands make, with their fields in the
// order in which people write them.
package manifest

import (
	"bytes"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/util/quote"
)

const apiVersion = "resource.k8s.io/v1"

// Names of the classes that the chart makes.
const (
	ClassGPU       = "gpu.nvidia.com"
	ClassMIG       = "mig.nvidia.com"
	ClassMPS       = "mps.partage.dev"
	ClassTimeSlice = "timeslice.partage.dev"
)

// ClassOf returns the class for a type of device, which is a kind of the sharing policy.
func ClassOf[K ~string](kind K) string {
	switch kind {
	case "mig":
		return ClassMIG
	case "mps":
		return ClassMPS
	case "timeslice":
		return ClassTimeSlice
	}
	return ClassGPU
}

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

type claimTemplate struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
	Spec       struct {
		Spec struct {
			Devices struct {
				Requests []request `yaml:"requests"`
			} `yaml:"devices"`
		} `yaml:"spec"`
	} `yaml:"spec"`
}

type deviceClass struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
	Spec       struct {
		ExtendedResourceName string     `yaml:"extendedResourceName,omitempty"`
		Selectors            []selector `yaml:"selectors"`
	} `yaml:"spec"`
}

type metadata struct {
	Name      string `yaml:"name"`
	Namespace string `yaml:"namespace,omitempty"`
}

type request struct {
	Name    string  `yaml:"name"`
	Exactly Exactly `yaml:"exactly"`
}

// Exactly is what a request without alternatives asks for.
type Exactly struct {
	DeviceClassName string     `yaml:"deviceClassName"`
	Count           int        `yaml:"count,omitempty"`
	Selectors       []selector `yaml:"selectors,omitempty"`
	Capacity        *capacity  `yaml:"capacity,omitempty"`
}

type capacity struct {
	Requests map[string]any `yaml:"requests"`
}

type selector struct {
	CEL struct {
		Expression string `yaml:"expression"`
	} `yaml:"cel"`
}

func selectors(expressions []string) []selector {
	list := make([]selector, len(expressions))
	for i, expression := range expressions {
		list[i].CEL.Expression = expression
	}
	return list
}

// ClaimTemplate returns a ResourceClaimTemplate. An empty namespace is left out.
func ClaimTemplate(namespace, name string, requests []Request) ([]byte, error) {
	t := claimTemplate{APIVersion: apiVersion, Kind: "ResourceClaimTemplate", Metadata: metadata{Name: name, Namespace: namespace}}
	for _, r := range requests {
		t.Spec.Spec.Devices.Requests = append(t.Spec.Spec.Devices.Requests, request{Name: r.Name, Exactly: r.Exactly()})
	}
	return Marshal(t)
}

// Exactly returns the request without its name.
func (r Request) Exactly() Exactly {
	e := Exactly{DeviceClassName: r.Class, Selectors: selectors(r.Selectors)}
	if r.Count > 1 {
		e.Count = r.Count
	}
	amounts := map[string]any{}
	if r.Memory != "" {
		amounts["memory"] = r.Memory
	}
	if r.SMPercent > 0 {
		amounts["smPercent"] = r.SMPercent
	}
	if len(amounts) > 0 {
		e.Capacity = &capacity{Requests: amounts}
	}
	return e
}

// DeviceClass returns a DeviceClass. An empty extended resource name is left out.
func DeviceClass(name, extendedResource string, expressions ...string) ([]byte, error) {
	c := deviceClass{APIVersion: apiVersion, Kind: "DeviceClass", Metadata: metadata{Name: name}}
	c.Spec.ExtendedResourceName = extendedResource
	c.Spec.Selectors = selectors(expressions)
	return Marshal(c)
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
