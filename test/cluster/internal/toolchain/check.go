// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
)

// Check says, for all steps at once, what the machine lacks to build them, with the Debian package.
func Check(ctx context.Context, todo ...step) error {
	var missing []error
	lacks := func(tool, debian string) {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, fmt.Errorf("%s is not in PATH (%s)", tool, debian))
		}
	}
	lacks("go", "see https://go.dev/dl; under sudo keep PATH: sudo env PATH=\"$PATH\" …")
	for _, s := range todo {
		if !s.cgo {
			continue
		}
		lacks("gcc", "Debian: gcc libc6-dev")
		lacks("pkg-config", "Debian: pkg-config")
		if _, err := exec.LookPath("pkg-config"); err == nil {
			if err := exec.CommandContext(ctx, "pkg-config", "--exists", "libseccomp").Run(); err != nil {
				missing = append(missing, errors.New("the headers of libseccomp are not installed (Debian: libseccomp-dev)"))
			}
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the cluster's programs cannot be built here; test/cluster/setup.sh installs what Debian and Ubuntu have:\n%w",
			errors.Join(missing...))
	}
	return nil
}
