// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command cluster runs a real single-node Kubernetes on this machine, with simulated GPUs if asked to.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/partage-dev/partage/test/cluster/internal/app"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
)

func main() {
	err := app.New().Run(context.Background(), os.Args)
	var status sandbox.ExitStatus
	switch {
	case err == nil:
	case errors.As(err, &status):
		os.Exit(int(status))
	default:
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}
