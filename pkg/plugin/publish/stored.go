// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/plugin/publish/rules"
)

// listed is what the API server held at a time.
type listed struct {
	list *resourceapi.ResourceSliceList
	at   time.Time
}

// goodFor is for how long an answer from before the publisher began is good enough to begin with.
// It does no harm if it is wrong: what is written names the versions that it replaces, and the
// watch begins with what is there.
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

func (p *Publisher) list(ctx context.Context) (*resourceapi.ResourceSliceList, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	list, err := p.slices.List(ctx, metav1.ListOptions{FieldSelector: p.pool.selector()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	return list, nil
}

// read asks the API server what it holds.
func (p *Publisher) read(ctx context.Context) error {
	began := time.Now()
	var list *resourceapi.ResourceSliceList
	if l := p.listed.Swap(nil); l != nil && time.Since(l.at) < goodFor {
		list, began = l.list, l.at
	} else if found, err := p.list(ctx); err != nil {
		return err
	} else {
		list = found
	}
	owner, err := p.readOwner(ctx)
	if err != nil {
		return err
	}
	stored := rules.Stored{Known: true, Owner: owner}
	for i := range list.Items {
		stored.Slices = append(stored.Slices, &list.Items[i])
	}
	p.stored = stored
	p.versions.read(began, list.ResourceVersion)
	clear(p.touched)
	p.memory.Listed(p.pace, p.now())
	return nil
}

// readOwner returns the UID of the node, for which it waits.
func (p *Publisher) readOwner(ctx context.Context) (types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	select {
	case <-p.nodeRead:
	case <-ctx.Done():
		return "", fmt.Errorf("node %s has not been read yet: %w", p.pool.nodeName, ctx.Err())
	}
	owner := *p.owner.Load()
	if owner == "" {
		return "", fmt.Errorf("node %s is not in the cluster", p.pool.nodeName)
	}
	return owner, nil
}
