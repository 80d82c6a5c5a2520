// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"fmt"
	"io"
	"slices"
	"strings"
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
				return fmt.Errorf("this container has the variable %s, which takes precedence over the limits of its share: remove it", quote(variable))
			}
		}
	}
	if err := c.checkPreload(); err != nil {
		return fmt.Errorf("the library that limits this container would not be loaded, so it would run without its limits: %w", err)
	}
	return nil
}

func (c *container) checkPreload() error {
	if _, found := c.mountAt(InterposerLibrary); !found {
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
		return fmt.Errorf("%s, which is mounted at %s, does not name %s", quote(m.Source), PreloadFile, InterposerLibrary)
	}
	return nil
}
