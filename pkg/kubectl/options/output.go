// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package options

import (
	"fmt"
	"slices"
	"strings"
)

// Values of -o. Without one the output is for people.
const (
	OutputJSON = "json"
	OutputYAML = "yaml"
	OutputWide = "wide"
	OutputName = "name"
)

// CustomColumns begins a value of -o, which goes on as that of kubectl.
const CustomColumns = "custom-columns="

// Outputs returns all values of -o, those that end with = without what follows.
func Outputs() []string {
	return []string{OutputJSON, OutputYAML, OutputWide, OutputName, "jsonpath=", "jsonpath-file=", "go-template=", CustomColumns}
}

// output is the flag -o, which refuses what no command can print before anything is read.
type output string

// String returns the value.
func (o *output) String() string { return string(*o) }

// Type names the value in the help.
func (o *output) Type() string { return "format" }

// Set takes a value that there is.
func (o *output) Set(value string) error {
	format, _, isTemplate := strings.Cut(value, "=")
	if isTemplate {
		format += "="
	}
	if !slices.Contains(Outputs(), format) {
		return fmt.Errorf("it must be one of %s", strings.Join(Outputs(), ", "))
	}
	*o = output(value)
	return nil
}
