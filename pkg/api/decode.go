// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"
)

// maxBytes is the API's own limit for opaque parameters (10 KiB, k8s.io/api
// resource/v1). It bounds the work here as well.
const maxBytes = 10 * 1024

// Decode reads one configuration strictly and fills in defaults. Any fault of
// form, an unknown or repeated field included, is an *InvalidError. The values
// are checked by Config.Validate.
func Decode(raw runtime.RawExtension) (Config, error) {
	if len(raw.Raw) > maxBytes {
		return nil, invalid("", field.ErrorList{field.TooLong(field.NewPath("parameters"), "", maxBytes)})
	}
	var meta metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw.Raw, &meta); err != nil {
		return nil, invalid("", field.ErrorList{formFault(err)})
	}
	config, faults := newConfig(meta)
	if len(faults) > 0 {
		return nil, invalid("", faults)
	}
	strict, err := kjson.UnmarshalStrict(raw.Raw, config)
	if err != nil {
		return nil, invalid(config.kind(), field.ErrorList{formFault(err)})
	}
	for _, err := range strict {
		faults = append(faults, strictFault(config, err))
	}
	if len(faults) > 0 {
		return nil, invalid(config.kind(), faults)
	}
	config.setDefaults()
	return config, nil
}

// newConfig makes the empty configuration that apiVersion and kind ask for.
func newConfig(meta metav1.TypeMeta) (Config, field.ErrorList) {
	var faults field.ErrorList
	switch path := field.NewPath("apiVersion"); meta.APIVersion {
	case Version:
	case "":
		faults = append(faults, field.Required(path, fmt.Sprintf("must be %q", Version)))
	default:
		faults = append(faults, field.NotSupported(path, meta.APIVersion, []string{Version}))
	}
	kinds := []string{GpuConfigKind, MigDeviceConfigKind}
	switch path := field.NewPath("kind"); meta.Kind {
	case GpuConfigKind:
		return &GpuConfig{}, faults
	case MigDeviceConfigKind:
		return &MigDeviceConfig{}, faults
	case "":
		faults = append(faults, field.Required(path, fmt.Sprintf("must be one of %q", kinds)))
	default:
		faults = append(faults, field.NotSupported(path, meta.Kind, kinds))
	}
	return nil, faults
}

// formFault words what the JSON decoder says about text that cannot be decoded
// at all.
func formFault(err error) *field.Error {
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) && wrongType.Field != "" {
		return field.Invalid(fieldPath(wrongType.Field), field.OmitValueType{},
			fmt.Sprintf("must be %s, is %s", jsonType(wrongType.Type), wrongType.Value))
	}
	return field.Invalid(field.NewPath("parameters"), field.OmitValueType{}, "must be one JSON object: "+err.Error())
}

// strictFault words an unknown or a repeated field.
func strictFault(config Config, err error) *field.Error {
	var at kjson.FieldError
	if !errors.As(err, &at) {
		return field.Invalid(field.NewPath("parameters"), field.OmitValueType{}, err.Error())
	}
	path := at.FieldPath()
	if !strings.HasPrefix(err.Error(), "unknown field") {
		return field.Invalid(fieldPath(path), field.OmitValueType{}, "is given more than once")
	}
	detail := "unknown field"
	if known := knownFields(reflect.TypeOf(config), strings.Split(path, ".")); len(known) > 0 {
		detail += ", known here: " + strings.Join(known, ", ")
	}
	return field.Invalid(fieldPath(path), field.OmitValueType{}, detail)
}

func fieldPath(dotted string) *field.Path {
	parts := strings.Split(dotted, ".")
	return field.NewPath(parts[0], parts[1:]...)
}

// jsonType names a Go type as a writer of JSON or YAML thinks of it.
func jsonType(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.Struct, reflect.Map:
		return "an object"
	default:
		return "of type " + t.String()
	}
}

// knownFields lists the fields beside the last element of path, sorted. It
// returns nil where the path leads nowhere.
func knownFields(t reflect.Type, path []string) []string {
	for _, name := range path[:len(path)-1] {
		next := fieldType(t, name)
		if next == nil {
			return nil
		}
		t = next
	}
	var names []string
	eachField(t, func(name string, _ reflect.Type) { names = append(names, name) })
	slices.Sort(names)
	return names
}

func fieldType(t reflect.Type, want string) reflect.Type {
	var found reflect.Type
	eachField(t, func(name string, fieldType reflect.Type) {
		if name == want {
			found = fieldType
		}
	})
	return found
}

func eachField(t reflect.Type, visit func(name string, t reflect.Type)) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return
	}
	for f := range t.Fields() {
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" && strings.Contains(options, "inline") {
			eachField(f.Type, visit)
			continue
		}
		visit(name, f.Type)
	}
}
