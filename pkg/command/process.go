// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/urfave/cli/v3"
	logsapi "k8s.io/component-base/logs/api/v1"
	// Makes the json format known.
	_ "k8s.io/component-base/logs/json/register"
)

// Process is the value of the flags that every command has.
type Process struct {
	HealthPort    int
	Verbosity     int
	LoggingFormat string
}

const healthPortFlag = "health-port"

// Flags returns the flags of a command whose default health port is given.
func (p *Process) Flags(category string, healthPort int) []cli.Flag {
	return []cli.Flag{
		Int(category, healthPortFlag, healthPort, &p.HealthPort,
			"port of the gRPC health service with the services liveness and readiness; 0: off"),
		Int(category, verbosityFlag, 2, &p.Verbosity,
			"log verbosity: 2 what changes, 4 why, 6 every gRPC call with its content"),
		String(category, "logging-format", "text", &p.LoggingFormat, "text or json"),
	}
}

// Validate names every flag that is wrong.
func (p *Process) Validate() error {
	var errs []error
	if p.HealthPort < 0 || p.HealthPort > 65535 {
		errs = append(errs, Wrong(healthPortFlag, p.HealthPort, "a port between 1 and 65535, or 0 for none"))
	}
	return errors.Join(append(errs, p.ValidateLogging())...)
}

// ValidateLogging is Validate without what a command needs that runs for long.
func (p *Process) ValidateLogging() error {
	var errs []error
	if p.Verbosity < 0 {
		errs = append(errs, Wrong(verbosityFlag, p.Verbosity, "0 or more"))
	}
	if p.LoggingFormat != "text" && p.LoggingFormat != "json" {
		errs = append(errs, Wrong("logging-format", p.LoggingFormat, "text or json"))
	}
	return errors.Join(errs...)
}

// SetUpLogging applies the flags about logging. Only the first call in a process
// counts.
func (p *Process) SetUpLogging() error {
	logging := logsapi.NewLoggingConfiguration()
	logging.Format = p.LoggingFormat
	logging.Verbosity = logsapi.VerbosityLevel(p.Verbosity) // #nosec G115 -- validated
	if err := logsapi.ValidateAndApply(logging, nil); err != nil {
		return fmt.Errorf("set up logging: %w", err)
	}
	return nil
}

// ListenHealth opens the health port. It returns nil if there is to be none.
func (p *Process) ListenHealth(ctx context.Context) (net.Listener, error) {
	if p.HealthPort == 0 {
		return nil, nil //nolint:nilnil // off
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", ":"+strconv.Itoa(p.HealthPort))
	if err != nil {
		return nil, fmt.Errorf("listen on --%s (%s): %w", healthPortFlag, EnvName(healthPortFlag), err)
	}
	return listener, nil
}
