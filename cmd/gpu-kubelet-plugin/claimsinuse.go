// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/driver/uninstall"
	"github.com/partage-dev/partage/pkg/node/command"
)

func claimsInUseCommand(c *config, stdout io.Writer) *cli.Command {
	var timeout time.Duration
	var advice string
	return &cli.Command{
		Name:  "claims-in-use",
		Usage: "list the claims of the cluster that are in use, and fail where there are any; the chart runs it before an uninstallation",
		Flags: []cli.Flag{
			command.Duration(categoryTimes, "api-timeout", 2*time.Minute, &timeout, "for how long the API server is asked"),
			command.String(categoryCluster, "advice", "", &advice, "printed where the command fails"),
		},
		Action: command.NoArguments(func(ctx context.Context, _ *cli.Command) error {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			err := printClaimsInUse(ctx, c, stdout)
			if err != nil && advice != "" {
				_, printErr := fmt.Fprintln(stdout, advice)
				err = errors.Join(err, printErr)
			}
			return err
		}),
	}
}

// errInUse follows a list with the details.
var errInUse = errors.New("claims are in use")

// printClaimsInUse fails where claims are in use, or where that cannot be found out. It
// logs little: helm prints the log for the admin to read.
func printClaimsInUse(ctx context.Context, c *config, out io.Writer) error {
	if err := c.validateClient(); err != nil {
		return err
	}
	clients, err := c.kubeClients()
	if err != nil {
		return err
	}
	err = uninstall.Check(ctx, clients.main.ResourceV1().ResourceClaims(""), driverName)
	if inUse := (*uninstall.InUseError)(nil); errors.As(err, &inUse) {
		_, err = fmt.Fprintf(out, "%v\nDelete the pods that use them first: a pod that ends while no plugin runs on its node stays in Terminating.\n", inUse)
		return errors.Join(errInUse, err)
	}
	return err
}
