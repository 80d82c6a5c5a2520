// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin"
	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
)

// keepHidden adds what a plugin on this machine has found out that cannot be seen now.
func (c *config) keepHidden(ctx context.Context, node *gpu.Node) *gpu.Node {
	seen, _, err := lastseen.New(c.dataDir(), "").Read()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Shares may be printed smaller than they are published")
		return node
	}
	return node.KeepingHidden(seen)
}

// printSlices writes the ResourceSlices that this machine would publish with a kubelet that
// knows extended resources, as a stream of YAML documents. It asks no cluster.
func printSlices(ctx context.Context, c *config, out io.Writer) error {
	if c.nodeName == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("find a name for the node, give --node-name instead: %w", err)
		}
		c.nodeName = strings.ToLower(host)
	}
	if err := c.validateSlices(); err != nil {
		return err
	}
	// Before the hardware, so that a policy can be tried on a machine without GPUs.
	rules, err := plugin.NewPolicyFile(c.policyFile, 0).Read(ctx)
	if err != nil {
		return err
	}
	// The log with broken GPUs and the policy of each GPU goes to stderr.
	if err := c.process.SetUpLogging(); err != nil {
		return err
	}
	hardware := nvml.New(nvml.Options{Roots: c.roots()})
	defer hardware.Close() //nolint:contextcheck // ctx may have ended by then
	if err := hardware.Open(ctx); err != nil {
		return err
	}
	node, err := hardware.Discover(ctx)
	if err != nil {
		return fmt.Errorf("discover the GPUs: %w", err)
	}
	node = c.keepHidden(ctx, node)
	for _, broken := range node.Broken {
		klog.FromContext(ctx).Error(broken.Err, "GPU does not answer and is left out", "index", broken.Index, "pciAddress", broken.PCIAddress)
	}
	for i := range node.GPUs {
		g := &node.GPUs[i]
		klog.FromContext(ctx).V(1).Info("Sharing policy", "pciAddress", g.PCIAddress, "productName", g.ProductName, "offers", rules.For(g).String())
	}
	for _, unknown := range rules.UnknownProfiles(node.GPUs) {
		klog.FromContext(ctx).Info(unknown.String())
	}
	inventory, err := device.NewInventory(node, device.Terms{Policy: rules, Limited: c.interposer != "", ExtendedResources: true})
	if err != nil {
		return fmt.Errorf("build the inventory: %w", err)
	}
	for _, problem := range inventory.Problems() {
		klog.FromContext(ctx).Error(problem, "Not everything can be published")
	}
	return writeSlices(out, inventory, device.Options{
		Driver:               driverName,
		Pool:                 c.nodeName,
		NodeName:             c.nodeName,
		PartitionableDevices: c.partitionable,
		ConsumableCapacity:   c.consumable,
	})
}

func writeSlices(out io.Writer, inventory *device.Inventory, o device.Options) error {
	for _, slice := range inventory.ResourceSlices(o) {
		text, err := yaml.Marshal(slice)
		if err != nil {
			return fmt.Errorf("print ResourceSlice %s: %w", slice.Name, err)
		}
		if _, err := fmt.Fprintf(out, "---\n%s", text); err != nil {
			return fmt.Errorf("print ResourceSlice %s: %w", slice.Name, err)
		}
	}
	return nil
}
