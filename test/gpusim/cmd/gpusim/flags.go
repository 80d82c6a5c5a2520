// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Flags with values that can be wrong in many ways are strings, so that all of
// them are refused in the same words.

// wrong is the error of a flag's value; right says what it could be.
func wrong(c *cli.Command, flag, right string) error {
	return fmt.Errorf("--%s %q is not %s", flag, c.String(flag), right)
}

// numberOf reads a number that is not negative; a flag that is not set is 0.
func numberOf(c *cli.Command, flag string) (int, error) {
	if !c.IsSet(flag) {
		return 0, nil
	}
	n, err := strconv.ParseInt(c.String(flag), 10, 32)
	if err != nil || n < 0 {
		return 0, wrong(c, flag, "a number from 0 on")
	}
	return int(n), nil
}

// durationOf reads a duration that is not negative; a flag that is not set is 0.
func durationOf(c *cli.Command, flag string) (time.Duration, error) {
	if !c.IsSet(flag) {
		return 0, nil
	}
	d, err := time.ParseDuration(c.String(flag))
	if err != nil || d < 0 {
		return 0, wrong(c, flag, "a duration such as 250ms or 2s")
	}
	return d, nil
}

// gpuOf reads the index of a GPU of the machine.
func gpuOf(c *cli.Command, m *machine.Machine) (int, error) {
	n, err := strconv.Atoi(c.String("gpu"))
	if err != nil || n < 0 || n >= len(m.GPUs) {
		return 0, wrong(c, "gpu", fmt.Sprintf("the index of a GPU, which are 0 to %d", len(m.GPUs)-1))
	}
	return n, nil
}

// countOf adds what a flag says to a number; a flag that is not set adds nothing.
func countOf(c *cli.Command, flag string, to *uint64) (added bool, err error) {
	n, err := numberOf(c, flag)
	*to += uint64(n)
	return n > 0, err
}

// switchOf sets what a flag says; a flag that is not set says nothing.
func switchOf(c *cli.Command, flag string, to *bool) {
	if c.IsSet(flag) {
		*to = c.Bool(flag)
	}
}
