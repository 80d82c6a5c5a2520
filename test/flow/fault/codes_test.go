// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// code is an nvmlReturn_t.
type code struct {
	name  string // "UNKNOWN"
	value int
}

// nvmlHeader is what nvml.h says about return codes.
type nvmlHeader struct {
	values map[string]int
	// documented are the codes that a function gives, by its name, without
	// SUCCESS.
	documented map[string][]string
}

// Codes that every call gives, whatever its documentation lists, and those that
// changes give beside them.
var (
	anyCall = []string{"UNKNOWN", "TIMEOUT", "GPU_IS_LOST", "RESET_REQUIRED", "NO_PERMISSION", "DRIVER_NOT_LOADED"}
	changes = []string{"IN_USE", "INSUFFICIENT_RESOURCES"}
)

var (
	codeValue   = regexp.MustCompile(`(?m)^\s*NVML_ERROR_([A-Z_]+)\s*=\s*([0-9]+)`)
	codeMention = regexp.MustCompile(`\\ref NVML_ERROR_([A-Z_]+)`)
	declaration = regexp.MustCompile(`DECLDIR\s+(nvml[A-Za-z0-9_]+)\s*\(`)
)

// readHeader reads the header that the bindings are made from.
func readHeader(t *testing.T) *nvmlHeader {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml/pkg/nvml").Output()
	must.Do(t, err, "find nvml.h")
	data := must.Get(os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "nvml.h")))(t)
	h := parseHeader(string(data))
	if len(h.values) == 0 || len(h.documented) == 0 {
		t.Fatalf("nvml.h has %d codes and %d functions with a list of them", len(h.values), len(h.documented))
	}
	return h
}

func parseHeader(text string) *nvmlHeader {
	h := &nvmlHeader{values: map[string]int{}, documented: map[string][]string{}}
	for _, m := range codeValue.FindAllStringSubmatch(text, -1) {
		value, err := strconv.Atoi(m[2])
		if err == nil {
			h.values[m[1]] = value
		}
	}
	for _, at := range declaration.FindAllStringSubmatchIndex(text, -1) {
		before := text[:at[0]]
		comment := before[max(strings.LastIndex(before, "/**"), 0):]
		if _, codes, found := strings.Cut(comment, "@return"); found {
			for _, m := range codeMention.FindAllStringSubmatch(codes, -1) {
				h.documented[text[at[2]:at[3]]] = append(h.documented[text[at[2]:at[3]]], m[1])
			}
		}
	}
	return h
}

// codes are all that a function can give, in the order of their values.
func (h *nvmlHeader) codes(function string) ([]code, error) {
	names, known := h.documented[function]
	if !known {
		return nil, fmt.Errorf("nvml.h does not say what %s returns", function)
	}
	names = slices.Concat(names, anyCall)
	if harness.IsChange(function) {
		names = append(names, changes...)
	}
	var codes []code
	for _, name := range names {
		value, known := h.values[name]
		if !known {
			return nil, fmt.Errorf("nvml.h has no value of %s, which %s returns", name, function)
		}
		codes = append(codes, code{name, value})
	}
	slices.SortFunc(codes, func(a, b code) int { return a.value - b.value })
	return slices.Compact(codes), nil
}

// TestHeaderCodes checks the lists of some well-known functions.
func TestHeaderCodes(t *testing.T) {
	t.Parallel()
	h := readHeader(t)
	for function, want := range map[string][]string{
		"nvmlGpuInstanceDestroy":           {"UNINITIALIZED", "INVALID_ARGUMENT", "NOT_SUPPORTED", "NO_PERMISSION", "IN_USE"},
		"nvmlDeviceGetHandleByPciBusId_v2": {"NOT_FOUND", "INSUFFICIENT_POWER", "IRQ_ISSUE"},
		"nvmlDeviceGetMigMode":             {"UNINITIALIZED", "NOT_SUPPORTED", "UNKNOWN"},
	} {
		codes, err := h.codes(function)
		expect.Do(t, err)
		for _, name := range want {
			if !slices.ContainsFunc(codes, func(c code) bool { return c.name == name }) {
				t.Errorf("%s: %v lacks %s", function, codes, name)
			}
		}
	}
}
