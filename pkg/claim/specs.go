// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/gpu"
)

// checkedSpecs are the claims whose CDI spec this process has written or compared with
// the hardware. The spec stays right until the partition goes, and creating another
// partition then removes it.
type checkedSpecs struct {
	mu   sync.Mutex
	uids map[types.UID]bool
}

func (c *checkedSpecs) has(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.uids[uid]
}

func (c *checkedSpecs) add(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.uids == nil {
		c.uids = map[types.UID]bool{}
	}
	c.uids[uid] = true
}

func (c *checkedSpecs) forget(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.uids, uid)
}

// retain forgets all other claims.
func (c *checkedSpecs) retain(uids []types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	keepOnly(c.uids, uids)
}

// maintainSpec writes the CDI spec of a prepared claim if it is missing or out of date.
// It is written under the locks of the GPUs, and only while the partitions exist.
func (c *reconciler) maintainSpec(ctx context.Context, r *journal.Record) error {
	matches, err := c.kit.SpecMatches(ctx, r)
	if matches && err == nil && c.specs.has(r.Claim.UID) {
		return nil
	}
	unlock, lockErr := c.lockSoon(ctx, partitionGPUs(r))
	if lockErr != nil {
		return errors.Join(err, lockErr)
	}
	defer unlock()
	instances, lookErr := c.instances(ctx, r)
	if lookErr != nil {
		return errors.Join(err, lookErr)
	}
	if d := missing(r, instances); d != nil {
		return c.partitionGone(ctx, r, d)
	}
	if err != nil {
		return err
	}
	s := &step.Scene{Record: r.Clone(), Attempt: step.Resumed}
	if _, err := step.Apply(ctx, c.kit.ClaimSteps(r), s); err != nil {
		return err
	}
	c.specs.add(r.Claim.UID)
	return nil
}

// checkPartitions fails if a partition of a record does not exist any more.
func (e *engine) checkPartitions(ctx context.Context, r *journal.Record) error {
	instances, err := e.instances(ctx, r)
	if err != nil {
		return err
	}
	if d := missing(r, instances); d != nil {
		return fmt.Errorf("device %s: its partition was removed meanwhile", d.Device)
	}
	return nil
}

// missing finds a device whose partition does not exist.
func missing(r *journal.Record, instances map[string][]gpu.Instance) *journal.Device {
	for i := range r.Devices {
		if d := &r.Devices[i]; d.Partition != nil && !d.IsIn(instances[d.PCIAddress]) {
			return d
		}
	}
	return nil
}

func partitionGPUs(r *journal.Record) []string {
	var gpus []string
	for i := range r.Devices {
		if d := &r.Devices[i]; d.Partition != nil {
			gpus = append(gpus, d.PCIAddress)
		}
	}
	return gpu.SortPCIAddresses(gpus)
}

// specStands reports whether a claim that was prepared before has the CDI spec that it
// needs.
func (p *preparation) specStands(ctx context.Context, r *journal.Record) bool {
	if p.earlier == nil {
		return false
	}
	matches, err := p.kit.SpecMatches(ctx, r)
	return err == nil && matches
}
