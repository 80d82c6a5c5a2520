// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// ClaimReconciler knows what claims and others have on the GPUs. Its methods may be
// called concurrently with all others.
type ClaimReconciler interface {
	// SetInventory replaces the devices that claims can have.
	SetInventory(inventory *device.Inventory)
	// Reconcile finishes or undoes what was left half done, and what belongs to no claim any more, and says what there is
	// then. An error means that something is left. It does not wait for a GPU that is busy or does not answer.
	Reconcile(ctx context.Context) (device.Status, error)
	// ReleaseOrphans asks the API server about prepared claims until ctx ends, and
	// releases those that do not have their devices any more.
	ReleaseOrphans(ctx context.Context)
	// Unlooked lists the GPUs of which nothing is known yet.
	Unlooked() []string
	// InUse lists the devices that claims are known to have, by name. An error says
	// that there may be more.
	InUse() ([]string, error)
	// Statements are what is known of claims.
	Statements() []claim.Statement
}

const (
	// lookPatience is for how long GPUs that are slow, and an MPS supervisor that does not answer, may keep what is stored of all
	// GPUs from being replaced at the start: it may say more than is known yet. Those are kept back then.
	lookPatience = 30 * time.Second
	lookPause    = time.Second
)

// changesSettle is how long a change of a claim is left alone for others to join it: preparing a claim alone is several.
const changesSettle = 200 * time.Millisecond

// gpuLoop joins what is known of the GPUs of this node: what was discovered of them, which takes long and seldom changes, what a
// survey finds at every poll, and what others say. It hands that on, whatever has changed: to claims, to the publisher, to those
// who have a device, to metrics, and to people.
type gpuLoop struct {
	*shared
	publish func(w *wanted)
	health  healthMonitor

	desired   desired
	report    gpuReport
	gpus      knownGPUs
	discovery discoverer
	survey    survey
	// inventory is of these GPUs, nil until there is one.
	inventory *device.Inventory
	// live are the claims that have devices, as far as is known, and now is what was wanted last.
	live []claim.LiveClaim
	now  wanted

	buildProblem, liveProblem logchange.Problem
}

// survey is what claims and others have on the GPUs, as it was found last.
type survey struct {
	device.Status
	// at is when that was.
	at time.Time
	// enough says that what is known may take the place of what is stored. awaitedSince is since when it is waited for.
	enough       bool
	awaitedSince time.Time
	again        *time.Timer

	problem, left logchange.Problem
	panics        panics.Repeated
}

// run discovers the GPUs, cleans up what an earlier process left, lets calls
// through and then keeps claims and slices up to date until ctx ends. Without a
// driver it cleans up what can be cleaned up and waits: unpreparing must work.
func (l *gpuLoop) run(ctx context.Context) {
	defer l.discovery.running.Wait()
	defer l.startup.finish()
	changed := l.options.Claims.Changed()
	l.desired.readStored(ctx)
	l.recall(ctx)
	l.discovery.last = time.Now()
	l.discovery.begin(ctx)
	for l.discovery.inProgress && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case found := <-l.discovery.found:
			l.discovery.inProgress = false
			l.take(ctx, found)
		case <-l.pollNow: // what holds of the node does not wait for a GPU that does not answer
			l.handOn(ctx)
		}
	}
	// Nothing is offered before it is known which GPUs another driver has given away.
	l.neighbours.awaitFirstScan(ctx)
	// Claims can have partitions that others made, which only looking finds.
	l.look(ctx)
	l.startup.finish()

	var settled <-chan time.Time
	ticker := time.NewTicker(l.options.PollInterval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case found := <-l.discovery.found:
			l.discovery.inProgress = false
			l.take(ctx, found)
			l.look(ctx)
		case <-ticker.C:
			l.poll(ctx)
		case <-l.pollNow:
			l.poll(ctx)
		case <-changed:
			changed, settled = nil, time.After(changesSettle)
		case <-settled:
			changed, settled = l.options.Claims.Changed(), nil // before it is looked at what claims have
			l.handOn(ctx)
		}
	}
}

// poll follows the policy, surveys the GPUs, and starts a discovery if one is due.
func (l *gpuLoop) poll(ctx context.Context) {
	l.desired.readStored(ctx)
	l.rebuild(ctx)
	l.look(ctx)
	if l.discovery.isDue(l.gpus.isTrouble(l.survey.Status)) {
		l.gpus.back = nil
		l.discovery.begin(ctx)
	}
}

// recall takes over what an earlier process has discovered.
func (l *gpuLoop) recall(ctx context.Context) {
	l.desired.update(ctx, nil)
	l.gpus.recall(ctx, l.options.Hardware.Removed, l.desired.mayBeInUse)
	l.rebuild(ctx)
}

// take takes the result of a discovery.
func (l *gpuLoop) take(ctx context.Context, found discovery) {
	switch {
	case errors.Is(found.err, ErrStop):
		l.stop(found.err)
		return
	case ctx.Err() != nil:
		return
	case found.err != nil:
		l.gpus.fail(found.err)
	default:
		l.gpus.take(ctx, found.node)
	}
	l.rebuild(ctx)
	if gone := l.gpus.driverGone; gone != nil {
		l.readiness.set(ctx, needHardware, gone.Error())
		return
	}
	l.readiness.set(ctx, needHardware, "")
	l.discovery.problem.Log(ctx, found.err, "The GPUs could not be discovered again, will retry", "")
}

// rebuild brings up to date what is to be published: the policy may be another one, or claims may have other devices.
func (l *gpuLoop) rebuild(ctx context.Context) {
	l.desired.update(ctx, l.now.inventory)
	if l.gpus.node == nil {
		return
	}
	l.gpus.forget(ctx, l.desired.mayBeInUse)
	inventory, err := l.desired.build(ctx, l.gpus.node)
	l.buildProblem.Log(ctx, err, "The published devices stay as they are", "The published devices are up to date again")
	if err != nil {
		return
	}
	l.inventory = inventory
	l.report.log(ctx, inventory, l.desired.policy, &l.gpus)
	status, _ := l.known().status()
	l.give(inventory.With(status), status)
}

// look cleans up, surveys the GPUs, and hands on what is known then. When that fails their conditions stay as they were.
func (l *gpuLoop) look(ctx context.Context) {
	found, err := l.reconcile(ctx)
	if l.inventory != nil && ctx.Err() == nil {
		l.learn(ctx, found, err)
	}
	l.handOn(ctx)
}

// learn takes what was found on the GPUs, or why that is not known.
func (l *gpuLoop) learn(ctx context.Context, found device.Status, err error) {
	l.survey.problem.Log(ctx, err, "The GPUs could not be surveyed, their conditions stay as they were", "The GPUs can be surveyed again")
	switch {
	case err == nil:
		l.gpus.compare(l.survey.Status, found)
		l.survey.Status, l.survey.at = found, time.Now()
		l.survey.enough = l.survey.enough || !l.awaitsLook(ctx)
		if l.survey.enough && l.gpus.driverGone == nil {
			l.survey.Conditions = append(l.survey.Conditions, unknownLeft(l.options.Claims.Unlooked())...)
		}
	case !l.survey.enough:
		// Nothing is known of what must not be allocated.
		l.readiness.set(ctx, needSlices, fmt.Sprintf("the GPUs could not be surveyed: %v", err))
	}
}

// reconcile cleans up, and says what there is then. That something is left is no reason not to know that.
func (l *gpuLoop) reconcile(ctx context.Context) (status device.Status, err error) {
	defer l.survey.panics.Recover(ctx, &err)
	status, left := l.options.Claims.Reconcile(ctx)
	if ctx.Err() != nil {
		return status, nil
	}
	if left != nil {
		l.options.Metrics.ReconcileFailed()
	}
	l.survey.left.Log(ctx, left, "Not everything is cleaned up, will try again", "Everything is cleaned up")
	return status, nil
}

// awaitsLook reports whether the first publication has to wait for a look at some GPU, and sees to it that there is another soon.
func (l *gpuLoop) awaitsLook(ctx context.Context) bool {
	if l.survey.again != nil {
		l.survey.again.Stop() // one look is asked for, however many there were for other reasons
	}
	unlooked := l.options.Claims.Unlooked()
	if len(unlooked) == 0 || l.gpus.driverGone != nil {
		return false
	}
	if l.survey.awaitedSince.IsZero() {
		l.survey.awaitedSince = time.Now()
	}
	if time.Since(l.survey.awaitedSince) >= lookPatience {
		return false
	}
	l.readiness.set(ctx, needSlices, fmt.Sprintf("not all GPUs have been looked at yet: %v", unlooked))
	l.survey.again = time.AfterFunc(lookPause, l.pollNow.Fire)
	return true
}

// unknownLeft keeps GPUs back that nobody has looked at yet.
func unknownLeft(unlooked []string) (all []device.Condition) {
	for _, address := range unlooked {
		all = append(all, device.Condition{
			PCIAddress: address, Reason: device.ReleasePending,
			Message: "it is not known yet what ended claims have left: a call keeps the GPU, or it is slow",
		})
	}
	return all
}

// known joins what is known now.
func (l *gpuLoop) known() *known {
	k := &known{
		node: l.desired.node.now.Load(), neighbours: *l.neighbours.latest.Load(), policy: cmp.Or(l.desired.policy, noPolicy), policyErr: l.desired.policyErr,
		gpus: &l.gpus, inventory: l.inventory, complete: l.desired.complete, enough: l.survey.enough, survey: l.survey.Status,
		said: l.now.states, now: time.Now(),
	}
	if l.inventory == nil {
		return k
	}
	if l.gpus.discovered || l.gpus.driverGone != nil { // before, the hardware is not open, and reading the health of a GPU would fail
		l.health.Follow(l.gpus.uuids(), k.policy.Health)
	}
	k.live, k.statements, k.health = l.live, l.options.Claims.Statements(), l.health.Conditions()
	return k
}

// give gives claims the devices that they can have now.
func (l *gpuLoop) give(inventory *device.Inventory, status device.Status) {
	l.now.inventory, l.now.status = inventory, status
	l.options.Claims.SetInventory(inventory)
	l.startup.inventory.Store(inventory)
	l.options.Metrics.SetGPUs(inventory, status)
}

// handOn tells all others what is known now. Before all GPUs were looked at that is less than what is stored.
func (l *gpuLoop) handOn(ctx context.Context) {
	if ctx.Err() != nil {
		return
	}
	if l.inventory != nil {
		live, err := l.options.Claims.Live()
		l.liveProblem.Log(ctx, err, "It is not known what claims have, what was known last is told", "It is known again what claims have")
		if err == nil {
			l.live = live
		}
	}
	l.now = *want(l.known())
	if l.inventory != nil {
		l.give(l.now.inventory, l.now.status)
		if l.survey.enough {
			l.states.set(l.now.states, l.now.status.Sorted().Conditions, l.survey.at)
		}
	}
	l.publish(&l.now)
	// Last: who reads an event without its taint takes it for over.
	l.board.Say(ctx, "node", l.now.events, l.now.over)
}
