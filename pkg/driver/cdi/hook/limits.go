// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"debug/elf"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	// PreloadFile is where the dynamic loader of a container looks up what to load into
	// every program.
	PreloadFile = "/etc/ld.so.preload"
	// InterposerLibrary is the path in the container of the library that limits
	// programs.
	InterposerLibrary = "/usr/local/vgpu/libvgpu.so"

	// maxPreload is more than anybody preloads. The file may be a pod's own.
	maxPreload = 64 << 10
)

// numberedLimits start the names of variables that take precedence over the limits of
// a container's device. The number is what the library makes of the GPUs that it sees.
var numberedLimits = []string{"CUDA_DEVICE_MEMORY_LIMIT_", "CUDA_DEVICE_SM_LIMIT_"}

// CheckSoftwareLimits refuses a container in which an interposer library would not be
// loaded, or would apply other limits than those of the container's device. input is
// what the runtime writes to hooks.
func CheckSoftwareLimits(input io.Reader) error {
	c, err := readContainer(input)
	if err != nil {
		return fmt.Errorf("software limits: %w", err)
	}
	if err := CheckMarkers(c.Process.Env); err != nil {
		return err
	}
	for _, variable := range c.Process.Env {
		for _, prefix := range numberedLimits {
			if strings.HasPrefix(variable, prefix) {
				return fmt.Errorf("this container has the variable %s, which takes precedence over the limits of its share: remove it", quote.Text(variable))
			}
		}
	}
	if err := c.checkPreload(); err != nil {
		return fmt.Errorf("the library that limits this container would not be loaded, so it would run without its limits: %w", err)
	}
	return nil
}

func (c *container) checkPreload() error {
	library, found := c.mountAt(InterposerLibrary)
	if !found {
		return fmt.Errorf("there is no mount at %s", InterposerLibrary)
	}
	m, found := c.mountAt(PreloadFile)
	if !found {
		return fmt.Errorf("there is no mount at %s", PreloadFile)
	}
	data, err := readFile(m.Source, maxPreload)
	if err != nil {
		return fmt.Errorf("read what is mounted at %s: %w", PreloadFile, err)
	}
	if !slices.Contains(strings.Fields(string(data)), InterposerLibrary) {
		return fmt.Errorf("%s, which is mounted at %s, does not name %s", quote.Text(m.Source), PreloadFile, InterposerLibrary)
	}
	return checkLibrary(library.Source)
}

// libraryMachines are what libraries are for that the programs of a machine can load.
var libraryMachines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// checkLibrary refuses what the dynamic loader would pass over with a warning. If it lacks something in the container, its C library for
// example, programs end when they start.
func checkLibrary(path string) error {
	// Libraries have versions in their names, and links to those.
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return short(err)
	}
	file, err := openRegular(resolved)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	library, err := elf.NewFile(file)
	if err != nil {
		return fmt.Errorf("read the library %s: %w", quote.Text(path), err)
	}
	if want := libraryMachines[runtime.GOARCH]; library.Class != elf.ELFCLASS64 || library.Type != elf.ET_DYN || library.Machine != want {
		return fmt.Errorf("%s is %s, %s, %s: want a library of this machine, %s, %s, %s",
			quote.Text(path), library.Class, library.Type, library.Machine, elf.ELFCLASS64, elf.ET_DYN, want)
	}
	return nil
}
