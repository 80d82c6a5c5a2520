// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

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
