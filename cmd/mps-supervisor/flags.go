// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
	logsapi "k8s.io/component-base/logs/api/v1"
	// Makes the json format known.
	_ "k8s.io/component-base/logs/json/register"
)

// config is the value of every flag.
type config struct {
	mpsDir, driverRoot string
	checkInterval      time.Duration
	healthPort         int
	verbosity          int
	loggingFormat      string
}

func (c *config) flags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{
			Name: "mps-dir", Value: "/run/partage/mps", Destination: &c.mpsDir, Sources: env("mps-dir"),
			Usage: "directory for sessions and for the socket; must be the same path inside and outside of the container, " +
				"and what is mounted in it must show outside",
		},
		&cli.StringFlag{
			Name: "driver-root", Value: "/", Destination: &c.driverRoot, Sources: env("driver-root"),
			Usage: "root of the tree that holds the NVIDIA driver's libraries and programs, as this process sees it",
		},
		&cli.DurationFlag{
			Name: "check-interval", Value: 2 * time.Second, Destination: &c.checkInterval, Sources: env("check-interval"),
			Usage: "time between two looks at the server of a session; the end of a daemon is noticed at once",
		},
		&cli.IntFlag{
			Name: "health-port", Value: 51516, Destination: &c.healthPort, Sources: env("health-port"),
			Usage: "port of the gRPC health service with the services liveness and readiness; 0: off",
		},
		&cli.IntFlag{
			Name: "v", Value: 2, Destination: &c.verbosity, Sources: cli.EnvVars("LOG_LEVEL"),
			Usage: "log verbosity: 2 what changes, 4 why",
		},
		&cli.StringFlag{
			Name: "logging-format", Value: "text", Destination: &c.loggingFormat, Sources: env("logging-format"), Usage: "text or json",
		},
	}
}

// env is the environment variable that a flag falls back to: MPS_DIR for mps-dir.
func env(flag string) cli.ValueSourceChain { return cli.EnvVars(envName(flag)) }

func envName(flag string) string {
	if flag == "v" {
		return "LOG_LEVEL"
	}
	return strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

const (
	// A typing error is not to make the supervisor do nothing else, or nothing.
	shortest = 50 * time.Millisecond
	longest  = time.Minute
)

// validate names every wrong flag, its value and what would be right.
func (c *config) validate() error {
	var errs []error
	wrong := func(flag string, value any, want string) {
		errs = append(errs, fmt.Errorf("--%s (%s) is %q: want %s", flag, envName(flag), fmt.Sprint(value), want))
	}
	for flag, path := range map[string]string{"mps-dir": c.mpsDir, "driver-root": c.driverRoot} {
		if !filepath.IsAbs(path) {
			wrong(flag, path, "an absolute path")
		} else if info, err := os.Stat(path); err == nil && !info.IsDir() {
			wrong(flag, path, "a directory")
		}
	}
	if c.checkInterval < shortest || c.checkInterval > longest {
		wrong("check-interval", c.checkInterval, fmt.Sprintf("a time from %s to %s", shortest, longest))
	}
	if c.healthPort < 0 || c.healthPort > 65535 {
		wrong("health-port", c.healthPort, "a port between 1 and 65535, or 0 for none")
	}
	if c.verbosity < 0 {
		wrong("v", c.verbosity, "0 or more")
	}
	if c.loggingFormat != "text" && c.loggingFormat != "json" {
		wrong("logging-format", c.loggingFormat, "text or json")
	}
	return errors.Join(errs...)
}

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
