// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
)

// act carries out a request, and takes the answer for what is stored.
func (p *Publisher) act(ctx context.Context, r *rules.Request) {
	limited, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var err error
	switch r.Verb {
	case rules.List:
		err = p.read(limited)
	case rules.Put:
		err = p.put(limited, r)
	case rules.Delete:
		err = p.remove(limited, r.Slice)
	}
	switch {
	case err == nil:
		if r.Verb != rules.List {
			p.reporting.failure = nil
		}
		p.Observe(len(p.stored.Slices), nil)
		return
	case apierrors.IsConflict(err), apierrors.IsNotFound(err), apierrors.IsAlreadyExists(err):
		// What became of a request without an answer shows the same way when it is repeated.
		p.memory.Reread()
	case apierrors.IsInvalid(err):
		p.features.askSoon() // these may be fields that the cluster cannot store any more
	}
	p.refused(ctx, err)
}

// refused notes a request that has failed.
func (p *Publisher) refused(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	p.Observe(0, err)
	p.reporting.failure = err
	p.memory.Refused(p.now(), rand.Float64()) //nolint:gosec // no secret
}

// list asks the API server which slices it holds.
func (p *Publisher) list(ctx context.Context) (*resourceapi.ResourceSliceList, error) {
	list, err := p.slices.List(ctx, metav1.ListOptions{FieldSelector: p.pool.selector()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	return list, nil
}

// read takes what the API server holds for what is stored.
func (p *Publisher) read(ctx context.Context) error {
	list := p.found.Swap(nil)
	if list == nil {
		var err error
		if list, err = p.list(ctx); err != nil {
			return err
		}
	}
	p.stored = rules.Stored{Known: true}
	for i := range list.Items {
		p.stored.Slices = append(p.stored.Slices, &list.Items[i])
	}
	p.memory.Listed(p.now())
	return nil
}

func (p *Publisher) remove(ctx context.Context, slice *resourceapi.ResourceSlice) error {
	err := p.slices.Delete(ctx, slice.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &slice.UID, ResourceVersion: &slice.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete ResourceSlice %s: %w", slice.Name, err)
	}
	p.forget(slice)
	p.memory.Deleted(slice.Name, p.now())
	return nil
}

// forget removes a slice from what is stored. The slices of which there are pointers elsewhere stay as they are.
func (p *Publisher) forget(slice *resourceapi.ResourceSlice) {
	p.stored.Slices = slices.DeleteFunc(slices.Clone(p.stored.Slices), func(s *resourceapi.ResourceSlice) bool { return s.UID == slice.UID })
}

// put creates or updates a slice, and checks what was stored.
func (p *Publisher) put(ctx context.Context, r *rules.Request) error {
	stored, err := p.features.write(ctx, r.Slice, nil)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Wrote a ResourceSlice", "name", stored.Name, "generation", stored.Spec.Pool.Generation)
	p.forget(r.Slice)
	p.stored.Slices = append(p.stored.Slices, stored)
	if sameSpec(&stored.Spec, &r.Slice.Spec) {
		p.memory.Wrote(r, stored.ResourceVersion, p.now())
		return nil
	}
	// Nothing of that has to be taken back: the pool is not complete.
	p.memory.Changed(r)
	lost := usedBy(r.Slice) &^ usedBy(stored)
	if lost == 0 {
		return fmt.Errorf("the API server stored ResourceSlice %s with other content than was sent; is it changed by an admission webhook or policy?", stored.Name)
	}
	p.features.askSoon()
	return fmt.Errorf("the API server stored ResourceSlice %s without what needs %s, although it has stored such fields before; "+
		"in a control plane of several versions another server may store them", stored.Name, lost)
}

// sameSpec compares everything that is published.
func sameSpec(stored, sent *resourceapi.ResourceSliceSpec) bool {
	a, b := *stored, *sent
	a.Devices, b.Devices = nil, nil
	return resourceslice.DevicesDeepEqual(stored.Devices, sent.Devices) && apiequality.Semantic.DeepEqual(a, b)
}
