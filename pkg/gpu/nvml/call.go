// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"reflect"
	"time"
)

// Call is one call into the library, as Options.Observe gets it.
type Call struct {
	// Function is NVML's: "nvmlDeviceGetUUID".
	Function string
	// PCIAddress is empty for calls that are not about one GPU, or not known to be.
	PCIAddress string
	// Took is how long it took, or the limit after which it was left behind.
	Took time.Duration
	// Answer is what the bindings returned, for output; nil where that is nothing but a
	// code, or refers to memory of the library.
	Answer any
	// Err is what the caller got.
	Err error
}

// plain returns a value that consists of nothing but numbers, texts and lists of them, and
// nil for any other.
func plain(value any) any {
	if value == nil || !isPlain(reflect.TypeOf(value)) {
		return nil
	}
	return value
}

func isPlain(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.UnsafePointer, reflect.Interface, reflect.Func, reflect.Chan, reflect.Map:
		return false
	case reflect.Slice, reflect.Array:
		return isPlain(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if !isPlain(t.Field(i).Type) {
				return false
			}
		}
		return t.NumField() > 0
	default:
		return true
	}
}
