// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestLookups checks what is found in a record by name.
func TestLookups(t *testing.T) {
	r := example()
	r.Clone().Devices[0].Partition.Made.UUID = "changed in a copy"
	share := r.Device("gpu-0000-3b-00-0-mps-s1")
	if share == nil || !share.Shared().Limited || share.Shared().Interval != "Long" || r.Devices[0].Shared() != (Sharing{}) {
		t.Errorf("got %+v", share)
	}
	if r.Session("none") != nil || !r.Session("gpu-0000-3b-00-0-mps").Running() {
		t.Error("sessions")
	}
	if r.Device("none") != nil || r.Devices[0].Partition.Made.UUID != "MIG-1" {
		t.Error("devices")
	}
}

// TestClone: a copy is the same, and nothing that it points to is the original's, also in fields that come later.
func TestClone(t *testing.T) {
	r := &Record{}
	fill(reflect.ValueOf(r).Elem())
	copied := r.Clone()
	if diff := cmp.Diff(r, copied); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var shared func(path string, a, b reflect.Value)
	shared = func(path string, a, b reflect.Value) {
		switch a.Kind() {
		case reflect.Pointer, reflect.Slice:
			if a.Pointer() == b.Pointer() {
				t.Errorf("%s is shared", path)
			}
			if a.Kind() == reflect.Pointer {
				shared(path, a.Elem(), b.Elem())
			} else {
				shared(path, a.Index(0), b.Index(0))
			}
		case reflect.Struct:
			for i := range a.NumField() {
				shared(path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
			}
		case reflect.Map, reflect.Interface, reflect.Chan, reflect.Func:
			t.Errorf("%s: nothing is known of copies of a %s", path, a.Kind())
		}
	}
	shared("record", reflect.ValueOf(r).Elem(), reflect.ValueOf(copied).Elem())
}

// fill makes all pointers and slices lead somewhere.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	}
}
