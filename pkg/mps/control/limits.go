// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"

	"github.com/partage-dev/partage/pkg/mps"
)

const mebibyte = 1 << 20

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

// limit is one limit of a server, or of future servers.
type limit struct {
	// set and get are commands; the answer to get is one line.
	what, set, get string
	// differs returns how an answer differs from what is wanted, or nothing.
	differs func(answer string) (string, error)
}

// limitsOf returns the limits that a spec asks for of a server, where 0 means future ones. The percentage is always one of
// them, since it may have been lower.
func limitsOf(server int, spec mps.Spec) []limit {
	scope, argument := "", " "+strconv.Itoa(server)
	if server == 0 {
		scope, argument = "default_", ""
	}
	percentage := float64(cmp.Or(spec.ThreadPercentage, 100))
	limits := []limit{{
		what: "active thread percentage",
		set:  fmt.Sprintf("set_%sactive_thread_percentage%s %g", scope, argument, percentage),
		get:  fmt.Sprintf("get_%sactive_thread_percentage%s", scope, argument),
		differs: func(answer string) (string, error) {
			got, err := ParsePercentage(answer)
			if err != nil || got == percentage {
				return "", err
			}
			return fmt.Sprintf("%g, want %g", got, percentage), nil
		},
	}}
	for i, uuid := range spec.Devices {
		if want := spec.MemoryMiB(i); want > 0 {
			limits = append(limits, limit{
				what: fmt.Sprintf("memory limit of device %d (%s)", i, uuid),
				set:  fmt.Sprintf("set_%sdevice_pinned_mem_limit%s %d %dM", scope, argument, i, want),
				get:  fmt.Sprintf("get_%sdevice_pinned_mem_limit%s %d", scope, argument, i),
				// No document says in which unit a limit is printed.
				differs: func(answer string) (string, error) {
					got, err := ParseMemory(answer)
					if err != nil || got.Confirms(want*mebibyte) {
						return "", err
					}
					return fmt.Sprintf("%d MiB, want %d MiB", got.Bytes/mebibyte, want), nil
				},
			})
		}
	}
	if spec.ClientPriority != "" {
		limits = append(limits, priorityOf(spec.ClientPriority))
	}
	return limits
}

// queries are the commands that read limits.
func queries(limits []limit) (commands []string) {
	for _, l := range limits {
		commands = append(commands, l.get)
	}
	return commands
}

// compare returns which of the limits differs from what was answered to their queries, and how, or nothing.
func compare(limits []limit, answers []string) (differs string, err error) {
	for i, l := range limits {
		how, err := l.differs(answers[i])
		if err != nil {
			return "", fmt.Errorf("%s: %w", l.what, err)
		}
		if how != "" && differs == "" {
			differs = l.what + " is " + how
		}
	}
	return differs, nil
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
