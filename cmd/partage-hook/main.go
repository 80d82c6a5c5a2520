// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command partage-hook is what container runtimes run before they start a container
// with limited shares: it refuses one that would run without its limits. It is static
// and small, and reads no environment, because it runs as root of the host on behalf of
// a tenant's container.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/version"
)

const (
	name = "partage-hook"
	// maxMessage is how many bytes of an error are told: the runtime, the kubelet and the event of the pod repeat it.
	maxMessage = 2000
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if err := do(args, stdin, stdout); err != nil {
		_, _ = fmt.Fprintf(stderr, "%s: %s\n", name, quote.Line(err.Error(), maxMessage))
		return 1
	}
	return 0
}

func do(args []string, stdin io.Reader, stdout io.Writer) error {
	if len(args) == 1 && args[0] == "version" {
		_, err := fmt.Fprintln(stdout, version.Get())
		return err
	}
	return hook.Run(context.Background(), args, stdin)
}
