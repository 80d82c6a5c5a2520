// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// maxMessage is how long the message of an InvalidError may be, in bytes. It becomes an
// event, in which there is other text, too.
const maxMessage = 1000

// InvalidError describes what is wrong with a configuration. Only the user can fix
// it; a retry does not help.
type InvalidError struct {
	// Kind is empty if it is not known.
	Kind string
	// Faults has at least one element. Paths start at the configuration.
	Faults field.ErrorList
	// more is how many faults there are beside these.
	more int
}

func (e *InvalidError) Error() string {
	kind := e.Kind
	if kind == "" {
		kind = "device configuration"
	}
	// There may be as many faults as a claim has room for.
	named, size := 0, len("invalid : , and 10000 more")+len(kind)
	for _, fault := range e.Faults {
		if size += len(fault.Error()) + len(", "); size > maxMessage && named > 0 {
			break
		}
		named++
	}
	text := fmt.Sprintf("invalid %s: %v", kind, e.Faults[:named].ToAggregate())
	if more := len(e.Faults) - named + e.more; more > 0 {
		text += fmt.Sprintf(", and %d more", more)
	}
	return quote.Line(text, maxMessage)
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
