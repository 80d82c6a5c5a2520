// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/strict"
)

// maxBytes is the API's own limit for opaque parameters (10 KiB, k8s.io/api
// resource/v1). It bounds the work here as well.
const maxBytes = 10 * 1024

// Decode reads one configuration strictly. Any fault of form, an unknown or repeated field included, is an *InvalidError. The values
// are checked by Config.Validate.
func Decode(raw runtime.RawExtension) (Config, error) {
	parameters := field.NewPath("parameters")
	if len(raw.Raw) > maxBytes {
		return nil, invalid("", field.ErrorList{field.TooLong(parameters, "", maxBytes)})
	}
	root, err := strict.ParseJSON(raw.Raw)
	if err != nil {
		return nil, invalid("", field.ErrorList{field.Invalid(parameters, field.OmitValueType{}, "must be one JSON object: "+err.Error())})
	}
	r := &reader{}
	kind, ok := r.TypeMeta(root, parameters, Version, GpuConfigKind, MigDeviceConfigKind)
	if !ok {
		return nil, r.invalid("")
	}
	config := r.config(root, metav1.TypeMeta{APIVersion: Version, Kind: kind})
	if r.FaultCount() > 0 {
		return nil, r.invalid(kind)
	}
	return config, nil
}

// reader reads the parts of a configuration. Null stands for an absent field.
type reader struct{ strict.Reader }

func (r *reader) invalid(kind string) error {
	return &InvalidError{Kind: kind, Faults: r.Faults(), more: r.FaultCount() - len(r.Faults())}
}

// config reads the configuration of a kind that is known.
func (r *reader) config(root *yaml.Node, meta metav1.TypeMeta) Config {
	gpus, partitions := &GpuConfig{TypeMeta: meta}, &MigDeviceConfig{TypeMeta: meta}
	var config Config = gpus
	sharing := strict.Into(&gpus.Sharing, r.gpuSharing)
	if meta.Kind == MigDeviceConfigKind {
		config, sharing = partitions, strict.Into(&partitions.Sharing, r.migDeviceSharing)
	}
	r.Object(root, nil, map[string]strict.Read{"apiVersion": strict.Skip, "kind": strict.Skip, "sharing": strict.Optional(sharing)})
	return config
}

func (r *reader) gpuSharing(n *yaml.Node, at *field.Path) *GpuSharing {
	s := &GpuSharing{}
	r.Object(n, at, map[string]strict.Read{
		"strategy":          r.strategy(&s.Strategy),
		"timeSlicingConfig": strict.Optional(strict.Into(&s.TimeSlicingConfig, r.timeSlicingConfig)),
		"mpsConfig":         strict.Optional(strict.Into(&s.MPSConfig, r.mpsConfig)),
	})
	return s
}

func (r *reader) migDeviceSharing(n *yaml.Node, at *field.Path) *MigDeviceSharing {
	s := &MigDeviceSharing{}
	r.Object(n, at, map[string]strict.Read{
		"strategy":  r.strategy(&s.Strategy),
		"mpsConfig": strict.Optional(strict.Into(&s.MPSConfig, r.mpsConfig)),
	})
	return s
}

// strategy leaves the choice of known values to Validate.
func (r *reader) strategy(value *Strategy) strict.Read {
	return strict.Optional(func(n *yaml.Node, at *field.Path) {
		text, _ := r.String(n, at)
		*value = Strategy(text)
	})
}

func (r *reader) timeSlicingConfig(n *yaml.Node, at *field.Path) *TimeSlicingConfig {
	c := &TimeSlicingConfig{}
	r.Object(n, at, map[string]strict.Read{
		"interval": strict.Optional(func(n *yaml.Node, at *field.Path) {
			text, _ := r.String(n, at)
			c.Interval = new(Interval(text))
		}),
	})
	return c
}

func (r *reader) mpsConfig(n *yaml.Node, at *field.Path) *MPSConfig {
	c := &MPSConfig{}
	r.Object(n, at, map[string]strict.Read{
		"defaultActiveThreadPercentage": strict.Optional(func(n *yaml.Node, at *field.Path) {
			percentage, _ := r.Int(n, at)
			c.DefaultActiveThreadPercentage = &percentage
		}),
		"defaultPinnedDeviceMemoryLimit": strict.Optional(func(n *yaml.Node, at *field.Path) {
			c.DefaultPinnedDeviceMemoryLimit = new(r.memoryLimit(n, at))
		}),
		"defaultPerDevicePinnedMemoryLimit": strict.Optional(func(n *yaml.Node, at *field.Path) {
			c.DefaultPerDevicePinnedMemoryLimit = map[string]MemoryLimit{}
			r.Map(n, at, func(key string, n *yaml.Node, at *field.Path) {
				c.DefaultPerDevicePinnedMemoryLimit[key] = r.memoryLimit(n, at)
			})
		}),
		"multiUser": strict.Optional(func(n *yaml.Node, at *field.Path) {
			c.MultiUser = new(r.Bool(n, at))
		}),
		"defaultClientPriority": strict.Optional(func(n *yaml.Node, at *field.Path) {
			text, _ := r.String(n, at)
			c.DefaultClientPriority = new(ClientPriority(text))
		}),
	})
	return c
}

// memoryLimit takes a string or a number; Validate says what is wrong with its text.
func (r *reader) memoryLimit(n *yaml.Node, at *field.Path) MemoryLimit {
	if n.Kind != yaml.ScalarNode {
		r.WrongType(n, at, "a string or a number")
		return ""
	}
	return MemoryLimit(n.Value)
}
