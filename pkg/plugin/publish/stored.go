// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"
)

// Stored returns all slices of this driver on this node that the API server holds,
// of all generations and whichever instance published them.
func (p *Publisher) Stored(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := p.client.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: p.ownSlices()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	return list.Items, nil
}

// ownSlices selects the slices of this driver on this node.
func (p *Publisher) ownSlices() string {
	return fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   p.driverName,
		resourceapi.ResourceSliceSelectorNodeName: p.nodeName,
	}.String()
}

// confirm succeeds when the API server holds what was published, since publishing
// itself reports nothing.
func (p *Publisher) confirm(ctx context.Context, devices int) error {
	stored, err := p.storedPool(ctx)
	if err != nil {
		return err
	}
	if err := checkComplete(stored); err != nil {
		return err
	}
	if have := countStored(stored); have != devices {
		return fmt.Errorf("they hold %d devices instead of %d", have, devices)
	}
	if p.logged.Set(fmt.Sprint(len(stored), devices)) {
		klog.FromContext(ctx).Info("Published", "resourceSlices", len(stored), "devices", devices)
	}
	p.report(ctx, "")
	return nil
}

// checkStored returns why the slices must be published again, or nil. A pool that
// is complete with another content is another instance's: while two overlap, each
// may have its own idea, and reacting to the other's would never end.
func (p *Publisher) checkStored(ctx context.Context) error {
	stored, err := p.storedPool(ctx)
	if err != nil {
		return fmt.Errorf("could not check them: %w", err)
	}
	if err := checkComplete(stored); err != nil {
		return fmt.Errorf("some were deleted: %w", err)
	}
	return nil
}

// storedPool returns the newest generation of this node's pool.
func (p *Publisher) storedPool(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	all, err := p.Stored(ctx)
	if err != nil {
		return nil, err
	}
	newest := int64(-1)
	var stored []resourceapi.ResourceSlice
	for _, slice := range all {
		switch pool := slice.Spec.Pool; {
		case pool.Name != p.nodeName || pool.Generation < newest:
		case pool.Generation > newest:
			newest, stored = pool.Generation, []resourceapi.ResourceSlice{slice}
		default:
			stored = append(stored, slice)
		}
	}
	return stored, nil
}

// checkComplete fails unless all slices of a pool are there.
func checkComplete(stored []resourceapi.ResourceSlice) error {
	if len(stored) == 0 {
		return errors.New("there are none")
	}
	if want := stored[0].Spec.Pool.ResourceSliceCount; int64(len(stored)) != want {
		return fmt.Errorf("there are %d of %d", len(stored), want)
	}
	return nil
}

func countStored(stored []resourceapi.ResourceSlice) (devices int) {
	for _, slice := range stored {
		devices += len(slice.Spec.Devices)
	}
	return devices
}
