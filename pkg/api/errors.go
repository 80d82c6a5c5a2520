// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// InvalidError describes what is wrong with a configuration. Only the user can fix
// it; a retry does not help.
type InvalidError struct {
	// Kind is empty if it is not known.
	Kind string
	// Faults has at least one element. Paths start at the configuration.
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

func invalid(kind string, faults field.ErrorList) error {
	if len(faults) == 0 {
		return nil
	}
	return &InvalidError{Kind: kind, Faults: faults}
}
