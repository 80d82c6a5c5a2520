// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"
	"time"

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

	// policy is the last one that could be read. Before there is one nothing is
	// offered: what the admin wants is not known.
	policy *policy.Policy
	// problem is why the policy cannot be read, empty when it can.
	problem string
	// wanted is when each device was last offered, or known to be a claim's.
	wanted map[string]time.Time
}

// reasonPolicyInvalid is an event's.
const reasonPolicyInvalid = "SharingPolicyInvalid"

// read tells whether the policy is another one than before. One that cannot be read
// leaves the last good one in force.
func (l *nodeLoop) readPolicy(ctx context.Context) (changed bool) {
	o := &l.offer
	found, err := o.source.Read()
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	if problem != o.problem && problem != "" {
		klog.FromContext(ctx).Error(err, "The sharing policy cannot be used", "previousPolicyStaysInForce", o.policy != nil)
		if l.Events != nil {
			l.Events.Warn(ctx, claim.Ref{}, reasonPolicyInvalid, problem)
		}
	}
	o.problem = problem
	if o.policy == nil {
		l.ready.setPolicy(ctx, problem)
	}
	if err != nil || found == o.policy {
		return false
	}
	o.policy = found
	l.ready.setPolicy(ctx, "")
	return true
}

func (o *offer) terms() device.Terms {
	terms := device.Terms{Policy: o.policy, Limited: o.limited, Keep: map[string]bool{}}
	if terms.Policy == nil {
		terms.Policy = &policy.Policy{}
	}
	for name, last := range o.wanted {
		if o.now().Sub(last) < o.grace {
			terms.Keep[name] = true
		}
	}
	return terms
}

// note remembers what is offered now, and what claims have.
func (o *offer) note(inventory *device.Inventory, inUse []string) {
	withdrawn := map[string]bool{}
	for _, name := range inventory.Withdrawn() {
		withdrawn[name] = true
	}
	for _, d := range inventory.Devices() {
		if !withdrawn[d.Name] {
			o.want(d.Name)
		}
	}
	for _, name := range inUse {
		o.want(name)
	}
	for name, last := range o.wanted {
		if o.now().Sub(last) >= o.grace {
			delete(o.wanted, name)
		}
	}
}

func (o *offer) want(name string) {
	if o.wanted == nil {
		o.wanted = map[string]time.Time{}
	}
	o.wanted[name] = o.now()
}

// outdated tells whether an inventory lacks what has to stay, or has what need not
// stay any more.
func (o *offer) outdated(inventory *device.Inventory, inUse []string) bool {
	for _, name := range inUse {
		if _, found := inventory.Lookup(name); !found {
			return true
		}
	}
	return slices.ContainsFunc(inventory.Withdrawn(), func(name string) bool { return o.wanted[name].IsZero() })
}

// recall asks the API server what the plugin that ran here before has published:
// it may have been allocated under a policy that has changed since.
func (l *nodeLoop) recall(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	stored, err := l.storedSlices(limited)
	if err != nil {
		klog.FromContext(ctx).Error(err, "It is not known what was published before; devices that the policy does not offer any more stay only where claims are known to have them")
		return
	}
	for _, slice := range stored {
		for _, d := range slice.Spec.Devices {
			l.offer.want(d.Name)
		}
	}
}

// build makes the inventory of these GPUs under the policy.
func (l *nodeLoop) build(node *gpu.Node) (*device.Inventory, error) {
	return device.NewInventory(node, l.offer.terms())
}

// revise builds the inventory anew when the policy, or what claims have, makes it
// another one.
func (l *nodeLoop) revise(ctx context.Context) {
	changed := l.readPolicy(ctx)
	if l.overview.inventory == nil {
		return
	}
	inUse, err := l.Claims.InUse()
	if err != nil {
		klog.FromContext(ctx).Error(err, "It is not known which devices claims have, so what is offered stays as it is")
		return
	}
	now := l.overview.inventory.With(l.overview.status())
	l.offer.note(now, inUse)
	if !changed && !l.offer.outdated(now, inUse) {
		return
	}
	inventory, err := l.build(l.overview.node)
	if err != nil {
		klog.FromContext(ctx).Error(err, "The inventory could not be built anew")
		return
	}
	l.overview.offered(inventory)
	l.reportProblems(ctx, inventory)
	if changed {
		l.reportPolicy(ctx)
	}
}

// reportPolicy logs what every GPU is offered as.
func (l *nodeLoop) reportPolicy(ctx context.Context) {
	for i := range l.overview.node.GPUs {
		g := &l.overview.node.GPUs[i]
		klog.FromContext(ctx).Info("Sharing policy", "pciAddress", g.PCIAddress, "productName", g.ProductName,
			"offers", l.offer.terms().Policy.For(g).String())
	}
}
