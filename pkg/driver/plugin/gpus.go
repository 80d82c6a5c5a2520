// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
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
	// back are GPUs that a survey found to work again after the last discovery had begun: what it found about them may be older.
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
	k.missing = slices.DeleteFunc(missingGPUs(found, kept), func(c device.Condition) bool { return slices.Contains(k.back, c.PCIAddress) })
	k.node, k.unlisted = all, found.Unlisted
	k.discovered, k.driverGone = true, nil
	k.write(ctx)
}

// compare notes which GPUs had failed in the survey before, and work in this one and in the last discovery. They count as recovered.
func (k *knownGPUs) compare(before, now device.Status) {
	for _, was := range before.Conditions {
		fails := func(c device.Condition) bool { return c.PCIAddress == was.PCIAddress && c.Reason.IsFailure() }
		if was.Reason.IsFailure() && !slices.ContainsFunc(slices.Concat(now.Conditions, k.missing), fails) {
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
	if k.driverGone == nil {
		return k.missing
	}
	var all []device.Condition
	for _, address := range addresses(k.node) {
		all = append(all, device.Condition{PCIAddress: address, Reason: device.Unresponsive, Message: k.driverGone.Error()})
	}
	return append(all, k.missing...)
}

// isTrouble reports whether a GPU fails, or has failed since the last discovery began, so that what was discovered may not hold any more.
func (k *knownGPUs) isTrouble(surveyed device.Status) bool {
	return k.driverGone != nil || len(k.missing) > 0 || len(k.back) > 0 || slices.ContainsFunc(surveyed.Conditions, func(c device.Condition) bool { return c.Reason.IsFailure() })
}

// uuids are those of all GPUs by PCI address.
func (k *knownGPUs) uuids() map[string]string {
	uuids := map[string]string{}
	for i := range k.node.GPUs {
		uuids[k.node.GPUs[i].PCIAddress] = k.node.GPUs[i].UUID
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

// ErrStop ends Run when an error of Hardware.Open wraps it. Every other error of
// the hardware is retried for ever.
var ErrStop = errors.New("the plugin must be restarted")

// Hardware finds the GPUs of this machine. Its methods return in bounded time,
// with an error that wraps gpu.ErrHung where the hardware does not.
type Hardware interface {
	// Open returns an error that wraps gpu.ErrDriverNotLoaded while there is no
	// driver. It is called again after it succeeded.
	Open(ctx context.Context) error
	Discover(ctx context.Context) (*gpu.Node, error)
	// Removed reports whether a GPU was taken out, or given to another driver.
	Removed(pciAddress string) bool
}

// rediscoverAfter is the number of intervals after which the GPUs are discovered again although nothing seems to be wrong: a MIG mode
// that an administrator changed, or a GPU that was added, shows nowhere else.
const rediscoverAfter = 6

// discoverer reads everything about all GPUs, which takes as long as the hardware does.
type discoverer struct {
	hardware Hardware
	interval time.Duration
	// opened is called when the GPUs can be used.
	opened func()
	// found has room for the one that may be in progress, which is over when it was received.
	found      chan discovery
	running    sync.WaitGroup
	inProgress bool
	// last is when the last began, and inTrouble says that a GPU failed then.
	last      time.Time
	inTrouble bool

	problem logchange.Problem
	panics  panics.Repeated
}

// discovery is the result.
type discovery struct {
	node *gpu.Node
	err  error
}

// isDue is asked at each poll, of which there may be some between those of the interval. What was discovered may not hold while a GPU
// fails, nor when that is over.
func (d *discoverer) isDue(isTrouble bool) bool {
	after := rediscoverAfter * d.interval
	if isTrouble || d.inTrouble {
		after = d.interval
	}
	if d.inProgress || time.Since(d.last) < after-d.interval/2 {
		return false
	}
	d.last, d.inTrouble = time.Now(), isTrouble
	return true
}

// begin discovers in a goroutine of its own, since a GPU that does not answer delays it.
func (d *discoverer) begin(ctx context.Context) {
	d.inProgress = true
	d.running.Go(func() { d.found <- d.discover(ctx) })
}

// discover ends soon after ctx does.
func (d *discoverer) discover(ctx context.Context) (found discovery) {
	defer d.panics.Recover(ctx, &found.err)
	if err := d.hardware.Open(ctx); err != nil {
		return discovery{err: err}
	}
	d.opened()
	node, err := d.hardware.Discover(ctx)
	if err != nil {
		return discovery{err: fmt.Errorf("discover the GPUs: %w", err)}
	}
	return discovery{node: node}
}

// reasonUnlisted is the reason of an event of the node.
const reasonUnlisted = "GPUNotListed"

// gpuReport logs which GPUs there are and what is offered of them, where that changes. It is for one goroutine.
type gpuReport struct {
	problems logchange.Set[string, error]
	summary  logchange.Value[string]
	policies logchange.Set[gpuPolicy, gpu.GPU]
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
func gpuStatements(o *observedState) (all []events.Statement) {
	for _, address := range o.gpus.unlisted {
		if !o.gpus.node.Has(address) {
			all = append(all, events.Statement{Key: unlistedKey(address), Event: events.Event{Reason: reasonUnlisted, Subjects: []string{address}, Text: unlistedText}})
		}
	}
	return all
}

// log logs what cannot be published, too. There may be no policy.
func (r *gpuReport) log(ctx context.Context, inventory *device.Inventory, current *policy.Policy, known *knownGPUs) {
	logger := klog.FromContext(ctx)
	gpus, devices, version := len(known.node.GPUs), len(inventory.Devices()), known.node.DriverVersion
	if known.discovered && r.summary.Set(fmt.Sprint(gpus, devices, version)) {
		logger.Info("Discovered", "gpus", gpus, "devices", devices, "driverVersion", version)
	}
	problems := r.problems.Update(inventory.Problems(), error.Error)
	for _, problem := range problems {
		logger.Error(problem, "Not everything can be published")
	}
	if current == nil {
		return
	}
	appeared := r.policies.Update(known.node.GPUs, func(g gpu.GPU) gpuPolicy { return gpuPolicy{current, g.UUID} })
	for i := range appeared {
		logger.Info("Sharing policy", "pciAddress", appeared[i].PCIAddress, "productName", appeared[i].ProductName, "offers", current.For(&appeared[i]).String())
	}
}
