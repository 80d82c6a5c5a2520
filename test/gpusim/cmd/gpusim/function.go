// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/mps"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// ofProgram reports whether a function is one of the stand-ins of MPS, or a run of nvidia-smi.
func ofProgram(function string) bool {
	return strings.HasPrefix(function, state.MPS) || function == state.SMI
}

// checkFunction fails unless the machine's library exports the function that
// the user named, or a program has it: a fault on any other would never strike.
func checkFunction(c *cli.Command, root string) error {
	name := c.String("function")
	if name == "*" {
		return nil
	}
	if ofProgram(name) {
		if known := append(mps.Functions(), state.SMI); !slices.Contains(known, name) {
			return wrong(c, "function", "one of "+strings.Join(known, ", "))
		}
		return nil
	}
	known, err := functions(filepath.Join(sysroot.LibraryDir(root), "libnvidia-ml.so.1"))
	if err != nil {
		return err
	}
	if slices.Contains(known, name) {
		return nil
	}
	right := "a function of libnvidia-ml.so, such as nvmlGpuInstanceDestroy"
	near := slices.DeleteFunc(known, func(k string) bool {
		return !strings.Contains(strings.ToLower(k), strings.TrimPrefix(strings.ToLower(name), "nvml"))
	})
	if len(near) > 0 && len(near) <= 8 {
		right = "a function of libnvidia-ml.so: is it " + strings.Join(near, " or ")
	}
	return wrong(c, "function", right)
}

// functions are the names that a library exports.
func functions(path string) ([]string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the machine's library %s: %w", path, err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("read the machine's library %s: %w", path, err)
	}
	var names []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			names = append(names, s.Name)
		}
	}
	return names, nil
}
