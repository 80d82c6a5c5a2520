// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"slices"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

// knownGPUs are the GPUs of this node as they were found last, so that those that do not answer now stay published, tainted. It is
// for one goroutine.
type knownGPUs struct {
	file *lastseen.File
	// node has all that were found in this boot of the machine, also by an earlier process. It is nil until there are any.
	node *gpu.Node
	// removed are GPUs of the node that were found in an earlier boot only, or were taken out. They stay as long as claims have
	// devices of them.
	removed []string
	// discovered says that a discovery of this process has succeeded.
	discovered bool
	// missing are the GPUs that the last discovery did not find or could not read, and unlisted those on the PCI bus of which the
	// driver knows nothing.
	missing  []device.Condition
	unlisted []string
	// back are those that a survey has found to work again since the last discovery began, which may have read before what it says of them.
	back []string
	// driverGone is why no GPU can be used, or nil.
	driverGone error

	fileProblem logchange.Problem
}

// recall takes over what an earlier process has discovered. Nothing is known to be there until a discovery has succeeded.
func (k *knownGPUs) recall(ctx context.Context, isRemoved, mayBeInUse func(pciAddress string) bool) {
	seen, removed, err := k.file.Read()
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs that do not answer now are not published")
		return
	}
	k.node, k.removed = seen, removed
	for _, address := range addresses(seen) {
		if !slices.Contains(removed, address) && isRemoved(address) {
			k.removed = append(k.removed, address)
		}
	}
	k.forget(ctx, mayBeInUse)
	if len(k.node.GPUs) == 0 {
		k.node = nil
	}
}

// forget forgets the GPUs that were removed of which claims have no device any more.
func (k *knownGPUs) forget(ctx context.Context, mayBeInUse func(pciAddress string) bool) {
	unneeded := slices.DeleteFunc(slices.Clone(k.removed), mayBeInUse)
	if len(unneeded) == 0 {
		return
	}
	k.removed = slices.DeleteFunc(k.removed, func(address string) bool { return slices.Contains(unneeded, address) })
	k.node = k.node.Without(unneeded...)
	k.missing = slices.DeleteFunc(k.missing, func(c device.Condition) bool { return slices.Contains(unneeded, c.PCIAddress) })
	klog.FromContext(ctx).Info("Forgot GPUs that are not there: no claim has devices of them", "pciAddresses", unneeded)
	if k.discovered {
		k.write(ctx)
	}
}

// take takes the result of a discovery that has succeeded.
func (k *knownGPUs) take(ctx context.Context, found *gpu.Node) {
	all, kept := found.Keeping(k.node)
	k.removed = slices.DeleteFunc(k.removed, func(address string) bool { return !slices.Contains(kept, address) })
	missing := missingGPUs(found, kept)
	k.missing = slices.DeleteFunc(missing, func(c device.Condition) bool { return slices.Contains(k.back, c.PCIAddress) })
	k.node, k.unlisted = all, found.Unlisted
	k.discovered, k.driverGone = true, nil
	k.write(ctx)
}

// compare notes which GPUs have failed at the survey before and do not any more, nor at the last discovery. They are said to have recovered.
func (k *knownGPUs) compare(before, now device.Status) {
	for _, was := range before.Conditions {
		fails := func(c device.Condition) bool { return c.PCIAddress == was.PCIAddress && isFailure(c) }
		if isFailure(was) && !slices.ContainsFunc(slices.Concat(now.Conditions, k.missing), fails) {
			k.back = append(k.back, was.PCIAddress)
		}
	}
}

// fail takes the error of a discovery. One that says that there is no driver makes all GPUs unusable, and so does any other before
// the first success. Later ones change nothing: they concern no GPU in particular, and a survey shows which ones do not answer.
func (k *knownGPUs) fail(err error) {
	if !k.discovered || errors.Is(err, gpu.ErrDriverNotLoaded) || errors.Is(err, gpu.ErrVersionMismatch) {
		k.driverGone = err
	}
}

// write writes down what is known now, for the next process.
func (k *knownGPUs) write(ctx context.Context) {
	k.fileProblem.Log(ctx, k.file.Write(k.node, k.removed), "A GPU that does not answer after a restart of the plugin will not be published then",
		"It is written down again what was discovered")
}

// conditions are those of GPUs that are not there, or all of them.
func (k *knownGPUs) conditions() []device.Condition {
	if k.driverGone == nil || k.node == nil {
		return k.missing
	}
	var all []device.Condition
	for _, address := range addresses(k.node) {
		all = append(all, device.Condition{PCIAddress: address, Reason: device.Unresponsive, Message: k.driverGone.Error()})
	}
	return append(all, k.missing...)
}

// isTrouble reports whether a GPU fails, so that what was discovered may not hold any more.
func (k *knownGPUs) isTrouble(surveyed device.Status) bool {
	return k.driverGone != nil || len(k.missing) > 0 || slices.ContainsFunc(surveyed.Conditions, isFailure)
}

// uuids are those of all GPUs by PCI address.
func (k *knownGPUs) uuids() map[string]string {
	uuids := map[string]string{}
	if k.node != nil {
		for i := range k.node.GPUs {
			uuids[k.node.GPUs[i].PCIAddress] = k.node.GPUs[i].UUID
		}
	}
	return uuids
}

// addresses are those of the GPUs of a node.
func addresses(node *gpu.Node) (all []string) {
	for i := range node.GPUs {
		all = append(all, node.GPUs[i].PCIAddress)
	}
	return all
}

// missingGPUs returns conditions for the GPUs that are broken, and for those among
// kept, which were found earlier, that the driver does not list any more.
func missingGPUs(found *gpu.Node, kept []string) []device.Condition {
	var conditions []device.Condition
	// Some GPUs that are broken are those among kept whose addresses cannot be read.
	var nameless []gpu.Broken
	broken := map[string]bool{}
	for _, b := range found.Broken {
		if b.PCIAddress == "" {
			nameless = append(nameless, b)
			continue
		}
		broken[b.PCIAddress] = true
		if gpu.IsPending(b.Err) && !errors.Is(b.Err, gpu.ErrHung) {
			continue // it is slow, or waits behind another one: nothing is known to be wrong with it
		}
		conditions = append(conditions, conditionOf(b, b.PCIAddress))
	}
	unlisted := slices.DeleteFunc(slices.Clone(kept), func(address string) bool { return broken[address] })
	for i, address := range unlisted {
		if len(nameless) == len(unlisted) {
			// Both are in the order of the addresses.
			conditions = append(conditions, conditionOf(nameless[i], address))
			continue
		}
		conditions = append(conditions, device.Condition{PCIAddress: address, Reason: device.Lost, Message: "the driver does not list it any more"})
	}
	return conditions
}

func conditionOf(b gpu.Broken, pciAddress string) device.Condition {
	c := device.Condition{PCIAddress: pciAddress, Reason: device.Unresponsive, Message: b.Reason}
	switch {
	case errors.Is(b.Err, gpu.ErrLost):
		c.Reason = device.Lost
	case errors.Is(b.Err, gpu.ErrResetRequired):
		c.Reason = device.ResetRequired
	}
	return c
}
