// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command memory says how much memory the ResourceSlices of many nodes take in the scheduler.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/partage-dev/partage/test/scale/memory"
)

func main() {
	nodes := flag.Int("nodes", 400, "how many nodes there are")
	dir := flag.String("slices", "", "folder with the slices that test/scale/slices wrote")
	flag.Parse()
	if err := memory.Report(context.Background(), os.Stdout, *dir, *nodes); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
