// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// InvalidError is what is wrong with a configuration: the user has to change
// it, trying again does not help.
type InvalidError struct {
	// Kind is empty where it is in doubt or not known.
	Kind string
	// Faults are never empty. Their paths start at the configuration.
	Faults field.ErrorList
}

func (e *InvalidError) Error() string {
	kind := e.Kind
	if kind == "" {
		kind = "device configuration"
	}
	return fmt.Sprintf("invalid %s: %v", kind, e.Faults.ToAggregate())
}

// Unwrap gives access to each *field.Error.
func (e *InvalidError) Unwrap() []error {
	errs := make([]error, len(e.Faults))
	for i, fault := range e.Faults {
		errs[i] = fault
	}
	return errs
}

// ErrUnsupported is what every UnsupportedError wraps.
var ErrUnsupported = errors.New("not supported yet")

// UnsupportedError is a valid configuration that this driver does not carry out.
type UnsupportedError struct {
	Kind  string
	Field string
	Value string
	// Detail narrows the value, it may be empty.
	Detail string
}

func (e *UnsupportedError) Error() string {
	value := fmt.Sprintf("%q", e.Value)
	if e.Detail != "" {
		value += " " + e.Detail
	}
	return fmt.Sprintf("%s: %s: %s is %v by this driver; leave sharing out, or ask for %q with interval %q",
		e.Kind, e.Field, value, ErrUnsupported, TimeSlicing, IntervalDefault)
}

func (e *UnsupportedError) Unwrap() error { return ErrUnsupported }

func invalid(kind string, faults field.ErrorList) error {
	if len(faults) == 0 {
		return nil
	}
	return &InvalidError{Kind: kind, Faults: faults}
}
