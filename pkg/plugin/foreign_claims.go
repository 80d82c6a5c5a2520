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
	"github.com/partage-dev/partage/pkg/neighbour"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// ForeignClaims finds claims on this node that another driver of this name has prepared.
type ForeignClaims interface {
	// Find returns them. With an error there may be more.
	Find(ctx context.Context) ([]neighbour.Claim, error)
	// Request notes a claim that is to be prepared, and returns its devices that are another
	// driver's. Release notes that it is not used on this node any more, and reports whether it
	// was noted.
	Request(claim *resourceapi.ResourceClaim) []string
	Release(uid types.UID) bool
}

// noForeignClaims finds none.
type noForeignClaims struct{}

func (noForeignClaims) Find(context.Context) ([]neighbour.Claim, error) { return nil, nil }
func (noForeignClaims) Request(*resourceapi.ResourceClaim) []string     { return nil }
func (noForeignClaims) Release(types.UID) bool                          { return false }

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
	// changed asks to hand on what has changed, lookNow to look.
	changed, lookNow loop.Trigger
	// known is closed when it is known for the first time what there is.
	known chan struct{}

	problem logchange.Problem
	panics  panics.Repeated

	mu     sync.Mutex
	claims []neighbour.Claim
	// gpus are those of the node, or nil as long as they are not known.
	gpus []gpu.GPU
}

func newForeignClaims(find ForeignClaims, interval time.Duration, changed loop.Trigger) *foreignClaims {
	if find == nil {
		find = noForeignClaims{}
	}
	return &foreignClaims{find: find, interval: interval, changed: changed, lookNow: loop.NewTrigger(), known: make(chan struct{})}
}

// run looks for them until ctx ends.
func (f *foreignClaims) run(ctx context.Context) {
	f.firstLook(ctx)
	ticker := time.NewTicker(f.interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-f.lookNow:
		}
		_ = f.look(ctx) // it is logged
	}
}

// firstLook looks until the kubelet has answered, though not for ever.
func (f *foreignClaims) firstLook(ctx context.Context) {
	defer close(f.known)
	began := time.Now()
	for {
		err := f.look(ctx)
		if !errors.Is(err, neighbour.ErrKubelet) || time.Since(began) >= firstLookTimeout || !loop.Pause(ctx, firstLookPause) {
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

func (f *foreignClaims) look(ctx context.Context) error {
	claims, err := f.findClaims(ctx)
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

// findClaims returns what was known where looking panics.
func (f *foreignClaims) findClaims(ctx context.Context) (claims []neighbour.Claim, err error) {
	f.mu.Lock()
	claims = f.claims //nolint:wastedassign // Find may panic
	f.mu.Unlock()
	defer f.panics.Recover(ctx, &err)
	claims, err = f.find.Find(ctx)
	return claims, err
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
		for _, address := range mayHave(f.gpus, c.Devices) {
			conditions = append(conditions, device.Condition{
				PCIAddress: address, Reason: device.ForeignClaim, Value: taintValue(c), Message: text,
			})
		}
	}
	return conditions
}

// mayHave returns those GPUs that devices of another driver may be, or be parts of: all if one of the
// names does not tell which.
func mayHave(gpus []gpu.GPU, names []string) []string {
	var addresses []string
	for _, name := range names {
		minor, told := neighbour.Minor(name)
		at := slices.IndexFunc(gpus, func(g gpu.GPU) bool { return told && g.Minor == minor })
		if at < 0 {
			addresses = addresses[:0]
			for i := range gpus {
				addresses = append(addresses, gpus[i].PCIAddress)
			}
			return addresses
		}
		if address := gpus[at].PCIAddress; !slices.Contains(addresses, address) {
			addresses = append(addresses, address)
		}
	}
	return addresses
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
func describeForeign(c neighbour.Claim) string {
	return hasForeign(c) + ", and may be using this GPU"
}

func hasForeign(c neighbour.Claim) string {
	pods := ""
	if len(c.Pods) > 0 {
		pods = " (" + plural("pod", c.Pods) + ")"
	}
	return fmt.Sprintf("claim %s%s has %s of %s", c, pods, plural("device", c.Devices), otherDriver)
}

// taintValue names a claim: "namespace.name", cut where that is too long, or the UID. What the API
// would refuse, in a file that somebody has changed, is left out.
func taintValue(c neighbour.Claim) string {
	value := string(c.UID)
	if c.Name != "" {
		value = c.Namespace + "." + c.Name
	}
	if len(value) > validation.LabelValueMaxLength {
		value = strings.TrimRight(value[:validation.LabelValueMaxLength], "-.")
	}
	if len(validation.IsValidLabelValue(value)) > 0 {
		return ""
	}
	return value
}

// released notes that a claim is not used on this node any more.
func (f *foreignClaims) released(uid types.UID) {
	if f.find.Release(uid) {
		f.lookNow.Fire()
	}
}

// refuse returns why a claim cannot be prepared because of another driver. A claim that is
// prepared keeps what it has.
func (f *foreignClaims) refuse(ctx context.Context, c *resourceapi.ResourceClaim, own []resourceapi.DeviceRequestAllocationResult, prepared func(types.UID) bool) error {
	if foreign := f.find.Request(c); len(foreign) > 0 {
		f.lookNow.Fire()
		return refuseForeign("the claim has %s of %s, which this driver does not publish; "+
			"the scheduler does not change a claim that has a device, so %s", plural("device", foreign), otherDriver, anotherDevice)
	}
	uses := slices.DeleteFunc(slices.Clone(own), func(r resourceapi.DeviceRequestAllocationResult) bool { return ptr.Deref(r.AdminAccess, false) })
	if len(uses) == 0 || prepared(c.UID) {
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
		for _, address := range mayHave(f.gpus, other.Devices) {
			at := slices.IndexFunc(uses, func(r resourceapi.DeviceRequestAllocationResult) bool { return device.IsOf(address, r.Device) })
			if at >= 0 {
				return refuseForeign("device %s: %s. The pod can start when the pods of that claim have ended", uses[at].Device, describeForeign(other))
			}
		}
	}
	return nil
}
