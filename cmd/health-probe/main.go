// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command health-probe asks the plugin or the MPS supervisor, in whose container it runs,
// whether it is well. The kubelet's probes start it many times a minute on every node, so
// it is small: most of what a program costs here is its start.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/partage-dev/partage/pkg/node/healthsocket"
)

const (
	name = "health-probe"
	// socketVariable is set in the container for the process that serves.
	socketVariable = "HEALTH_SOCKET"
)

func main() {
	os.Exit(run(os.Args[1:], os.Getenv(socketVariable), os.Stderr))
}

// run returns the exit code. The kubelet puts what is written into its event.
func run(args []string, socket string, stderr io.Writer) int {
	if err := probe(args, socket); err != nil {
		_, _ = fmt.Fprintln(stderr, strings.ReplaceAll(err.Error(), "\n", "; "))
		return 1
	}
	return 0
}

func probe(args []string, socket string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: got %q: want %s or %s", name, args, healthsocket.Liveness, healthsocket.Readiness)
	}
	if socket == "" {
		return errors.New(name + ": " + socketVariable + ` is "": want the socket of the process to ask`)
	}
	return healthsocket.Ask(context.Background(), socket, args[0])
}
