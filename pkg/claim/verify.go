// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/step"
)

// verify looks up that everything of a claim that was prepared before is there, and makes
// what is gone again. A failure undoes nothing, because containers may be running.
func (p *preparation) verify(ctx context.Context, groups []step.Group, i int, s *step.Scene) error {
	part := s.Record
	reported, err := p.reportLosses(ctx, part, sessionView{})
	if err != nil {
		return err
	}
	was := part.Clone()
	lost := missing(part, s.Instances) != nil
	gone := step.MarkGone(s)
	if lost || gone {
		// The ids in it may be those of another claim's partition, now or soon.
		if err := p.kit.CDI.Remove(part.Claim.UID); err != nil {
			return err
		}
	}
	steps := p.steps(groups, part)
	if err := step.Check(steps, s); err != nil {
		return err
	}
	if gone || reported {
		if err := p.journal.save(i, part); err != nil {
			p.journal.set(i, was) // another attempt has to write it down, too
			return err
		}
	}
	if err := p.dropStaleSpecs(ctx, s); err != nil {
		return err
	}
	if _, err := step.Apply(ctx, steps, s); err != nil {
		if gone {
			err = errors.Join(err, p.notRemade(ctx, i, part))
		}
		return err
	}
	if gone {
		// Whatever comes of the rest of the claim.
		if err := p.journal.save(i, part); err != nil {
			return err
		}
	}
	return p.done(ctx, groups, i, part)
}

// notRemade writes down what has become of partitions that should have been made again.
// Nothing is assumed where the hardware does not answer.
func (p *preparation) notRemade(ctx context.Context, i int, part *journal.Record) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if instances, err := p.instances(ctx, part); err == nil {
		step.UnmarkGone(part, instances)
	}
	return p.journal.save(i, part)
}

// dropStaleSpecs removes the CDI specs of other claims whose partition is gone, before
// the ids in them can come to mean another one.
func (e *engine) dropStaleSpecs(ctx context.Context, s *step.Scene) error {
	for address, instances := range s.Instances {
		for _, lost := range step.Lost(s.Others, address, instances) {
			klog.FromContext(ctx).Info("Removing the CDI spec of a claim whose partition is gone", "other", lost.Record.Claim, "device", lost.Device.Device)
			if err := e.kit.CDI.Remove(lost.Record.Claim.UID); err != nil {
				return fmt.Errorf("remove the CDI spec of claim %s, whose partition is gone: %w", lost.Record.Claim, err)
			}
		}
	}
	return nil
}

// confirm finds the partitions of all groups, each under its locks.
func (p *preparation) confirm(ctx context.Context, groups []step.Group) error {
	return errors.Join(concurrently(ctx, len(groups), func(i int) error {
		unlock, err := p.locks.GPUs(ctx, groups[i].GPUs)
		if err != nil {
			return err
		}
		defer unlock()
		return p.checkPartitions(ctx, p.journal.part(i))
	})...)
}
