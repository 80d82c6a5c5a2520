// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

// Reasons of events of the node.
const (
	reasonUnlisted        = "GPUNotListed"
	reasonUnknownProfiles = "SharingPolicyProfilesUnknown"
)

// gpuReport logs which GPUs there are and what is offered of them, where that changes. It is for one goroutine.
type gpuReport struct {
	problems logchange.Set[string, error]
	summary  logchange.Value[summary]
	policies logchange.Set[gpuPolicy, *gpu.GPU]
}

// summary is of all GPUs.
type summary struct {
	gpus, devices int
	driverVersion string
}

// gpuPolicy is a GPU under a policy.
type gpuPolicy struct {
	policy *policy.Policy
	uuid   string
}

const unlistedText = "it is on the PCI bus, and the NVIDIA driver does not list it, so that it is not offered. " +
	"See what the kernel log (NVRM) says about it, and whether its kernel driver is nvidia (lspci -k). " +
	"If the GPU is not to be used here, bind it to vfio-pci or take it out."

type unlistedKey string

// gpuStatements say which GPUs the driver does not list, of those that it has never listed: one that was listed before has a condition.
// And they say which profiles of the policy match nothing on this node: a typing error shows nowhere else.
func gpuStatements(k *known) (all []events.Statement) {
	for _, address := range k.gpus.unlisted {
		if !k.gpus.node.Has(address) {
			all = append(all, events.Statement{Key: unlistedKey(address), Event: events.Event{Reason: reasonUnlisted, Subjects: []string{address}, Text: unlistedText}})
		}
	}
	for _, profile := range k.policy.UnknownProfiles(k.gpus.node.GPUs) {
		all = append(all, events.Statement{Event: events.Event{Reason: reasonUnknownProfiles, Text: profile.String()}})
	}
	return all
}

// log logs what cannot be published, too. There may be no policy.
func (r *gpuReport) log(ctx context.Context, inventory *device.Inventory, current *policy.Policy, known *knownGPUs) {
	logger := klog.FromContext(ctx)
	if now := (summary{len(known.node.GPUs), len(inventory.Devices()), known.node.DriverVersion}); known.discovered && r.summary.Set(now) {
		logger.Info("Discovered", "gpus", now.gpus, "devices", now.devices, "driverVersion", now.driverVersion)
	}
	problems, _ := r.problems.Update(inventory.Problems(), error.Error)
	for _, problem := range problems {
		logger.Error(problem, "Not everything can be published")
	}
	if current == nil {
		return
	}
	gpus := make([]*gpu.GPU, len(known.node.GPUs))
	for i := range known.node.GPUs {
		gpus[i] = &known.node.GPUs[i]
	}
	appeared, _ := r.policies.Update(gpus, func(g *gpu.GPU) gpuPolicy { return gpuPolicy{current, g.UUID} })
	for _, g := range appeared {
		logger.Info("Sharing policy", "pciAddress", g.PCIAddress, "productName", g.ProductName, "offers", current.For(g).String())
	}
}
