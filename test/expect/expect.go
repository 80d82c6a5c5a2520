// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package expect compares what a test got with what it wants. Unlike with package must, the test goes on. The last arguments say
// what is compared, where the line does not.
package expect

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Equal wants two values that are ==, so the same ones where they are pointers.
func Equal[T comparable](t testing.TB, got, want T, what ...any) {
	t.Helper()
	if got != want {
		t.Errorf("%sgot %+v, want %+v", prefix(what), got, want)
	}
}

// Same wants two values that have the same contents.
func Same[T any](t testing.TB, got, want T, what ...any) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s(-want +got):\n%s", prefix(what), diff)
	}
}

// Len wants a slice or a map of a length, which is 0 for nothing.
func Len(t testing.TB, got any, want int, what ...any) {
	t.Helper()
	if n := reflect.ValueOf(got).Len(); n != want {
		t.Errorf("%sgot %d, want %d: %+v", prefix(what), n, want, got)
	}
}

// Contains wants a text with a part.
func Contains(t testing.TB, text, part string, what ...any) {
	t.Helper()
	if !strings.Contains(text, part) {
		t.Errorf("%sno %q in %q", prefix(what), part, text)
	}
}

// Do wants no error.
func Do(t testing.TB, err error, what ...any) {
	t.Helper()
	if err != nil {
		t.Errorf("%s%v", prefix(what), err)
	}
}

// Fails wants an error.
func Fails(t testing.TB, err error, what ...any) {
	t.Helper()
	if err == nil {
		t.Errorf("%sno error", prefix(what))
	}
}

// Is wants an error that is or wraps another one, or none where want is nil.
func Is(t testing.TB, err, want error, what ...any) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%sgot error %v, want %v", prefix(what), err, want)
	}
}

// Says wants an error with a text in it.
func Says(t testing.TB, err error, part string, what ...any) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), part) {
		t.Errorf("%sgot error %v, want one with %q", prefix(what), err, part)
	}
}

// Err is the error of a call whose value does not matter.
func Err[T any](_ T, err error) error { return err }

func prefix(what []any) string {
	if len(what) == 0 {
		return ""
	}
	return strings.TrimSuffix(fmt.Sprintln(what...), "\n") + ": "
}
