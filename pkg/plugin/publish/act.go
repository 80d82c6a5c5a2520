// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/plugin/publish/rules"
)

// act carries out a request, and takes the answer for what is stored.
func (p *Publisher) act(ctx context.Context, w *rules.Write) {
	limited, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var err error
	switch w.What {
	case rules.List:
		err = p.read(ctx)
	case rules.Put:
		err = p.put(limited, w)
	case rules.Delete:
		err = p.remove(limited, w.Slice)
	}
	switch {
	case err == nil:
		if w.What != rules.List {
			p.says.failure = nil
		}
		p.observe(len(p.stored.Slices), nil)
	case apierrors.IsConflict(err), apierrors.IsNotFound(err) && w.What != rules.List, apierrors.IsAlreadyExists(err):
		// What became of a request without an answer shows the same way when it is repeated.
		p.says.failure = err
		p.memory.Outdated(p.pace, p.now())
	default:
		p.refused(ctx, err)
		if refusesFields(err) {
			// They may be some that the cluster cannot store any more.
			p.features.odd = true
			p.features.hurry()
		}
	}
}

func (p *Publisher) remove(ctx context.Context, slice *resourceapi.ResourceSlice) error {
	err := p.slices.Delete(ctx, slice.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &slice.UID, ResourceVersion: &slice.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete ResourceSlice %s: %w", slice.Name, err)
	}
	p.take(slice, nil)
	p.memory.Deleted(slice.Name, p.now())
	return nil
}

// put creates or updates a slice, and checks what was stored.
func (p *Publisher) put(ctx context.Context, w *rules.Write) error {
	var stored *resourceapi.ResourceSlice
	var err error
	verb := "create"
	if w.Slice.UID != "" {
		verb = "update"
	}
	switch {
	case p.features.inDoubt():
		// The last server dropped fields, another one may not.
		stored, err = p.features.prober.write(ctx, verb, w.Slice, nil)
	case verb == "create":
		stored, err = p.slices.Create(ctx, w.Slice, metav1.CreateOptions{})
	default:
		stored, err = p.slices.Update(ctx, w.Slice, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("%s ResourceSlice %s: %w", verb, w.Slice.Name, err)
	}
	klog.FromContext(ctx).V(2).Info("Wrote a ResourceSlice", "verb", verb, "name", stored.Name, "generation", stored.Spec.Pool.Generation)
	p.take(w.Slice, stored)
	if sameSpec(&stored.Spec, &w.Slice.Spec) {
		p.memory.Wrote(w, stored.ResourceVersion, p.now())
		if verb == "create" {
			p.features.stores(w.Slice)
		}
		return nil
	}
	p.memory.Changed(p.pace, w, p.now())
	return p.dropped(ctx, w.Slice, stored)
}

// take takes what was answered for what is stored; nil is nothing.
func (p *Publisher) take(sent, stored *resourceapi.ResourceSlice) {
	p.stored.Slices = slices.DeleteFunc(slices.Clone(p.stored.Slices), func(s *resourceapi.ResourceSlice) bool { return s.UID == sent.UID })
	if stored != nil {
		p.stored.Slices, sent = append(p.stored.Slices, stored), stored
	}
	p.touched[sent.UID] = time.Now()
}

// sameSpec compares everything that is published.
func sameSpec(stored, sent *resourceapi.ResourceSliceSpec) bool {
	a, b := *stored, *sent
	a.Devices, b.Devices = nil, nil
	return resourceslice.DevicesDeepEqual(stored.Devices, sent.Devices) && apiequality.Semantic.DeepEqual(a, b)
}

// dropped says what the API server has left out of a slice. Nothing of that has to be taken back: the pool is not complete.
func (p *Publisher) dropped(ctx context.Context, sent, got *resourceapi.ResourceSlice) error {
	fields := &resourceslice.DroppedFieldsError{PoolName: p.pool.nodeName, DesiredSlice: sent, ActualSlice: got}
	gates := fields.DisabledFeatures()
	answer := p.features.now
	answer.PartitionableDevices = answer.PartitionableDevices && !slices.Contains(gates, gatePartitionable)
	// As the prober says it: without counters there is nothing to be gained by shares.
	answer.ConsumableCapacity = answer.ConsumableCapacity && answer.PartitionableDevices && !slices.Contains(gates, gateConsumable)
	answer.Taints = answer.Taints && !slices.Contains(gates, gateTaints)
	if answer == p.features.now {
		return fmt.Errorf("the API server stored ResourceSlice %s with other content than was sent; is it changed by an admission webhook or policy?", got.Name)
	}
	if p.features.settle(ctx, answer) {
		klog.FromContext(ctx).Info("Publishing without the fields that the API server drops", "featureGates", gates)
	}
	return fmt.Errorf("the API server stored ResourceSlice %s without the fields of the feature gates %s, although it has stored such fields before; "+
		"in a control plane of several versions another server may store them", got.Name, strings.Join(gates, ", "))
}
