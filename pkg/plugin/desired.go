// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/policy"
)

// withdrawalGrace is for how long a device stays published that the policy does
// not offer any more and no claim is known to have. The scheduler may have
// allocated it just before, and the kubelet asks for it a moment later.
const withdrawalGrace = 10 * time.Minute

// Reasons of events.
const (
	reasonPolicyInvalid = "SharingPolicyInvalid"
	reasonPolicyValid   = "SharingPolicyValid"
)

// storedSlices reads what the API server holds for this node.
type storedSlices interface {
	Stored(ctx context.Context) ([]resourceapi.ResourceSlice, error)
}

// desired decides which devices are to be published: those that the policy offers,
// and those that must stay although it does not offer them any more, because
// claims may have them. It is for one goroutine.
type desired struct {
	policies  PolicySource
	limited   bool
	kubelet   *kubelet
	stored    storedSlices
	claims    ClaimSurveyor
	requested *requestedDevices
	readiness *readiness
	board     *events.Board
	grace     time.Duration
	now       func() time.Time

	// policy is the last valid one. As long as there is none it is not known what
	// the admin wants: nothing new is published, and what is published stays.
	policy *policy.Policy
	// storedKnown says that the devices which were published before this plugin
	// started are among needed.
	storedKnown bool
	// needed is when each device was last offered, or known to be a claim's.
	needed map[string]time.Time
	// inUse are the devices that claims are known to have, and inUseErr says that
	// there may be more.
	inUse    []string
	inUseErr error
	// built is the last inventory, and of what it was made. complete says that it was known then what is to be published.
	built    *device.Inventory
	builtOf  *gpu.Node
	builtFor device.Terms
	complete bool

	policyProblem, inUseProblem logchange.Problem
	panics                      panics.Repeated
}

// known reports whether it is known what is to be published. Until then what the
// plugin before this one published stays as it is.
func (d *desired) known() bool { return d.policy != nil && d.storedKnown && d.kubelet.known() }

// noPolicy offers nothing.
var noPolicy = &policy.Policy{Health: policy.Builtin().Health}

func (d *desired) terms() device.Terms {
	terms := device.Terms{
		Policy: cmp.Or(d.policy, noPolicy), Limited: d.limited, ExtendedResources: d.kubelet.knowsExtendedResources(),
		Keep: make(map[string]bool, len(d.needed)),
	}
	for name := range d.needed {
		terms.Keep[name] = true
	}
	return terms
}

// build makes the inventory of these GPUs.
func (d *desired) build(ctx context.Context, node *gpu.Node) (inventory *device.Inventory, err error) {
	defer d.panics.Recover(ctx, &err)
	complete := d.known() // first: the node may be read meanwhile
	terms := d.terms()
	//nolint:govet // deepequalerrors: errors that seem to differ cost a new inventory, no more
	if d.built != nil && reflect.DeepEqual(node, d.builtOf) && reflect.DeepEqual(terms, d.builtFor) {
		d.complete = complete
		return d.built, nil
	}
	inventory, err = device.NewInventory(node, terms)
	if err != nil {
		return nil, fmt.Errorf("build the inventory: %w", err)
	}
	d.built, d.builtOf, d.builtFor, d.complete = inventory, node, terms, complete
	return inventory, nil
}

// readPolicy reads the policy. An invalid one leaves the last valid one in force.
func (d *desired) readPolicy(ctx context.Context) {
	found, err := d.policies.Read(ctx)
	if err == nil {
		d.policy = found
	}
	failed, notReady := "The sharing policy cannot be used, the last valid one stays in force", ""
	if d.policy == nil && err != nil {
		failed, notReady = "The sharing policy cannot be used, the published devices stay as they are", err.Error()
	}
	d.policyProblem.Log(ctx, err, failed, "The sharing policy can be used again")
	var invalid []events.Statement
	if err != nil {
		invalid = []events.Statement{{Event: events.Event{Reason: reasonPolicyInvalid, Text: err.Error()}}}
	}
	d.board.Say(ctx, "policy", invalid, func(events.Statement) (events.Event, bool) {
		return events.Event{Type: corev1.EventTypeNormal, Reason: reasonPolicyValid, Text: "The sharing policy can be used again"}, err == nil
	})
	d.readiness.set(ctx, needPolicy, notReady)
}

// readStored asks the API server, until it answers, what the plugin that ran here
// before has published: it may have been allocated under a policy that has changed
// since.
func (d *desired) readStored(ctx context.Context) {
	if d.storedKnown {
		return
	}
	limited, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	// Of all generations: it may have been stopped in the middle of an update.
	stored, err := d.stored.Stored(limited)
	if err != nil {
		if ctx.Err() == nil {
			d.readiness.set(ctx, needSlices, fmt.Sprintf("it is not known what was published before: %v", err))
		}
		return
	}
	for _, slice := range stored {
		for _, published := range slice.Spec.Devices {
			d.markNeeded(published.Name)
		}
	}
	d.storedKnown = true
}

// updateNeeded determines which devices must stay. The inventory is the present one
// with its status, or nil.
func (d *desired) updateNeeded(ctx context.Context, inventory *device.Inventory) {
	if inventory != nil {
		d.markNeeded(offeredDevices(inventory)...)
	}
	d.markNeeded(d.requested.drain()...)
	d.inUse, d.inUseErr = d.claims.InUse()
	d.markNeeded(d.inUse...)
	d.inUseProblem.Log(ctx, d.inUseErr, "It is not known which devices claims have, so that all stay", "It is known again which devices claims have")
	if d.inUseErr != nil || !d.known() {
		d.markNeeded(slices.Collect(maps.Keys(d.needed))...)
		return
	}
	maps.DeleteFunc(d.needed, func(_ string, last time.Time) bool { return d.now().Sub(last) >= d.grace })
}

// mayBeInUse reports whether claims may have devices of a GPU.
func (d *desired) mayBeInUse(pciAddress string) bool {
	return d.inUseErr != nil || slices.ContainsFunc(d.inUse, func(name string) bool { return device.IsOf(pciAddress, name) })
}

// markNeeded keeps devices for the time of grace from now.
func (d *desired) markNeeded(names ...string) {
	if d.needed == nil {
		d.needed = map[string]time.Time{}
	}
	for _, name := range names {
		d.needed[name] = d.now()
	}
}

// offeredDevices are those of an inventory that are not withdrawn.
func offeredDevices(inventory *device.Inventory) []string {
	withdrawn := sets.New(inventory.Withdrawn()...)
	var names []string
	for _, d := range inventory.Devices() {
		if !withdrawn.Has(d.Name) {
			names = append(names, d.Name)
		}
	}
	return names
}
