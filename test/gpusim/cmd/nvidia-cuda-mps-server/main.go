// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command nvidia-cuda-mps-server stands in for NVIDIA's program of that name on a
// simulated machine. nvidia-cuda-mps-control starts it.
package main

import (
	"fmt"
	"os"

	"github.com/partage-dev/partage/test/gpusim/mps"
)

func main() {
	if err := mps.RunServer(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
