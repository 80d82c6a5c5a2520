// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"strconv"
	"strings"
)

// ParseMemory reads a memory limit as this package reads the daemon's answers, in bytes.
func ParseMemory(answer string) (int64, error) {
	a, err := parseMemory(answer)
	return a.bytes, err
}

// ParsePercentage reads an active thread percentage, 0 to 100.
func ParsePercentage(answer string) (float64, error) {
	percentage, err := strconv.ParseFloat(strings.TrimSuffix(answer, "%"), 64)
	if err != nil {
		return 0, fmt.Errorf("want a number%s", Quote(answer))
	}
	return percentage, nil
}
