// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// withdrawalGrace is for how long a device stays published that the policy does
// not offer any more and no claim is known to have. The scheduler may have
// allocated it just before, and the kubelet asks for it a moment later.
const withdrawalGrace = 10 * time.Minute

// offer is what the admin wants published, and what has to stay published
// although the admin does not want it any more.
type offer struct {
	source  PolicySource
	limited bool
	grace   time.Duration
	now     func() time.Time

	// policy is the last one that could be read. Before there is one nobody knows
	// what the admin wants: nothing is offered, and nothing that was goes.
	policy *policy.Policy
	// problem is why the policy cannot be read, empty when it can.
	problem string
	// recalled says that it is known what was published before this plugin started.
	recalled bool
	// wanted is when each device was last offered, or known to be a claim's.
	wanted map[string]time.Time
	// doubt is why it is not known what claims have, empty when it is.
	doubt string
	// made are the terms of the inventory that there is.
	made device.Terms
}

// known tells whether it is known what is to be published. Until then what the
// plugin before this one has published stays as it is.
func (o *offer) known() bool { return o.policy != nil && o.recalled }

// noOffer stands for a policy that is not known.
var noOffer = &policy.Policy{}

func (o *offer) terms() device.Terms {
	terms := device.Terms{Policy: cmp.Or(o.policy, noOffer), Limited: o.limited, Keep: make(map[string]bool, len(o.wanted))}
	for name := range o.wanted {
		terms.Keep[name] = true
	}
	return terms
}

// outdated tells whether an inventory that is made now may be another one. It does
// not look at the inventory: what the hardware cannot be is never in it, however
// much it is wanted.
func (o *offer) outdated() bool {
	terms := o.terms()
	return terms.Policy != o.made.Policy || !maps.Equal(terms.Keep, o.made.Keep)
}

func (o *offer) want(names ...string) {
	if o.wanted == nil {
		o.wanted = map[string]time.Time{}
	}
	for _, name := range names {
		o.wanted[name] = o.now()
	}
}

// forget what nobody has wanted for the time of grace.
func (o *offer) forget() {
	maps.DeleteFunc(o.wanted, func(_ string, last time.Time) bool { return o.now().Sub(last) >= o.grace })
}

// extend gives all that is wanted the time of grace anew.
func (o *offer) extend() { o.want(slices.Collect(maps.Keys(o.wanted))...) }

// offeredBy an inventory are the devices that are not withdrawn.
func offeredBy(inventory *device.Inventory) []string {
	withdrawn := sets.New(inventory.Withdrawn()...)
	var names []string
	for _, d := range inventory.Devices() {
		if !withdrawn.Has(d.Name) {
			names = append(names, d.Name)
		}
	}
	return names
}

// reasonPolicyInvalid is an event's.
const reasonPolicyInvalid = "SharingPolicyInvalid"

// readPolicy looks at the policy. One that cannot be read leaves the last good one
// in force.
func (l *nodeLoop) readPolicy(ctx context.Context) {
	o := &l.offer
	found, err := o.source.Read()
	problem := ""
	if err != nil {
		problem = err.Error()
	} else {
		o.policy = found
	}
	switch problem {
	case o.problem:
	case "":
		klog.FromContext(ctx).Info("The sharing policy can be used again")
	default:
		klog.FromContext(ctx).Error(err, "The sharing policy cannot be used", "previousPolicyStaysInForce", o.policy != nil)
		if l.Events != nil {
			l.Events.Warn(ctx, claim.Ref{}, reasonPolicyInvalid, problem)
		}
	}
	o.problem = problem
	if o.policy != nil {
		problem = ""
	}
	l.ready.setPolicy(ctx, problem)
}

// recall asks the API server, until it answers, what the plugin that ran here
// before has published: it may have been allocated under a policy that has changed
// since.
func (l *nodeLoop) recall(ctx context.Context) {
	if l.offer.recalled {
		return
	}
	limited, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	// Of all generations: it may have been stopped in the middle of an update.
	published, err := l.listSlices(limited)
	if err != nil {
		if ctx.Err() == nil {
			l.ready.setSlices(ctx, fmt.Sprintf("it is not known what was published before: %v", err))
		}
		return
	}
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			l.offer.want(d.Name)
		}
	}
	l.offer.recalled = true
}

// noteWanted brings up to date which devices have to stay.
func (l *nodeLoop) noteWanted(ctx context.Context) {
	o := &l.offer
	if l.overview.inventory != nil {
		o.want(offeredBy(l.overview.inventory.With(l.overview.status()))...)
	}
	o.want(l.asked.take()...)
	inUse, err := l.Claims.InUse()
	o.want(inUse...)
	doubt := ""
	if err != nil {
		doubt = err.Error()
	}
	if doubt != o.doubt && doubt != "" {
		klog.FromContext(ctx).Error(err, "It is not known which devices claims have, so that all stay")
	}
	if o.doubt = doubt; doubt != "" || !o.known() {
		o.extend()
		return
	}
	o.forget()
}

// build makes the inventory of these GPUs under the policy.
func (l *nodeLoop) build(node *gpu.Node) (*device.Inventory, error) {
	terms := l.offer.terms()
	inventory, err := device.NewInventory(node, terms)
	if err != nil {
		return nil, fmt.Errorf("build the inventory: %w", err)
	}
	l.offer.made = terms
	return inventory, nil
}

// revise builds the inventory anew when the policy, or what claims have, may make
// it another one.
func (l *nodeLoop) revise(ctx context.Context) {
	l.readPolicy(ctx)
	l.noteWanted(ctx)
	if l.overview.inventory == nil || !l.offer.outdated() {
		return
	}
	inventory, err := l.build(l.overview.node)
	if err != nil {
		klog.FromContext(ctx).Error(err, "What is offered stays as it is")
		return
	}
	l.overview.remade(inventory)
	l.reportProblems(ctx, inventory)
	l.reportPolicy(ctx)
}

// policyReport is what was logged about the policy.
type policyReport struct {
	policy *policy.Policy
	gpus   map[string]bool
}

// reportPolicy logs what each GPU is offered as, once for every policy.
func (l *nodeLoop) reportPolicy(ctx context.Context) {
	current := l.offer.policy
	if current == nil {
		return
	}
	if l.reported.policy != current {
		l.reported = policyReport{policy: current, gpus: map[string]bool{}}
	}
	for i := range l.overview.node.GPUs {
		g := &l.overview.node.GPUs[i]
		if l.reported.gpus[g.UUID] {
			continue
		}
		l.reported.gpus[g.UUID] = true
		klog.FromContext(ctx).Info("Sharing policy", "pciAddress", g.PCIAddress, "productName", g.ProductName,
			"offers", current.For(g).String())
	}
}
