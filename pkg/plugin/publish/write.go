// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

// errNotMine says that a newer instance publishes.
var errNotMine = errors.New("a newer instance of the plugin on this node publishes")

// sync makes the API server hold what is wanted. It succeeds only if that is what the
// API server has answered, and reports whether it had to write anything.
func (p *Publisher) sync(ctx context.Context) (wrote bool, err error) {
	if err := p.checkPrecedence(ctx); err != nil {
		return false, err
	}
	if err := p.read(ctx); err != nil {
		return false, err
	}
	// Before anything is published that would be misunderstood.
	if err := p.features.begin(ctx, p.known.all()); err != nil {
		return false, err
	}
	plan := p.pool.plan(p.known.all(), p.wanted(ctx), p.known.owner)
	if plan.empty() {
		return false, nil
	}
	if p.repairs.repairing {
		klog.FromContext(ctx).Info("Publishing the ResourceSlices again: somebody else has changed them",
			"write", len(plan.write), "delete", len(plan.before)+len(plan.after))
		p.published.Set("")
	}
	defer func() {
		if err != nil && outdated(err) {
			p.known = nil
		}
	}()
	for _, slice := range plan.before {
		if err := p.remove(ctx, slice); err != nil {
			return true, err
		}
	}
	for _, slice := range plan.write {
		if err := p.write(ctx, slice); err != nil {
			return true, err
		}
	}
	for _, slice := range plan.after {
		if err := p.remove(ctx, slice); err != nil {
			return true, err
		}
	}
	return true, nil
}

// outdated reports whether an error says that something else is stored than is
// known. What became of a request without an answer shows the same way when it is
// repeated.
func outdated(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err)
}

func (p *Publisher) remove(ctx context.Context, slice *resourceapi.ResourceSlice) error {
	if err := p.checkPrecedence(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// Before the answer, so that the watch cannot be first.
	p.known.removed[slice.UID] = true
	err := p.slices.Delete(ctx, slice.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &slice.UID, ResourceVersion: &slice.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete ResourceSlice %s: %w", slice.Name, err)
	}
	delete(p.known.slices, slice.UID)
	return nil
}

// write creates or updates a slice, and checks what was stored.
func (p *Publisher) write(ctx context.Context, slice *resourceapi.ResourceSlice) error {
	if err := p.checkPrecedence(ctx); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	create := slice.UID == ""
	var result *resourceapi.ResourceSlice
	var err error
	switch {
	case create && p.features.inDoubt():
		// The last server dropped fields, another one may not.
		result, err = p.features.prober.create(limited, slice, metav1.CreateOptions{})
	case create:
		result, err = p.slices.Create(limited, slice, metav1.CreateOptions{})
	default:
		result, err = p.slices.Update(limited, slice, metav1.UpdateOptions{})
	}
	if err != nil {
		verb := "update"
		if create {
			verb = "create"
		}
		return fmt.Errorf("%s ResourceSlice %s: %w", verb, slice.Name, err)
	}
	p.known.slices[result.UID] = result
	if same(result, slice) {
		if create {
			p.features.stores(slice)
		}
		return nil
	}
	return p.handleDropped(ctx, slice, result)
}

// handleDropped evaluates what the API server left out of a slice.
func (p *Publisher) handleDropped(ctx context.Context, sent, got *resourceapi.ResourceSlice) error {
	dropped := &resourceslice.DroppedFieldsError{PoolName: p.pool.nodeName, DesiredSlice: sent, ActualSlice: got}
	gates := dropped.DisabledFeatures()
	if slices.Equal(gates, []string{gateTaints}) {
		p.features.lacksTaints(ctx)
		return nil
	}
	answer := p.features.now
	answer.PartitionableDevices = answer.PartitionableDevices && !slices.Contains(gates, gatePartitionable)
	// As the prober says it: without counters there is nothing to be gained by shares.
	answer.ConsumableCapacity = answer.ConsumableCapacity && answer.PartitionableDevices && !slices.Contains(gates, gateConsumable)
	if answer == p.features.now {
		return fmt.Errorf("the API server stored ResourceSlice %s with other content than was sent; "+
			"is it changed by an admission webhook or policy?", got.Name)
	}
	// Without what they need, devices could be allocated that exclude each other. A
	// pool that lacks a slice is not used.
	if err := p.remove(ctx, got); err != nil {
		return fmt.Errorf("the API server dropped fields, and could not take the slice back: %w", err)
	}
	err := fmt.Errorf("the API server stored ResourceSlice %s without the fields of the feature gates %s, although it has stored such fields before; "+
		"in a control plane of several versions another server may store them", got.Name, strings.Join(gates, ", "))
	if p.features.settle(ctx, answer) {
		klog.FromContext(ctx).Info("Publishing without the fields that the API server drops", "featureGates", gates)
		p.changed.Fire()
	}
	return err
}

// checkPrecedence fails if another instance publishes.
func (p *Publisher) checkPrecedence(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	mine, err := p.precedence.Mine()
	// Without locks there is nothing better than to publish.
	p.precedenceProblem.Log(ctx, err, "It is not known whether a newer instance of the plugin runs, publishing as if there were none", "")
	if err == nil && !mine {
		return errNotMine
	}
	return nil
}
