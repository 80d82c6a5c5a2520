// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command packing says how well the order in which devices are published fills GPUs.
package main

import (
	"fmt"
	"os"

	"github.com/partage-dev/partage/test/scale/packing"
)

func main() {
	if err := packing.Default.Write(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
