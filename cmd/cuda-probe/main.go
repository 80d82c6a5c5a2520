// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command cuda-probe is a small CUDA program that says, as lines of JSON, what it gets:
// devices, multiprocessors, memory. The conformance program runs it where it wants to know
// that. It is a program of its own because a client of MPS is a process, which others
// must be able to end in every way.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/partage-dev/partage/pkg/conformance/probe"
)

const name = "cuda-probe"

func init() {
	// A CUDA context belongs to a thread, and so does what enter does. The main
	// goroutine keeps its own.
	runtime.LockOSThread()
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run returns the exit code: 1 also if CUDA did not do what the program was to do,
// which it has then said.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if slices.Equal(args, []string{"-help"}) {
		_, _ = fmt.Fprint(stdout, probe.Usage)
		return 0
	}
	options, err := probe.Parse(args)
	if err == nil {
		err = enter(options)
	}
	if err == nil {
		err = finish(ctx, options, stdin, stdout)
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "%s: %s\n", name, strings.ReplaceAll(err.Error(), "\n", "; "))
		return 1
	}
	return 0
}
