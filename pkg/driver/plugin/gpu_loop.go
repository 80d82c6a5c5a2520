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

const (
	// surveyPatience is how long the first publication waits for GPUs that are slow, and for an MPS supervisor that does not answer: the
	// slices that are stored may have taints whose cause this process has not found yet. After that, unobserved GPUs get a taint.
	surveyPatience = 30 * time.Second
	surveyPause    = time.Second
)

// changesSettle is how long a change of a claim is left alone for others to join it: preparing a claim alone is several.
const changesSettle = 200 * time.Millisecond

// gpuLoop joins what is known of the GPUs of this node: what was discovered, which takes long and seldom changes, what a survey finds at
// every poll, and what other parts of the plugin say. After each change it propagates the result to all consumers: claims, ResourceSlices,
// the status of claims, the kubelet, metrics and events.
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
	// live are the claims that are known to have devices, and now is what was last propagated.
	live []claim.LiveClaim
	now  wanted

	buildProblem, liveProblem logchange.Problem
}

// survey is what claims and others have on the GPUs, as it was found last.
type survey struct {
	device.Status
	// at is when that was.
	at time.Time
	// enough says that enough is known to replace the slices that are stored. awaitedSince is when the wait for that began.
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
	poll := l.propagate // until the first discovery has ended: news of the node does not wait for a GPU that does not answer
	var settled <-chan time.Time
	for tick := time.Tick(l.options.PollInterval); ctx.Err() == nil; {
		select {
		case <-ctx.Done():
		case found := <-l.discovery.found:
			l.discovery.inProgress, poll = false, l.poll
			l.take(ctx, found)
			// Nothing is published before it is known which GPUs another driver has given away, and claims can have partitions that others
			// made, which only a survey finds.
			l.neighbours.awaitFirstScan(ctx)
			l.reconcile(ctx)
			l.startup.finish()
		case <-tick:
			poll(ctx)
		case <-l.pollNow:
			poll(ctx)
		case <-changed:
			changed, settled = nil, time.After(changesSettle)
		case <-settled:
			changed, settled = l.options.Claims.Changed(), nil // before propagate reads what claims have
			l.propagate(ctx)
		}
	}
}

// poll follows the policy, surveys the GPUs, and starts a discovery if one is due.
func (l *gpuLoop) poll(ctx context.Context) {
	l.desired.readStored(ctx)
	l.rebuild(ctx)
	l.reconcile(ctx)
	if l.discovery.isDue(l.gpus.isTrouble(l.survey.Status)) {
		l.gpus.back = nil
		l.discovery.begin(ctx)
	}
}

// recall takes over what an earlier process has discovered.
func (l *gpuLoop) recall(ctx context.Context) {
	l.desired.updateNeeded(ctx, nil)
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
	l.desired.readPolicy(ctx)
	l.desired.updateNeeded(ctx, l.now.inventory)
	if l.gpus.node == nil {
		return
	}
	l.gpus.forget(ctx, l.desired.mayBeInUse)
	inventory, err := l.desired.build(ctx, l.gpus.node)
	l.buildProblem.Log(ctx, err, "The published devices stay as they are", "The published devices are up to date again")
	if err != nil {
		return
	}
	l.report.log(ctx, inventory, l.desired.policy, &l.gpus)
	if inventory == l.inventory {
		return // what is known of its devices follows when it is propagated
	}
	l.inventory = inventory
	status, _ := l.observed().status()
	l.give(inventory.With(status), status)
}

// reconcile cleans up, surveys the GPUs, and propagates the result. If the survey fails, their conditions stay as they were.
func (l *gpuLoop) reconcile(ctx context.Context) {
	found, err := l.reconcileClaims(ctx)
	if l.inventory != nil && ctx.Err() == nil {
		l.takeSurvey(ctx, found, err)
	}
	l.propagate(ctx)
}

// takeSurvey takes the result of a survey, or why it failed.
func (l *gpuLoop) takeSurvey(ctx context.Context, found device.Status, err error) {
	l.survey.problem.Log(ctx, err, "The GPUs could not be surveyed, their conditions stay as they were", "The GPUs can be surveyed again")
	switch {
	case err == nil:
		l.gpus.compare(l.survey.Status, found)
		l.survey.Status, l.survey.at = found, time.Now()
		l.survey.enough = l.survey.enough || !l.awaitsSurvey(ctx)
		if l.survey.enough && l.gpus.driverGone == nil {
			l.survey.Conditions = append(l.survey.Conditions, unobservedConditions(l.options.Claims.Unobserved())...)
		}
	case !l.survey.enough:
		// Nothing is known of what must not be allocated.
		l.readiness.set(ctx, needSlices, fmt.Sprintf("the GPUs could not be surveyed: %v", err))
	}
}

// reconcileClaims cleans up, and returns what is on the GPUs then, also if something could not be cleaned up.
func (l *gpuLoop) reconcileClaims(ctx context.Context) (status device.Status, err error) {
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

// awaitsSurvey reports whether the first publication has to wait until a survey has observed all GPUs, and then has another one made soon.
func (l *gpuLoop) awaitsSurvey(ctx context.Context) bool {
	if l.survey.again != nil {
		l.survey.again.Stop() // so that there is at most one timer
	}
	unobserved := l.options.Claims.Unobserved()
	if len(unobserved) == 0 || l.gpus.driverGone != nil {
		return false
	}
	if l.survey.awaitedSince.IsZero() {
		l.survey.awaitedSince = time.Now()
	}
	if time.Since(l.survey.awaitedSince) >= surveyPatience {
		return false
	}
	l.readiness.set(ctx, needSlices, fmt.Sprintf("not all GPUs have been looked at yet: %v", unobserved))
	l.survey.again = time.AfterFunc(surveyPause, l.pollNow.Fire)
	return true
}

// unobservedConditions keep GPUs back that could not be observed yet.
func unobservedConditions(unobserved []string) (all []device.Condition) {
	for _, address := range unobserved {
		all = append(all, device.Condition{
			PCIAddress: address, Reason: device.ReleasePending,
			Message: "it is not known yet what ended claims have left: a call keeps the GPU, or it is slow",
		})
	}
	return all
}

// observed joins what is known now.
func (l *gpuLoop) observed() *observedState {
	o := &observedState{
		node: l.desired.node.now.Load(), neighbours: *l.neighbours.latest.Load(), policy: cmp.Or(l.desired.policy, noPolicy), policyErr: l.desired.policyErr,
		gpus: &l.gpus, inventory: l.inventory, complete: l.desired.complete, enough: l.survey.enough, survey: l.survey.Status,
		previous: l.now.states, now: time.Now(),
	}
	if l.inventory == nil {
		return o
	}
	if l.gpus.discovered || l.gpus.driverGone != nil { // before, the hardware is not open, and reading the health of a GPU would fail
		l.health.Follow(l.gpus.uuids(), o.policy.Health)
	}
	o.live, o.statements, o.health = l.live, l.options.Claims.Statements(), l.health.Conditions()
	return o
}

// give gives claims the devices that they can have now.
func (l *gpuLoop) give(inventory *device.Inventory, status device.Status) {
	l.now.inventory, l.now.status = inventory, status
	l.options.Claims.SetInventory(inventory)
	l.startup.inventory.Store(inventory)
	l.options.Metrics.SetGPUs(inventory, status)
}

// propagate hands what is known now to all consumers. Before all GPUs were observed, it does not replace what is stored.
func (l *gpuLoop) propagate(ctx context.Context) {
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
	l.now = *want(l.observed())
	if l.inventory != nil {
		l.give(l.now.inventory, l.now.status)
		if l.survey.enough {
			l.states.set(l.now.states, l.now.status.Sorted().Conditions, l.survey.at)
		}
	}
	l.publish(&l.now)
	// Last: an event whose taint is not there yet would look as if it were over.
	l.notifier.Set(ctx, "node", l.now.events, l.now.over)
}
