// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/plugin"
)

// errRootsMoved: everything has to be wired anew for other roots.
var errRootsMoved = fmt.Errorf("the driver's files are elsewhere now (%w)", plugin.ErrStop)

// hardware is the NVML session, and notices when a driver that came later
// changed what the roots are, or needs another process.
type hardware struct {
	*nvml.Client
	specs  *cdi.Specs
	config *config
	roots  host.Roots
}

func (h *hardware) Open(ctx context.Context) error {
	err := h.Client.Open(ctx)
	switch {
	case err == nil:
		// Without the driver its files say nothing: they come and go with it.
		if now := h.config.roots(); now != h.roots {
			return fmt.Errorf("%w: device root %s", errRootsMoved, now.Dev)
		}
	case errors.Is(err, nvml.ErrRestartRequired):
		return fmt.Errorf("%w: %w", plugin.ErrStop, err)
	case errors.Is(err, gpu.ErrDriverNotLoaded):
		return h.onHost(err)
	}
	return err
}

// onHost adds where the driver root is for people, who know the host's paths and
// not those of this container.
func (h *hardware) onHost(err error) error {
	if h.roots.HostDriver == h.roots.Driver {
		return err
	}
	return fmt.Errorf("%w (driver root %s is %s on the host)", err, h.roots.Driver, h.roots.HostDriver)
}

// Discover also tells package cdi which libraries belong to the driver.
func (h *hardware) Discover(ctx context.Context) (*gpu.Node, error) {
	node, err := h.Client.Discover(ctx)
	if err == nil {
		h.specs.SetDriverVersion(node.DriverVersion)
	}
	return node, err
}
