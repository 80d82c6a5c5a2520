// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// memoryLimit is what a user said about one device. Keys are not looked into: an
// ordinal and the UUID of the same device are two keys, and so is nonsense.
type memoryLimit struct {
	Key   string `json:"key"`
	Bytes uint64 `json:"bytes"`
}

// memoryLimits are in the order in which they were said.
type memoryLimits []memoryLimit

func (l memoryLimits) with(key string, bytes uint64) memoryLimits {
	rest := slices.DeleteFunc(slices.Clone(l), func(m memoryLimit) bool { return m.Key == key })
	return append(rest, memoryLimit{key, bytes})
}

func (l memoryLimits) get(key string) (uint64, bool) {
	i := slices.IndexFunc(l, func(m memoryLimit) bool { return m.Key == key })
	if i < 0 {
		return 0, false
	}
	return l[i].Bytes, true
}

// of is the limit of a device, what was said last by either name, or 0.
func (l memoryLimits) of(ordinal int, uuid string) uint64 {
	for _, m := range slices.Backward(l) {
		if m.Key == strconv.Itoa(ordinal) || m.Key == uuid {
			return m.Bytes
		}
	}
	return 0
}

// parseMemory reads "10G" or "512M".
func parseMemory(text string) (uint64, error) {
	digits, shift := text, 0
	if unit := len(text) - 1; unit >= 0 {
		if s, ok := map[byte]int{'G': 30, 'g': 30, 'M': 20, 'm': 20}[text[unit]]; ok {
			digits, shift = text[:unit], s
		}
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || shift == 0 || n == 0 {
		return 0, fmt.Errorf("%q is not an amount of memory such as 2G or 512M", text)
	}
	return n << shift, nil
}

// formatMemory prints whole gibibytes, rounded down, wherever there is one: 1G for a limit of 1536M, as an H100 with driver
// 580 does.
func formatMemory(bytes uint64) string {
	if bytes >= 1<<30 {
		return fmt.Sprintf("%dG", bytes>>30)
	}
	return fmt.Sprintf("%dM", bytes>>20)
}

// parseLimits reads "0=1G,GPU-…=512M".
func parseLimits(text string) (memoryLimits, error) {
	var l memoryLimits
	if text == "" {
		return nil, nil
	}
	for entry := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(entry, "=")
		bytes, err := parseMemory(strings.TrimSpace(value))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", MemoryVariable, err)
		}
		l = l.with(strings.TrimSpace(key), bytes)
	}
	return l, nil
}

// parsePercentage reads a percentage of the multiprocessors, above 0 and up to 100.
func parsePercentage(text string) (float64, error) {
	p, err := strconv.ParseFloat(text, 64)
	if err != nil || !(p > 0 && p <= 100) { // so that NaN is refused
		return 0, fmt.Errorf("%q is not a percentage above 0 and up to 100", text)
	}
	return p, nil
}

func formatPercentage(p float64) string { return strconv.FormatFloat(p, 'f', 1, 64) }

// lower is the smaller of two limits, of which 0 is none.
func lower(a, b uint64) uint64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
