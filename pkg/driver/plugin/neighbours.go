// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// ForeignClaims finds claims of pods on this node that another driver of this name has prepared. With an error there may be
// more.
type ForeignClaims func(ctx context.Context) ([]unclaimed.Claim, error)

const (
	// firstScanTimeout is how long the GPUs stay unpublished while the kubelet, which knows the claims of
	// the other driver, does not answer.
	firstScanTimeout = 15 * time.Second
	firstScanPause   = 500 * time.Millisecond
)

// neighbours are what else gives out GPUs of the node: claims of another driver with this driver's name, and other software, with the latest
// finding of each kind. It is never modified.
type neighbours struct {
	claims   []unclaimed.Claim
	software map[unclaimed.Kind]unclaimed.Finding
}

// neighbourMonitor scans for neighbours again and again. Devices of claims of another driver have names that this driver does not publish, so
// the scheduler takes their GPUs for free. That is why these claims become conditions of the GPUs.
type neighbourMonitor struct {
	findClaims   ForeignClaims
	findSoftware func(ctx context.Context) []unclaimed.Finding
	interval     time.Duration
	// changed is fired when a scan finds something else than the one before.
	changed loop.Trigger
	// firstScanDone is closed after the first scan, and latest is what the latest one has found.
	firstScanDone chan struct{}
	latest        atomic.Pointer[neighbours]

	problem logchange.Problem
	panics  panics.Repeated
}

func newNeighbourMonitor(find ForeignClaims, software func(context.Context) []unclaimed.Finding, interval time.Duration, changed loop.Trigger) *neighbourMonitor {
	m := &neighbourMonitor{findClaims: find, findSoftware: software, interval: interval, changed: changed, firstScanDone: make(chan struct{})}
	m.latest.Store(&neighbours{software: map[unclaimed.Kind]unclaimed.Finding{}})
	return m
}

// run scans until ctx ends.
func (m *neighbourMonitor) run(ctx context.Context) {
	m.firstScan(ctx)
	for again := time.Tick(m.interval); ctx.Err() == nil; {
		select {
		case <-ctx.Done():
		case <-again:
			before := m.latest.Load()
			_ = m.scan(ctx) // it is logged
			if m.latest.Load() != before {
				m.changed.Fire()
			}
		}
	}
}

// firstScan scans until the kubelet has answered, for firstScanTimeout at most.
func (m *neighbourMonitor) firstScan(ctx context.Context) {
	defer close(m.firstScanDone)
	_ = wait.PollUntilContextTimeout(ctx, firstScanPause, firstScanTimeout, true, func(context.Context) (bool, error) {
		return !errors.Is(m.scan(ctx), unclaimed.ErrKubelet), nil
	})
}

// awaitFirstScan returns after the first scan, or when ctx ends.
func (m *neighbourMonitor) awaitFirstScan(ctx context.Context) {
	select {
	case <-m.firstScanDone:
	case <-ctx.Done():
	}
}

// scan finds out which neighbours there are now. If it panics, those found before stay.
func (m *neighbourMonitor) scan(ctx context.Context) (err error) {
	defer m.panics.Recover(ctx, &err)
	before := m.latest.Load()
	found := &neighbours{software: maps.Clone(before.software)}
	for _, one := range m.findSoftware(ctx) {
		found.software[one.Kind] = one
	}
	found.claims, err = m.findClaims(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	m.problem.Log(ctx, err, "It is not known for certain which claims on this node another driver has prepared",
		"It is known again which claims on this node another driver has prepared")
	if !reflect.DeepEqual(before, found) {
		m.latest.Store(found)
	}
	return err
}

// foreignConditions are those of the GPUs that the claims may have, one for each GPU and claim.
func foreignConditions(claims []unclaimed.Claim, gpus []gpu.GPU) (conditions []device.Condition) {
	for _, c := range claims {
		text := hasForeign(c) + ", and may be using this GPU"
		for _, address := range c.GPUs(gpus) {
			conditions = append(conditions, device.Condition{
				PCIAddress: address, Reason: device.ForeignClaim, Value: taintValue(c), Message: text,
			})
		}
	}
	return conditions
}

// foreignError is why a claim cannot be prepared because of another driver.
type foreignError string

func (e foreignError) Error() string { return string(e) }

func refuseForeign(format string, args ...any) error {
	return &claim.RefusedError{Err: foreignError(fmt.Sprintf(format, args...))}
}

// otherDriver is who allocated such claims.
const otherDriver = "another driver with this driver's name, such as NVIDIA's DRA driver"

func hasForeign(c unclaimed.Claim) string {
	return fmt.Sprintf("claim %s (%s) has %s of %s", c, quote.Plural("pod", c.Pods), quote.Plural("device", c.Devices), otherDriver)
}

// taintValue names a claim: "namespace.name", cut where that is too long.
func taintValue(c unclaimed.Claim) string {
	value := c.Namespace + "." + c.Name
	return strings.TrimRight(value[:min(len(value), validation.LabelValueMaxLength)], "-.")
}

// refuse returns why a claim that has these devices of this driver's name and pool cannot be prepared because of another
// driver. A claim that is prepared keeps what it has.
func (m *neighbourMonitor) refuse(ctx context.Context, uid types.UID, own []resourceapi.DeviceRequestAllocationResult, gpus func() []gpu.GPU, prepared func(types.UID) bool) error {
	uses, err := ownDevices(own)
	if err != nil || len(uses) == 0 {
		return err
	}
	select {
	case <-m.firstScanDone:
		if len(m.latest.Load().claims) == 0 {
			return nil
		}
	default: // a call may be let through while the plugin still starts
	}
	if prepared(uid) {
		return nil
	}
	if m.awaitFirstScan(ctx); ctx.Err() != nil {
		return fmt.Errorf("find out which GPUs claims of another driver have: %w", ctx.Err())
	}
	claims, all := m.latest.Load().claims, gpus()
	if len(claims) > 0 && all == nil {
		return foreignError(hasForeign(claims[0]) + "; the GPUs of this node are not known yet, so it may be any of them")
	}
	for _, c := range foreignConditions(claims, all) {
		if at := slices.IndexFunc(uses, func(name string) bool { return device.IsOf(c.PCIAddress, name) }); at >= 0 {
			return refuseForeign("device %s: %s. The pod can start when the pods of that claim have ended", uses[at], c.Message)
		}
	}
	return nil
}

// ownDevices are those of this driver that are used. One of another driver is an error.
func ownDevices(all []resourceapi.DeviceRequestAllocationResult) (uses []string, err error) {
	var foreign []string
	for _, r := range all {
		switch {
		case ptr.Deref(r.AdminAccess, false):
		case device.IsName(r.Device):
			uses = append(uses, r.Device)
		case !slices.Contains(foreign, r.Device):
			foreign = append(foreign, r.Device)
		}
	}
	if len(foreign) > 0 {
		return nil, refuseForeign("the claim has %s of %s, which this driver does not publish; "+
			"the scheduler does not change a claim that has a device, so %s", quote.Plural("device", foreign), otherDriver, anotherDevice)
	}
	return uses, nil
}

// Reasons of events about the node.
const (
	// A device plugin offers the GPUs of the node, too.
	reasonDevicePlugin = "DevicePluginOnNode"
	// NVIDIA's DRA driver, which has the same name, runs on the node, too.
	reasonOtherDriver = "OtherDRADriverOnNode"
	// A MIG manager is asked to partition the GPUs of the node.
	reasonMIGManager = "MIGManagerOnNode"
	// One of these is gone.
	reasonNeighbourGone = "NeighbourGone"
	// NVIDIA's container runtime gives containers GPUs without a claim, or does not any more.
	reasonExposed    = "GPUsWithoutClaims"
	reasonNotExposed = "GPUsOnlyWithClaims"
)

var neighbourReasons = map[unclaimed.Kind]string{
	unclaimed.DevicePlugin:     reasonDevicePlugin,
	unclaimed.DRADriver:        reasonOtherDriver,
	unclaimed.MIGManager:       reasonMIGManager,
	unclaimed.ContainerRuntime: reasonExposed,
}

// RuntimeCheck finds out what containers can have without a claim, given the handlers of the node's container runtime.
type RuntimeCheck func(handlers []string) (unclaimed.Access, error)

// softwareFinder finds out which other software on the node gives out or partitions its GPUs.
type softwareFinder struct {
	// node returns nil until the Node object was read.
	node func() *corev1.Node
	// otherDriver finds a DRA driver of the same name. It is nil where the two cannot be told apart. runtime checks NVIDIA's container runtime.
	otherDriver func(ctx context.Context) unclaimed.Finding
	runtime     RuntimeCheck
	observe     func(kind string, there *bool)

	unknown logchange.Problem
}

// find leaves out software about which nothing could be found out.
func (n *softwareFinder) find(ctx context.Context) (found []unclaimed.Finding) {
	if n.otherDriver != nil {
		found = append(found, n.otherDriver(ctx))
	}
	if node := n.node(); node != nil {
		found = append(found, unclaimed.OnNode(node)...)
		access, err := n.runtime(unclaimed.Handlers(node))
		n.unknown.Log(ctx, err, "It is not known whether containers without a claim can have GPUs", "")
		if err == nil {
			found = append(found, unclaimed.Finding{Kind: unclaimed.ContainerRuntime, There: access.Open(), Text: access.Text()})
		} else {
			n.observe(string(unclaimed.ContainerRuntime), nil)
		}
	}
	for i := range found {
		n.observe(string(found[i].Kind), &found[i].There)
	}
	return found
}
