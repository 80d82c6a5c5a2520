// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/policy"
)

// Reasons of events of the node.
const (
	reasonUnlisted        = "GPUNotListed"
	reasonUnknownProfiles = "SharingPolicyProfilesUnknown"
)

// gpuReport says which GPUs there are and what is offered of them, in the log where that changes, and what an administrator may
// not expect in events. It is for one goroutine.
type gpuReport struct {
	board    *events.Board
	problems logchange.Set[string, error]
	summary  logchange.Value[string]
	policies logchange.Set[gpuPolicy, *gpu.GPU]
}

// gpuPolicy is a GPU under a policy.
type gpuPolicy struct {
	policy *policy.Policy
	uuid   string
}

// discovered says what a discovery has found.
func (r *gpuReport) discovered(ctx context.Context, found *gpu.Node, inventory *device.Inventory) {
	gpus, devices := len(found.GPUs), len(inventory.Devices())
	if r.summary.Set(fmt.Sprint(gpus, devices, found.DriverVersion)) {
		klog.FromContext(ctx).Info("Discovered", "gpus", gpus, "devices", devices, "driverVersion", found.DriverVersion)
	}
}

const unlistedText = "it is on the PCI bus, and the NVIDIA driver does not list it, so that it is not offered. " +
	"See what the kernel log (NVRM) says about it, and whether its kernel driver is nvidia (lspci -k). " +
	"If the GPU is not to be used here, bind it to vfio-pci or take it out."

// unlisted says which GPUs the driver does not list: of those that it has never listed nothing else would tell. A GPU that
// was listed before has a condition.
func (r *gpuReport) unlisted(ctx context.Context, pciAddresses []string, known *gpu.Node) {
	var never []events.Statement
	for _, address := range pciAddresses {
		if !known.Has(address) {
			never = append(never, events.Statement{Key: address, Event: events.Event{Reason: reasonUnlisted, Subjects: []string{address}, Text: unlistedText}})
		}
	}
	r.board.Say(ctx, "unlisted GPUs", never, func(was events.Statement) (events.Event, bool) {
		return events.Event{
			Type: corev1.EventTypeNormal, Reason: recoveryReason(device.Lost), Subjects: was.Subjects,
			Text: "the NVIDIA driver lists it now, or it is not on the PCI bus any more.",
		}, !slices.Contains(pciAddresses, was.Subjects[0])
	})
}

// offered says what cannot be published, what the policy offers of each GPU, and which of its profiles match nothing on this
// node: a typing error shows nowhere else. There may be no policy.
func (r *gpuReport) offered(ctx context.Context, inventory *device.Inventory, current *policy.Policy, known *gpu.Node) {
	logger := klog.FromContext(ctx)
	problems, _ := r.problems.Update(inventory.Problems(), error.Error)
	for _, problem := range problems {
		logger.Error(problem, "Not everything can be published")
	}
	if current == nil {
		return
	}
	var unknown []events.Statement
	for _, profile := range current.UnknownProfiles(known.GPUs) {
		unknown = append(unknown, events.Statement{Event: events.Event{Reason: reasonUnknownProfiles, Text: profile.String()}})
	}
	r.board.Say(ctx, "unknown profiles", unknown, nil)
	gpus := make([]*gpu.GPU, len(known.GPUs))
	for i := range known.GPUs {
		gpus[i] = &known.GPUs[i]
	}
	appeared, _ := r.policies.Update(gpus, func(g *gpu.GPU) gpuPolicy { return gpuPolicy{current, g.UUID} })
	for _, g := range appeared {
		logger.Info("Sharing policy", "pciAddress", g.PCIAddress, "productName", g.ProductName, "offers", current.For(g).String())
	}
}
