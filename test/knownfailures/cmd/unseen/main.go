// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command unseen reads the logs of a run of all tests, and fails if a listed known failure was not seen to fail in it.
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/partage-dev/partage/test/knownfailures"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "unseen:", err)
		os.Exit(1)
	}
}

func run(logs []string) error {
	var all strings.Builder
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err != nil {
			return fmt.Errorf("read what the tests said: %w", err)
		}
		all.Write(text)
	}
	unseen, err := knownfailures.Unseen(all.String())
	for _, e := range unseen {
		fmt.Printf("%s %s is listed, and was not seen to fail: it was skipped, does not exist, or nothing tests its package\n", e.Package, e.Test)
	}
	if len(unseen) > 0 {
		return fmt.Errorf("%d known failures of test/knownfailures/list.yaml were not seen", len(unseen))
	}
	return err
}
