// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/urfave/cli/v3"
	logsapi "k8s.io/component-base/logs/api/v1"
	// Makes the json format known.
	_ "k8s.io/component-base/logs/json/register"
)

// setUpLogging applies the flags about logging; only the first call counts.
func (c *config) setUpLogging() error {
	logging := logsapi.NewLoggingConfiguration()
	logging.Format = c.loggingFormat
	logging.Verbosity = logsapi.VerbosityLevel(c.verbosity) // #nosec G115 -- validated
	if err := logsapi.ValidateAndApply(logging, nil); err != nil {
		return fmt.Errorf("set up logging: %w", err)
	}
	return nil
}

// flagsInEffect lists names and values for the log.
func flagsInEffect(cmd *cli.Command) []any {
	var pairs []any
	for _, flag := range cmd.Flags {
		name := flag.Names()[0]
		if name != "help" {
			pairs = append(pairs, name, cmd.Value(name))
		}
	}
	return pairs
}
