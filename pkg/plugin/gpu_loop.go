// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/metrics"
	"github.com/partage-dev/partage/pkg/panics"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/lastseen"
)

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

// ClaimSurveyor knows what claims and others have on the GPUs. Its methods may be
// called concurrently with all others.
type ClaimSurveyor interface {
	// SetInventory replaces the devices that claims can have.
	SetInventory(inventory *device.Inventory)
	// Survey compares the GPUs with what claims have. It does not wait for a GPU
	// that is busy or does not answer.
	Survey(ctx context.Context) device.Status
	// Unlooked lists the GPUs of which no survey knows anything yet.
	Unlooked() []string
	// InUse lists the devices that claims are known to have, by name. An error says
	// that there may be more.
	InUse() ([]string, error)
	// Statements are what the last survey says of claims.
	Statements() []claim.Statement
}

// gpuLoop follows the GPUs of this node. Discovering them takes long, and its
// result seldom changes; surveying them is quick and done at every poll. The loop
// hands what it finds to claims and to the publisher.
type gpuLoop struct {
	interval   time.Duration
	hardware   Hardware
	claims     ClaimSurveyor
	publish    func(*device.Inventory)
	reconciler *reconciler
	readiness  *readiness
	startup    *startup
	conditions *conditionSpeaker
	board      *events.Board
	metrics    *metrics.Metrics
	health     healthMonitor
	foreign    *foreignClaims
	ownNode    *ownNode
	troubles   *troubles
	// tell takes what is known now, and when that was last surveyed.
	tell func(status device.Status, surveyedAt time.Time)
	// surveyNow asks for a poll, failed for cleaning up, healthChanged for handing on what is
	// wrong with GPUs.
	surveyNow, failed, healthChanged loop.Trigger
	// stop ends the driver.
	stop func(error)

	desired    desired
	discoverer *discoverer
	state      nodeState
	report     gpuReport
	lastSeen   *lastseen.File
	// surveyedAt is when the last survey has succeeded, if one has.
	surveyedAt time.Time
	// awaitedSince is since when the first publication waits for a look.
	awaitedSince time.Time
	// now is base with a status.
	base, now *device.Inventory
	with      device.Status

	discoveryProblem logchange.Problem
	buildProblem     logchange.Problem
	surveyProblem    logchange.Problem
	lastSeenProblem  logchange.Problem
	surveyPanics     panics.Repeated
}

// run discovers the GPUs, cleans up what an earlier process left, lets calls
// through and then keeps claims and slices up to date until ctx ends. Without a
// driver it cleans up what can be cleaned up and waits: unpreparing must work.
func (l *gpuLoop) run(ctx context.Context) {
	defer l.discoverer.running.Wait()
	defer l.startup.finish()
	l.desired.readStored(ctx)
	l.recall(ctx)
	l.handleDiscovery(ctx, l.discoverer.discover(ctx))
	l.reconciler.runOnce(ctx)
	// Nothing is offered before it is known which GPUs another driver has given away.
	l.foreign.await(ctx)
	// Claims can have partitions that others made, which only a survey finds.
	l.survey(ctx)
	l.startup.finish()

	ticker := time.NewTicker(l.interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case found := <-l.discoverer.found:
			l.discoverer.inProgress = false
			l.handleLaterDiscovery(ctx, found)
			l.survey(ctx)
		case <-ticker.C:
			l.poll(ctx)
		case <-l.surveyNow:
			l.poll(ctx)
		case <-l.healthChanged:
			l.handOn(ctx)
		}
	}
}

// poll follows the policy, surveys the GPUs, and starts a discovery if one is due.
func (l *gpuLoop) poll(ctx context.Context) {
	l.desired.readStored(ctx)
	l.updateInventory(ctx)
	l.survey(ctx)
	if l.state.countPoll() {
		l.discoverer.begin(ctx)
	}
}

// handleLaterDiscovery also cleans up when the driver has appeared or returned:
// what was left while it was away can be removed now.
func (l *gpuLoop) handleLaterDiscovery(ctx context.Context, found discovery) {
	appeared, returned := !l.state.discovered, l.state.driverGone != nil
	l.handleDiscovery(ctx, found)
	switch {
	case found.err != nil:
	case appeared:
		l.reconciler.runOnce(ctx)
	case returned:
		l.failed.Fire()
	}
}

// handleDiscovery builds an inventory of what is known now, and hands it on.
func (l *gpuLoop) handleDiscovery(ctx context.Context, found discovery) {
	if errors.Is(found.err, ErrStop) {
		l.stop(found.err)
		return
	}
	if ctx.Err() != nil {
		return
	}
	l.updateDesired(ctx)
	var inventory *device.Inventory
	if found.err == nil {
		known, _ := l.state.merge(found.node)
		inventory, found.err = l.desired.build(ctx, known)
	}
	if found.err != nil {
		l.handleFailedDiscovery(ctx, found.err)
		return
	}
	l.state.applyDiscovery(found.node, inventory)
	l.discoveryProblem.Log(ctx, nil, "", "")
	l.report.offered(ctx, inventory, l.desired.policy, l.state.known)
	l.report.unlisted(ctx, found.node.Unlisted, l.state.known)
	l.report.discovered(ctx, found.node, inventory)
	status := l.status(ctx)
	now := l.inventoryWith(status)
	l.claims.SetInventory(now)
	l.metrics.SetGPUs(now, status)
	l.readiness.set(ctx, needHardware, "")
	l.remember(ctx)
}

func (l *gpuLoop) handleFailedDiscovery(ctx context.Context, err error) {
	l.state.discoveryFailed(err)
	if l.state.driverGone != nil {
		l.readiness.set(ctx, needHardware, err.Error())
		return
	}
	l.discoveryProblem.Log(ctx, err, "The GPUs could not be discovered again, will retry", "")
}

// updateDesired brings up to date what is to be published.
func (l *gpuLoop) updateDesired(ctx context.Context) {
	l.desired.readPolicy(ctx)
	var present *device.Inventory
	if l.state.inventory != nil {
		present = l.inventoryWith(l.status(ctx))
	}
	l.desired.updateNeeded(ctx, present)
}

// updateInventory builds the inventory again: the policy may be another one, or claims
// may have other devices.
func (l *gpuLoop) updateInventory(ctx context.Context) {
	l.updateDesired(ctx)
	if l.state.inventory == nil {
		return
	}
	unneeded := l.state.unneeded(l.desired.mayBeInUse)
	rest := l.state.known.Without(unneeded...)
	inventory, err := l.desired.build(ctx, rest)
	l.buildProblem.Log(ctx, err, "The published devices stay as they are", "The published devices are up to date again")
	if err != nil {
		return
	}
	l.state.forget(unneeded, rest, inventory)
	l.report.offered(ctx, inventory, l.desired.policy, l.state.known)
	if len(unneeded) > 0 {
		klog.FromContext(ctx).Info("Forgot GPUs that are not there: no claim has devices of them any more", "pciAddresses", unneeded)
		l.remember(ctx)
	}
}

// survey asks for the conditions of the GPUs, and hands them on if they have
// changed. When that fails they stay as they were.
func (l *gpuLoop) survey(ctx context.Context) {
	if l.state.inventory == nil || ctx.Err() != nil {
		return
	}
	found, err := l.surveyClaims(ctx)
	if ctx.Err() != nil {
		return
	}
	l.surveyProblem.Log(ctx, err, "The GPUs could not be surveyed, their conditions stay as they were", "The GPUs can be surveyed again")
	switch {
	case err == nil && l.awaitsLook(ctx):
		// Claims can have partitions that others made all the same.
		l.state.applySurvey(found)
		l.claims.SetInventory(l.inventoryWith(l.status(ctx)))
		return
	case err == nil:
		l.sayOfClaims(ctx)
		l.state.applySurvey(found)
		l.surveyedAt = time.Now()
	case l.surveyedAt.IsZero():
		// Nothing is known of what must not be allocated.
		l.readiness.set(ctx, needSlices, fmt.Sprintf("the GPUs could not be surveyed: %v", err))
		return
	}
	l.handOn(ctx)
}

const (
	// lookPatience is for how long GPUs that are slow, and an MPS supervisor that does not answer, may keep what is stored of all
	// GPUs from being replaced at the start: it may say more than is known yet.
	lookPatience = 30 * time.Second
	lookPause    = time.Second
)

// awaitsLook reports whether the first publication has to wait for a look at some GPU, and sees to it that there is another soon.
func (l *gpuLoop) awaitsLook(ctx context.Context) bool {
	unlooked := l.claims.Unlooked()
	if !l.surveyedAt.IsZero() || len(unlooked) == 0 || l.state.driverGone != nil {
		return false
	}
	if l.awaitedSince.IsZero() {
		l.awaitedSince = time.Now()
	}
	if time.Since(l.awaitedSince) >= lookPatience {
		return false
	}
	l.readiness.set(ctx, needSlices, fmt.Sprintf("not all GPUs have been looked at yet: %v", unlooked))
	time.AfterFunc(lookPause, l.surveyNow.Fire)
	return true
}

// sayOfClaims says what the survey has found of claims.
func (l *gpuLoop) sayOfClaims(ctx context.Context) {
	var statements []events.Statement
	for _, s := range l.claims.Statements() {
		key := s
		key.Text = "" // names processes, which come and go
		one := events.Statement{Key: key, Event: events.Event{Claim: s.Claim, Reason: s.Reason, Text: s.Text}}
		if s.Device != "" {
			one.Subjects = []string{s.Device}
		}
		statements = append(statements, one)
	}
	l.board.Say(ctx, "claims", statements, nil)
}

// status is what is known now.
func (l *gpuLoop) status(ctx context.Context) device.Status {
	reaction := &noPolicy.Health
	if l.desired.policy != nil {
		reaction = &l.desired.policy.Health
	}
	l.health.Follow(l.state.uuids(), *reaction)
	return l.state.status(slices.Concat(l.health.Conditions(), l.foreign.conditions(l.state.known), l.ownNode.conditions(ctx, l.state.known, l.state.discovered)), reaction)
}

// inventoryWith is the inventory with a status: at nearly all times the one before, of which the slices need not be made anew.
func (l *gpuLoop) inventoryWith(status device.Status) *device.Inventory {
	if l.base != l.state.inventory || !reflect.DeepEqual(l.with, status) {
		l.base, l.with, l.now = l.state.inventory, status, l.state.inventory.With(status)
	}
	return l.now
}

// handOn tells claims, the publisher and people what is known now.
func (l *gpuLoop) handOn(ctx context.Context) {
	if l.surveyedAt.IsZero() || ctx.Err() != nil {
		return
	}
	status := l.status(ctx)
	l.conditions.say(ctx, status)
	l.troubles.set(status.Conditions)
	now := l.inventoryWith(status)
	l.tell(status, l.surveyedAt)
	l.metrics.SetGPUs(now, status)
	l.claims.SetInventory(now)
	if l.desired.complete {
		l.publish(now)
	}
}

func (l *gpuLoop) surveyClaims(ctx context.Context) (status device.Status, err error) {
	defer l.surveyPanics.Recover(ctx, &err)
	return l.claims.Survey(ctx), nil
}
