// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/partage-dev/partage/pkg/driver/cdi/program"
)

// hookPrograms are the copies of the programs that CDI specs name as hooks.
type hookPrograms struct {
	*program.Folder
	// nvidia is NVIDIA's, for every container; limits is that of limited shares.
	nvidia, limits string
}

// installHooks copies the hook programs to a path that exists on the host too. The
// copies are kept as long as this process lives.
func (c *config) installHooks() (*hookPrograms, error) {
	dataDir := c.dataDir()
	if err := os.MkdirAll(dataDir, 0o750); err != nil {
		return nil, fmt.Errorf("make the plugin's data directory: %w", err)
	}
	folder, err := program.Open(filepath.Join(dataDir, "hooks"))
	if err != nil {
		return nil, err
	}
	nvidia, errNVIDIA := folder.Install(c.cdiHook)
	limits, errLimits := folder.Install(c.hook)
	if err := errors.Join(errNVIDIA, errLimits); err != nil {
		return nil, err
	}
	return &hookPrograms{Folder: folder, nvidia: nvidia, limits: limits}, nil
}
