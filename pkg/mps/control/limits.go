// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/partage-dev/partage/pkg/mps"
)

const mebibyte = 1 << 20

// Limits of one server, or of future servers.
type Limits struct {
	// percentage is 100 without a limit.
	percentage float64
	// memory is in bytes by device index. It has only the devices that the spec
	// limits.
	memory map[int]int64
}

func limitsOf(spec mps.Spec) Limits {
	l := Limits{percentage: 100, memory: map[int]int64{}}
	if spec.ThreadPercentage > 0 {
		l.percentage = float64(spec.ThreadPercentage)
	}
	for i := range spec.Devices {
		if limit := spec.MemoryMiB(i); limit > 0 {
			l.memory[i] = limit * mebibyte
		}
	}
	return l
}

// indexes returns the devices that have a memory limit, in order.
func (l Limits) indexes() []int { return slices.Sorted(maps.Keys(l.memory)) }

// Check returns an error that names the first limit that differs from the spec's.
func (l Limits) Check(spec mps.Spec) error {
	want := limitsOf(spec)
	if l.percentage != want.percentage {
		return fmt.Errorf("active thread percentage is %g, want %g", l.percentage, want.percentage)
	}
	for _, i := range want.indexes() {
		if l.memory[i] != want.memory[i] {
			return fmt.Errorf("memory limit of device %d (%s) is %d MiB, want %d MiB",
				i, spec.Devices[i], l.memory[i]/mebibyte, want.memory[i]/mebibyte)
		}
	}
	return nil
}

// scope returns what tells the limit commands for one server from those for future
// servers: a part of their names, and their first argument.
func scope(server int) (name, argument string) {
	if server == 0 {
		return "default_", ""
	}
	return "", " " + strconv.Itoa(server)
}

// limitQueries returns commands that query limits, with one line of answer each.
func limitQueries(server int, spec mps.Spec) []string {
	name, argument := scope(server)
	queries := []string{"get_" + name + "active_thread_percentage" + argument}
	for _, i := range limitsOf(spec).indexes() {
		queries = append(queries, fmt.Sprintf("get_%sdevice_pinned_mem_limit%s %d", name, argument, i))
	}
	return queries
}

// limitCommands returns commands that set limits. The percentage is always set,
// since it may have been lower.
func limitCommands(server int, l Limits) []string {
	name, argument := scope(server)
	commands := []string{fmt.Sprintf("set_%sactive_thread_percentage%s %g", name, argument, l.percentage)}
	for _, i := range l.indexes() {
		commands = append(commands, fmt.Sprintf("set_%sdevice_pinned_mem_limit%s %d %dM", name, argument, i, l.memory[i]/mebibyte))
	}
	return commands
}

// parseLimits reads the answers to limitQueries.
func parseLimits(answers []string, spec mps.Spec) (Limits, error) {
	l := Limits{memory: map[int]int64{}}
	var err error
	if l.percentage, err = ParsePercentage(answers[0]); err != nil {
		return Limits{}, fmt.Errorf("active thread percentage: %w", err)
	}
	for n, i := range limitsOf(spec).indexes() {
		if l.memory[i], err = parseMemory(answers[1+n]); err != nil {
			return Limits{}, fmt.Errorf("memory limit of device %d (%s): %w", i, spec.Devices[i], err)
		}
	}
	return l, nil
}

// parseMemory reads a memory limit: a number with G or M, as drivers print it, with
// another unit, or in bytes.
func parseMemory(answer string) (int64, error) {
	word, _, _ := strings.Cut(strings.TrimSpace(answer), " ")
	digits := strings.TrimRightFunc(word, unicode.IsLetter)
	name := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(word[len(digits):]), "B"), "I")
	unit, ok := map[string]int64{"": 1, "K": 1 << 10, "M": mebibyte, "G": 1 << 30, "T": 1 << 40}[name]
	number, err := strconv.ParseFloat(digits, 64)
	if err != nil || !ok {
		return 0, fmt.Errorf("want a size such as 512M%s", Quote(answer))
	}
	return int64(number * float64(unit)), nil
}
