// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"fmt"
	"maps"
	"math"
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
	// memory is by device index. It has only the devices that the spec limits.
	memory map[int]Memory
	// priority is that of new clients of all servers, if the spec has one.
	priority mps.ClientPriority
}

// Memory is a memory limit as a daemon prints it.
type Memory struct {
	Bytes int64
	// unit is what it was rounded to when the daemon printed it, in bytes: 1 GiB for
	// "5G", 1 MiB for "5120M".
	unit int64
}

// Confirms reports whether a daemon that has the wanted limit, in bytes, can have printed this
// one. It rounds to its unit, in whichever direction; 0 would mean that there is no limit.
func (m Memory) Confirms(want int64) bool {
	return m.Bytes > 0 && m.Bytes-want < m.unit && want-m.Bytes < m.unit
}

func limitsOf(spec mps.Spec) Limits {
	l := Limits{percentage: 100, memory: map[int]Memory{}, priority: spec.ClientPriority}
	if spec.ThreadPercentage > 0 {
		l.percentage = float64(spec.ThreadPercentage)
	}
	for i := range spec.Devices {
		if limit := spec.MemoryMiB(i); limit > 0 {
			l.memory[i] = Memory{Bytes: limit * mebibyte, unit: mebibyte}
		}
	}
	return l
}

// indexes returns the devices that have a memory limit, in order.
func (l Limits) indexes() []int { return slices.Sorted(maps.Keys(l.memory)) }

// Check returns an error that names the first limit that is not the spec's. A memory
// limit that the daemon prints in a coarser unit is the spec's if that rounds to it: no
// document says in which unit a limit is printed.
func (l Limits) Check(spec mps.Spec) error {
	want := limitsOf(spec)
	if l.percentage != want.percentage {
		return fmt.Errorf("active thread percentage is %g, want %g", l.percentage, want.percentage)
	}
	for _, i := range want.indexes() {
		if !l.memory[i].Confirms(want.memory[i].Bytes) {
			return fmt.Errorf("memory limit of device %d (%s) is %d MiB, want %d MiB",
				i, spec.Devices[i], l.memory[i].Bytes/mebibyte, want.memory[i].Bytes/mebibyte)
		}
	}
	if want.priority != "" && l.priority != want.priority {
		return fmt.Errorf("default client priority is %s, want %s", l.priority, want.priority)
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
	if spec.ClientPriority != "" {
		queries = append(queries, priorityQuery)
	}
	return queries
}

// limitCommands returns commands that set limits. The percentage is always set,
// since it may have been lower.
func limitCommands(server int, l Limits) []string {
	name, argument := scope(server)
	commands := []string{fmt.Sprintf("set_%sactive_thread_percentage%s %g", name, argument, l.percentage)}
	for _, i := range l.indexes() {
		commands = append(commands, fmt.Sprintf("set_%sdevice_pinned_mem_limit%s %d %dM", name, argument, i, l.memory[i].Bytes/mebibyte))
	}
	if l.priority != "" {
		commands = append(commands, priorityCommand(l.priority))
	}
	return commands
}

// parseLimits reads the answers to limitQueries.
func parseLimits(answers []string, spec mps.Spec) (Limits, error) {
	l := Limits{memory: map[int]Memory{}}
	var err error
	if l.percentage, err = ParsePercentage(answers[0]); err != nil {
		return Limits{}, fmt.Errorf("active thread percentage: %w", err)
	}
	for n, i := range limitsOf(spec).indexes() {
		if l.memory[i], err = ParseMemory(answers[1+n]); err != nil {
			return Limits{}, fmt.Errorf("memory limit of device %d (%s): %w", i, spec.Devices[i], err)
		}
	}
	if spec.ClientPriority != "" {
		if l.priority, err = ParsePriority(answers[len(answers)-1]); err != nil {
			return Limits{}, fmt.Errorf("default client priority: %w", err)
		}
	}
	return l, nil
}

// ParsePercentage reads an active thread percentage, 0 to 100.
func ParsePercentage(answer string) (float64, error) {
	percentage, err := strconv.ParseFloat(strings.TrimSuffix(answer, "%"), 64)
	if err != nil {
		return 0, fmt.Errorf("want a number%s", printed(answer))
	}
	return percentage, nil
}

// ParseMemory reads a memory limit: a number with G or M, as drivers print it, with
// another unit, or in bytes.
func ParseMemory(answer string) (Memory, error) {
	word, _, _ := strings.Cut(strings.TrimSpace(answer), " ")
	digits := strings.TrimRightFunc(word, unicode.IsLetter)
	name := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(word[len(digits):]), "B"), "I")
	unit, ok := map[string]float64{"": 1, "K": 1 << 10, "M": mebibyte, "G": 1 << 30, "T": 1 << 40}[name]
	number, err := strconv.ParseFloat(digits, 64)
	if err != nil || !ok {
		return Memory{}, fmt.Errorf("want a size such as 512M%s", printed(answer))
	}
	bytes := int64(number * unit)
	if _, decimals, ok := strings.Cut(digits, "."); ok {
		unit /= math.Pow10(len(decimals))
	}
	return Memory{Bytes: bytes, unit: max(1, int64(unit))}, nil
}
