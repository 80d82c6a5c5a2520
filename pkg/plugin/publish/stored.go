// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
)

// stored is what the API server is known to hold. It is brought up to date by what
// the API server answers to writes.
type stored struct {
	slices map[types.UID]*resourceapi.ResourceSlice
	// removed are slices that were deleted here, until the watch says so.
	removed map[types.UID]bool
	// owner is the UID of the node.
	owner types.UID
}

func (s *stored) all() []*resourceapi.ResourceSlice {
	all := make([]*resourceapi.ResourceSlice, 0, len(s.slices))
	for _, slice := range s.slices {
		all = append(all, slice)
	}
	return all
}

// listed is what the API server held at a time.
type listed struct {
	list *resourceapi.ResourceSliceList
	at   time.Time
}

// goodFor is for how long an answer from before the publisher began is good enough to begin with.
// It does no harm if it is wrong: what is written names the versions that it replaces, and the
// watch that begins with the publisher shows what is newer or gone.
const goodFor = time.Minute

// Stored returns all slices of this driver on this node that the API server holds,
// of all generations and whichever instance published them. They must not be modified.
func (p *Publisher) Stored(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := p.list(ctx)
	if err != nil {
		return nil, err
	}
	p.listed.Store(&listed{list, time.Now()})
	return list.Items, nil
}

// listFirst returns what Stored has found, once and if that is not long ago, or lists.
func (p *Publisher) listFirst(ctx context.Context) (list *resourceapi.ResourceSliceList, earlier bool, err error) {
	if l := p.listed.Swap(nil); l != nil && time.Since(l.at) < goodFor {
		return l.list, true, nil
	}
	list, err = p.list(ctx)
	return list, false, err
}

func (p *Publisher) list(ctx context.Context) (*resourceapi.ResourceSliceList, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	list, err := p.slices.List(ctx, metav1.ListOptions{FieldSelector: p.pool.selector()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	return list, nil
}

// selector selects the slices of this driver on this node.
func (p pool) selector() string {
	return fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   p.driverName,
		resourceapi.ResourceSliceSelectorNodeName: p.nodeName,
	}.String()
}

// read asks the API server what it holds, unless that is known.
func (p *Publisher) read(ctx context.Context) error {
	if p.known != nil {
		return nil
	}
	list, earlier, err := p.listFirst(ctx)
	if err != nil {
		return err
	}
	owner, err := p.readOwner(ctx)
	if err != nil {
		return err
	}
	known := &stored{slices: map[types.UID]*resourceapi.ResourceSlice{}, removed: map[types.UID]bool{}, owner: owner}
	for i := range list.Items {
		known.slices[list.Items[i].UID] = &list.Items[i]
	}
	p.known = known
	p.watcher.forget(known.slices, list.ResourceVersion)
	if earlier {
		p.watcher.expect(known.slices)
	}
	return nil
}

// readOwner returns the UID of the node. A node that is deleted and made again has
// another one, and the garbage collector deletes what the old one owned.
func (p *Publisher) readOwner(ctx context.Context) (types.UID, error) {
	if first := p.firstOwner; first != nil {
		p.firstOwner = nil
		if owner := first(ctx); owner != "" {
			return owner, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	node, err := p.metadata.Resource(nodeResource).Get(ctx, p.pool.nodeName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return "", fmt.Errorf("node %s is not in the cluster any more: %w", p.pool.nodeName, err)
	case err != nil:
		return "", fmt.Errorf("read node %s: %w", p.pool.nodeName, err)
	}
	return node.UID, nil
}
