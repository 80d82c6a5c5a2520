// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"path/filepath"

	"github.com/urfave/cli/v3"
	logsapi "k8s.io/component-base/logs/api/v1"
	// Makes the json format known.
	_ "k8s.io/component-base/logs/json/register"

	"github.com/partage-dev/partage/pkg/node/host"
)

// Process is the value of the flags that every command has.
type Process struct {
	HealthSocket  string
	Verbosity     int
	LoggingFormat string
}

const healthSocketFlag = "health-socket"

// Flags returns the flags.
func (p *Process) Flags(category string) []cli.Flag {
	return []cli.Flag{
		String(category, healthSocketFlag, "", &p.HealthSocket,
			"unix socket on which health-probe gets its answers, in a folder of this process's own; empty: off"),
		Int(category, verbosityFlag, 2, &p.Verbosity,
			"log verbosity: 2 what changes, 4 why, 6 every gRPC call with its content"),
		String(category, "logging-format", "text", &p.LoggingFormat, "text or json"),
	}
}

// Validate names every flag that is wrong.
func (p *Process) Validate() error {
	right := p.HealthSocket == "" || filepath.IsAbs(p.HealthSocket) && len(p.HealthSocket) <= host.MaxSocketPath
	return errors.Join(
		Check(healthSocketFlag, p.HealthSocket, right, fmt.Sprintf("an absolute path of at most %d bytes, or nothing", host.MaxSocketPath)),
		p.ValidateLogging())
}

// ValidateLogging is Validate without what a command needs that runs for long.
func (p *Process) ValidateLogging() error {
	return errors.Join(
		Check(verbosityFlag, p.Verbosity, p.Verbosity >= 0, "0 or more"),
		Check("logging-format", p.LoggingFormat, p.LoggingFormat == "text" || p.LoggingFormat == "json", "text or json"))
}

// SetUpLogging applies the flags about logging. Only the first call in a process
// counts.
func (p *Process) SetUpLogging() error {
	logging := logsapi.NewLoggingConfiguration()
	logging.Format = p.LoggingFormat
	logging.Verbosity = logsapi.VerbosityLevel(p.Verbosity) // #nosec G115 -- validated
	// Every line is written at once. A process with nothing to do had better not wake up for more.
	logging.FlushFrequency.Duration.Duration = math.MaxInt64
	if err := logsapi.ValidateAndApply(logging, nil); err != nil {
		return fmt.Errorf("set up logging: %w", err)
	}
	return nil
}

// ListenHealth listens on the health socket. It returns nil if there is to be none.
func (p *Process) ListenHealth(ctx context.Context) (net.Listener, error) {
	if p.HealthSocket == "" {
		return nil, nil //nolint:nilnil // off
	}
	listener, err := host.ListenUnix(ctx, p.HealthSocket)
	if err != nil {
		return nil, fmt.Errorf("--%s (%s): %w", healthSocketFlag, EnvName(healthSocketFlag), err)
	}
	return listener, nil
}
