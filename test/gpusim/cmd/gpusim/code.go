// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// lastCode is the greatest NVML return code.
const lastCode = int(nvml.ERROR_UNKNOWN)

// codeName is "IN_USE" for 19, and the number for a code without a name.
func codeName(code int) string {
	if name, ok := strings.CutPrefix(nvml.Return(code).String(), "ERROR_"); ok {
		return name
	}
	return strconv.Itoa(code)
}

// parseCode is the code of a name of nvml.h, with or without NVML_ERROR_ and in
// any case, or of a number. SUCCESS is none.
func parseCode(text string) (code int, ok bool) {
	if n, err := strconv.Atoi(text); err == nil {
		return n, n >= 1 && n <= lastCode
	}
	name := strings.ToUpper(strings.ReplaceAll(text, "-", "_"))
	name = strings.TrimPrefix(strings.TrimPrefix(name, "NVML_"), "ERROR_")
	for n := 1; n <= lastCode; n++ {
		if codeName(n) == name {
			return n, true
		}
	}
	return 0, false
}

// aCode says what parseCode takes.
const aCode = "an NVML error such as GPU_IS_LOST or IN_USE, or its number from 1 to 999"
