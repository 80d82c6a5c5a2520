// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// ErrRestartRequired means that this process has loaded the library of another driver
// version than the installed one, and cannot load a second one.
var ErrRestartRequired = errors.New("the process must be restarted to use the installed driver")

// oldest is the first driver that has all that is needed to use a GPU.
const oldest = 525

func checkVersion(lib nvml.Interface) error {
	version, _ := lib.SystemGetDriverVersion() // whatever fails here fails again, and says so
	branch, _, _ := strings.Cut(version, ".")
	if number, err := strconv.Atoi(branch); err == nil && number < oldest {
		return fmt.Errorf("the driver is %s, R%d or newer is needed: %w", version, oldest, gpu.ErrNotSupported)
	}
	return nil
}

// bound is the version of the first library that this process loaded. The dynamic linker resolves
// each function of the bindings once, to that library, and never unloads it: a
// library that is loaded from another path later is never called (measured with
// glibc 2.36 and go-nvml 0.13.4). So a driver upgrade needs a new process.
var bound atomic.Pointer[string]

func bind(path string) {
	version := libraryVersion(path)
	bound.CompareAndSwap(nil, &version)
}

// checkBound fails if path is the library of another driver version than the bound
// one. Files without a version in their name pass.
func checkBound(path string) error {
	was, is := bound.Load(), libraryVersion(path)
	if was == nil || *was == "" || is == "" || *was == is {
		return nil
	}
	return fmt.Errorf("the NVML library is %s now, this process has loaded %s: %w", is, *was, ErrRestartRequired)
}

// libraryVersion returns "580.95.05" for libnvidia-ml.so.580.95.05, following links,
// and "" if the name has no version.
func libraryVersion(path string) string {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	_, version, _ := strings.Cut(filepath.Base(path), ".so.")
	if !strings.Contains(version, ".") {
		return "" // ".so.1" is the name of the interface
	}
	return version
}
