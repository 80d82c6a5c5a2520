// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
)

// ErrStop ends Run when an error of Hardware.Open wraps it. Every other error
// of the hardware is retried for ever.
var ErrStop = errors.New("the plugin must be started anew")

// runInventory finds the GPUs, cleans up what an earlier process left, and
// publishes. It ends with ctx.
func (p *Plugin) runInventory(ctx context.Context, helper publisher) {
	defer p.settle()
	inventory := p.discover(ctx)
	if inventory == nil {
		return
	}
	p.Claims.SetInventory(inventory)
	p.ready.setHardware(ctx, "")

	// Leftovers must be gone before the first claim needs their place, and a
	// GPU on which that does not work must not hold the others up.
	if err := p.Claims.Resume(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Something an earlier process left is not cleaned up yet, will try again")
		p.background.Go(func() { p.resume(ctx) })
	}
	p.settle()
	p.publish(ctx, helper, inventory)
}

// discover tries until it has an inventory; nil says that ctx ended. The first
// failure lets calls through: unpreparing must work without a driver.
func (p *Plugin) discover(ctx context.Context) *device.Inventory {
	var inventory *device.Inventory
	// The only errors are those of ctx.
	_ = p.retry.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		found, err := p.tryDiscover(ctx)
		if errors.Is(err, ErrStop) {
			p.fatal(err)
			return true, nil
		}
		if err != nil && ctx.Err() == nil {
			p.waitForDriver(ctx, err)
		}
		inventory = found
		return found != nil, nil
	})
	return inventory
}

// waitForDriver says why there is no inventory, does what can be done without
// one, and lets calls through.
func (p *Plugin) waitForDriver(ctx context.Context, reason error) {
	p.ready.setHardware(ctx, reason.Error())
	if p.resumeBeforeDriver() {
		if err := p.Claims.Resume(ctx); err != nil {
			klog.FromContext(ctx).Info("What an earlier process left cannot all be cleaned up without the driver", "reason", err)
		}
	}
	p.settle()
}

func (p *Plugin) tryDiscover(ctx context.Context) (*device.Inventory, error) {
	if err := p.Hardware.Open(ctx); err != nil {
		return nil, err
	}
	node, err := p.Hardware.Discover(ctx)
	if err != nil {
		return nil, fmt.Errorf("discover the GPUs: %w", err)
	}
	inventory, err := device.NewInventory(node)
	if err != nil {
		return nil, fmt.Errorf("build the inventory: %w", err)
	}
	logger := klog.FromContext(ctx)
	for _, problem := range inventory.Problems() {
		logger.Error(problem, "Not everything can be published")
	}
	logger.Info("Discovered", "gpus", len(node.GPUs), "devices", len(inventory.Devices()),
		"driverVersion", node.DriverVersion)
	return inventory, nil
}

// resumeBeforeDriver is true the first time only.
func (p *Plugin) resumeBeforeDriver() bool {
	select {
	case <-p.settled:
		return false
	default:
		return true
	}
}

// resume tries until nothing is left over.
func (p *Plugin) resume(ctx context.Context) {
	logger := klog.FromContext(ctx)
	last := ""
	_ = p.retry.DelayFunc().Until(ctx, false, true, func(ctx context.Context) (bool, error) {
		err := p.Claims.Resume(ctx)
		if err == nil {
			logger.Info("Everything an earlier process left is cleaned up")
			return true, nil
		}
		if err.Error() != last && ctx.Err() == nil {
			last = err.Error()
			logger.Error(err, "Something an earlier process left is still not cleaned up")
		}
		return false, nil
	})
}
