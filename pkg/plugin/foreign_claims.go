// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/quote"
	"github.com/partage-dev/partage/pkg/unclaimed"
)

// ForeignClaims finds claims of pods on this node that another driver of this name has prepared. With an error there may be
// more.
type ForeignClaims func(ctx context.Context) ([]unclaimed.Claim, error)

const (
	// firstLookTimeout is for how long the kubelet may keep the GPUs from being published: it
	// knows which of them are in use.
	firstLookTimeout = 15 * time.Second
	firstLookPause   = 500 * time.Millisecond
)

// foreignClaims follows the claims of another driver with this driver's name. Their devices have
// names that this driver does not publish, so that the scheduler takes their GPUs for free; here
// they become conditions.
type foreignClaims struct {
	find     ForeignClaims
	interval time.Duration
	// changed asks to hand on what has changed.
	changed loop.Trigger
	// known is closed when it is known for the first time what there is.
	known chan struct{}

	problem logchange.Problem
	panics  panics.Repeated

	mu     sync.Mutex
	claims []unclaimed.Claim
	// gpus are those of the node, or nil as long as they are not known.
	gpus []gpu.GPU
}

func newForeignClaims(find ForeignClaims, interval time.Duration, changed loop.Trigger) *foreignClaims {
	if find == nil {
		find = func(context.Context) ([]unclaimed.Claim, error) { return nil, nil }
	}
	return &foreignClaims{find: find, interval: interval, changed: changed, known: make(chan struct{})}
}

// run looks for them until ctx ends.
func (f *foreignClaims) run(ctx context.Context) {
	f.firstLook(ctx)
	for loop.Pause(ctx, f.interval) {
		_ = f.look(ctx) // it is logged
	}
}

// firstLook looks until the kubelet has answered, though not for ever.
func (f *foreignClaims) firstLook(ctx context.Context) {
	defer close(f.known)
	began := time.Now()
	for {
		err := f.look(ctx)
		if !errors.Is(err, unclaimed.ErrKubelet) || time.Since(began) >= firstLookTimeout || !loop.Pause(ctx, firstLookPause) {
			return
		}
	}
}

// await returns when it is known what there is, or ctx ends.
func (f *foreignClaims) await(ctx context.Context) {
	select {
	case <-f.known:
	case <-ctx.Done():
	}
}

// hasNone reports whether the first look is over, and none are known.
func (f *foreignClaims) hasNone() bool {
	select {
	case <-f.known:
	default:
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.claims) == 0
}

// look leaves what was known where looking panics.
func (f *foreignClaims) look(ctx context.Context) (err error) {
	defer f.panics.Recover(ctx, &err)
	claims, err := f.find(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.problem.Log(ctx, err, "It is not known for certain which claims on this node another driver has prepared",
		"It is known again which claims on this node another driver has prepared")
	f.mu.Lock()
	defer f.mu.Unlock()
	if !reflect.DeepEqual(f.claims, claims) {
		f.claims = claims
		f.changed.Fire()
	}
	return err
}

// conditions are those of the GPUs of a node that the claims may have, one for each GPU and claim.
func (f *foreignClaims) conditions(node *gpu.Node) []device.Condition {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gpus = nil
	if node == nil {
		return nil
	}
	f.gpus = slices.Clone(node.GPUs)
	var conditions []device.Condition
	for _, c := range f.claims {
		text := describeForeign(c)
		for _, address := range c.GPUs(f.gpus) {
			conditions = append(conditions, device.Condition{
				PCIAddress: address, Reason: device.ForeignClaim, Value: taintValue(c), Message: text,
			})
		}
	}
	return conditions
}

// errForeignClaim is why claims are refused.
var errForeignClaim = errors.New("another DRA driver of this name is or was on this node")

// foreignError is an error about a claim that has the text alone.
type foreignError struct{ text string }

func (e foreignError) Error() string { return e.text }
func (foreignError) Unwrap() error   { return errForeignClaim }

func refuseForeign(format string, args ...any) error {
	return &claim.RefusedError{Err: foreignError{fmt.Sprintf(format, args...)}}
}

// otherDriver is who allocated such claims.
const otherDriver = "another driver with this driver's name, such as NVIDIA's DRA driver"

// describeForeign is the message of the condition.
func describeForeign(c unclaimed.Claim) string { return hasForeign(c) + ", and may be using this GPU" }

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
func (f *foreignClaims) refuse(ctx context.Context, uid types.UID, own []resourceapi.DeviceRequestAllocationResult, prepared func(types.UID) bool) error {
	uses := slices.DeleteFunc(slices.Clone(own), func(r resourceapi.DeviceRequestAllocationResult) bool { return ptr.Deref(r.AdminAccess, false) })
	var foreign []string
	for _, r := range uses {
		if !device.IsName(r.Device) && !slices.Contains(foreign, r.Device) {
			foreign = append(foreign, r.Device)
		}
	}
	if len(foreign) > 0 {
		return refuseForeign("the claim has %s of %s, which this driver does not publish; "+
			"the scheduler does not change a claim that has a device, so %s", quote.Plural("device", foreign), otherDriver, anotherDevice)
	}
	if len(uses) == 0 || f.hasNone() || prepared(uid) {
		return nil
	}
	// A call may be let through while the plugin still starts.
	f.await(ctx)
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("find out which GPUs claims of another driver have: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, other := range f.claims {
		if f.gpus == nil {
			return foreignError{hasForeign(other) + "; the GPUs of this node are not known yet, so it may be any of them"}
		}
		for _, address := range other.GPUs(f.gpus) {
			at := slices.IndexFunc(uses, func(r resourceapi.DeviceRequestAllocationResult) bool { return device.IsOf(address, r.Device) })
			if at >= 0 {
				return refuseForeign("device %s: %s. The pod can start when the pods of that claim have ended", uses[at].Device, describeForeign(other))
			}
		}
	}
	return nil
}
