// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command sizes prints how large the repository is, what its enumerations ran and how long its last make test took.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/partage-dev/partage/test/sizes"
)

func main() {
	output := flag.String("output", "_output", "the folder in which make test leaves its logs")
	least := flag.Int("least", 600, "lines of the smallest folder of pkg and cmd to print")
	flag.Parse()
	if err := run(*output, *least); err != nil {
		fmt.Fprintln(os.Stderr, "sizes:", err)
		os.Exit(1)
	}
}

func run(output string, least int) error {
	// What is committed or about to be, and nothing that was built.
	list, err := exec.CommandContext(context.Background(), "git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate").Output()
	if err != nil {
		return fmt.Errorf("list the files of the repository: %w", err)
	}
	var names []string
	for _, name := range strings.Fields(string(list)) {
		if info, err := os.Lstat(name); err == nil && info.Mode().IsRegular() {
			names = append(names, name)
		}
	}
	r, err := sizes.Read(".", names, output)
	if err != nil {
		return err
	}
	return r.Print(os.Stdout, least)
}
