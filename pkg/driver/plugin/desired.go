// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// withdrawalGrace is for how long a device stays published that the policy does
// not offer any more and no claim is known to have. The scheduler may have
// allocated it just before, and the kubelet asks for it a moment later.
const withdrawalGrace = 10 * time.Minute

// Reasons of events about the policy.
const (
	reasonPolicyInvalid   = "SharingPolicyInvalid"
	reasonPolicyValid     = "SharingPolicyValid"
	reasonUnknownProfiles = "SharingPolicyProfilesUnknown"
	reasonKnownProfiles   = "SharingPolicyProfilesKnown"
)

// Events that say that something about the policy is over.
var (
	policyValid   = events.Event{Type: corev1.EventTypeNormal, Reason: reasonPolicyValid, Text: "The sharing policy can be used again"}
	profilesKnown = events.Event{Type: corev1.EventTypeNormal, Reason: reasonKnownProfiles, Text: "The sharing policy names no profiles any more that its GPUs of this node lack."}
)

// storedSlices reads what the API server holds for this node.
type storedSlices interface {
	Stored(ctx context.Context) ([]resourceapi.ResourceSlice, error)
}

// desired decides which devices are to be published: those that the policy offers,
// and those that must stay although it does not offer them any more, because
// claims may have them. It is for one goroutine.
type desired struct {
	*shared
	node   *ownNode
	stored storedSlices
	now    func() time.Time

	// policy is the last valid one. As long as there is none it is not known what
	// the admin wants: nothing new is published, and what is published stays.
	policy *policy.Policy
	// policyErr is why the present one is not valid, or nil.
	policyErr error
	// storedKnown says that the devices which were published before this plugin
	// started are among needed.
	storedKnown bool
	// needed is when each device was last offered, or known to be a claim's.
	needed map[string]time.Time
	// inUse are the devices that claims are known to have, and inUseErr says that
	// there may be more.
	inUse    []string
	inUseErr error
	// complete says that it was known what is to be published when the last inventory was built, of this node and on these terms.
	complete bool
	built    struct {
		inventory *device.Inventory
		node      *gpu.Node
		terms     device.Terms
	}

	policyProblem, inUseProblem logchange.Problem
	panics                      panics.Repeated
}

// inputsKnown reports whether all is known that decides what is to be published: the policy, what is stored, and the
// node. Until then, what the plugin before this one published stays as it is.
func (d *desired) inputsKnown() bool {
	return d.policy != nil && d.storedKnown && d.node.now.Load() != nil
}

// noPolicy offers nothing.
var noPolicy = &policy.Policy{Health: policy.Builtin().Health}

// build makes the inventory of these GPUs.
func (d *desired) build(ctx context.Context, node *gpu.Node) (inventory *device.Inventory, err error) {
	defer d.panics.Recover(ctx, &err)
	complete := d.inputsKnown()                         // first: the node may be read meanwhile
	extended, _ := extendedResources(d.node.now.Load()) // an error becomes an event
	terms := device.Terms{Policy: cmp.Or(d.policy, noPolicy), Limited: d.options.Limited, ExtendedResources: extended, Keep: map[string]bool{}}
	for name := range d.needed {
		terms.Keep[name] = true
	}
	if b := &d.built; b.node != node || !reflect.DeepEqual(b.terms, terms) {
		if inventory, err = device.NewInventory(node, terms); err != nil {
			return nil, fmt.Errorf("build the inventory: %w", err)
		}
		b.inventory, b.node, b.terms = inventory, node, terms
	}
	d.complete = complete
	return d.built.inventory, nil
}

// readPolicy reads the policy. An invalid one leaves the last valid one in force.
func (d *desired) readPolicy(ctx context.Context) {
	found, err := d.options.Policy.Read(ctx)
	if d.policyErr = err; err == nil {
		d.policy = found
	}
	failed, notReady := "The sharing policy cannot be used, the last valid one stays in force", ""
	if d.policy == nil && err != nil {
		failed, notReady = "The sharing policy cannot be used, the published devices stay as they are", err.Error()
	}
	d.policyProblem.Log(ctx, err, failed, "The sharing policy can be used again")
	d.readiness.set(ctx, needPolicy, notReady)
}

// policyKey identifies what is wrong with the policy, by the event that says that nothing of this reason is wrong any more.
type policyKey struct {
	over *events.Event
	text string
}

// policyStatements say why the policy is not valid.
func policyStatements(o *observedState) []events.Statement {
	if o.policyErr == nil {
		return nil
	}
	e := events.Event{Reason: reasonPolicyInvalid, Text: o.policyErr.Error()}
	return []events.Statement{{Key: policyKey{&policyValid, e.Text}, Event: e}}
}

// profileStatements say which profiles of the policy match nothing on this node: a typing error shows nowhere else. The newest event has all.
func profileStatements(o *observedState) []events.Statement {
	var texts []string
	for _, unknown := range o.policy.UnknownProfiles(o.gpus.node.GPUs) {
		texts = append(texts, unknown.String())
	}
	if len(texts) == 0 {
		return nil
	}
	e := events.Event{Reason: reasonUnknownProfiles, Text: sentences(texts...)}
	return []events.Statement{{Key: policyKey{&profilesKnown, e.Text}, Event: e}}
}

// readStored asks the API server, until it answers, what the plugin that ran here
// before has published: it may have been allocated under a policy that has changed
// since.
func (d *desired) readStored(ctx context.Context) {
	if d.storedKnown {
		return
	}
	limited, cancel := context.WithTimeout(ctx, clusterTimeout)
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

// updateNeeded determines which devices must stay. The inventory is the present one with its status, or nil.
func (d *desired) updateNeeded(ctx context.Context, inventory *device.Inventory) {
	if inventory != nil {
		for _, is := range offered(inventory) {
			d.markNeeded(is.Name)
		}
	}
	d.markNeeded(d.requested.drain()...)
	d.inUse, d.inUseErr = d.options.Claims.InUse()
	d.markNeeded(d.inUse...)
	d.inUseProblem.Log(ctx, d.inUseErr, "It is not known which devices claims have, so that all stay", "It is known again which devices claims have")
	if d.inUseErr != nil || !d.inputsKnown() {
		d.markNeeded(slices.Collect(maps.Keys(d.needed))...)
		return
	}
	maps.DeleteFunc(d.needed, func(_ string, last time.Time) bool { return d.now().Sub(last) >= withdrawalGrace })
}

// mayBeInUse reports whether claims may have devices of a GPU.
func (d *desired) mayBeInUse(pciAddress string) bool {
	return d.inUseErr != nil || slices.ContainsFunc(d.inUse, func(name string) bool { return device.IsOf(pciAddress, name) })
}

// markNeeded keeps devices for the time of grace from now.
func (d *desired) markNeeded(names ...string) {
	for _, name := range names {
		d.needed[name] = d.now()
	}
}

// offered are the devices of an inventory that are not withdrawn.
func offered(inventory *device.Inventory) []device.Device {
	withdrawn := sets.New(inventory.Withdrawn()...)
	return slices.DeleteFunc(inventory.Devices(), func(d device.Device) bool { return withdrawn.Has(d.Name) })
}

// PolicySource provides the admin's sharing policy.
type PolicySource interface {
	// Read returns the policy as it is now. The same pointer means that nothing
	// has changed.
	Read(ctx context.Context) (*policy.Policy, error)
}

// PolicyFile is a SharingPolicy in a file that may be replaced at any time, as the kubelet does with a ConfigMap. It is for one
// goroutine.
//
// The nodes of a cluster follow changes at random times. All of them hear of a change within a minute or two, and each writes all of
// its ResourceSlices because of it: in a large cluster that is more than etcd holds until it removes old revisions.
type PolicyFile struct {
	path   string
	spread time.Duration

	// content was decoded last, to found.
	content []byte
	found   *policy.Policy
	// current is the policy to follow. turn is when this node follows another one, zero if there is none.
	current *policy.Policy
	turn    time.Time
}

// NewPolicyFile does not read the file yet. Without a path the policy is the built-in one. A node waits for up to the time of spread
// before it follows a change.
func NewPolicyFile(path string, spread time.Duration) *PolicyFile {
	return &PolicyFile{path: path, spread: spread}
}

// Read returns the first policy at once, so that a restart is a way not to wait, and a later one when it is this node's turn. A policy
// that changes again in the meantime keeps the turn; one that changes back has nothing to wait for. While the policy is invalid
// nothing waits.
func (f *PolicyFile) Read(ctx context.Context) (*policy.Policy, error) {
	found, err := f.read()
	now := time.Now()
	switch {
	case err != nil:
		f.turn = time.Time{}
		return nil, err
	case reflect.DeepEqual(found, f.current):
		f.turn = time.Time{}
		return f.current, nil
	case f.current != nil && f.turn.IsZero():
		f.turn = now.Add(time.Duration(rand.Float64() * float64(f.spread))) //nolint:gosec // no secret
		klog.FromContext(ctx).Info("The sharing policy has changed. This node follows later, so that not all nodes write their ResourceSlices at once; "+
			"a restart of this pod does not wait", "in", f.turn.Sub(now))
	}
	if f.current != nil && now.Before(f.turn) {
		return f.current, nil
	}
	f.current, f.turn = found, time.Time{}
	return found, nil
}

func (f *PolicyFile) read() (*policy.Policy, error) {
	if f.path == "" {
		return policy.Builtin(), nil
	}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return nil, fmt.Errorf("sharing policy: %w", err)
	}
	if f.found == nil || !bytes.Equal(content, f.content) {
		if f.found, err = policy.Decode(content); err != nil {
			return nil, fmt.Errorf("sharing policy %s: %w", f.path, err)
		}
		f.content = content
	}
	return f.found, nil
}
