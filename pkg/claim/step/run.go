// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/claim/journal"
)

// notBegunError marks a failure that left nothing of its step.
type notBegunError struct{ error }

func (e notBegunError) Unwrap() error { return e.error }

func notBegun(err error) error {
	if err == nil {
		return nil
	}
	return notBegunError{err}
}

// Check checks all steps and stops at the first that must not be applied.
func Check(steps []Step, s *Scene) error {
	for _, step := range steps {
		if err := step.Check(s); err != nil {
			return step.wrap(s.Record, err)
		}
	}
	return nil
}

// Apply applies the steps in order, stops at the first failure, and returns how many
// were begun. The others are still in the record.
func Apply(ctx context.Context, steps []Step, s *Scene) (begun int, err error) {
	for i, step := range steps {
		err := step.Apply(ctx, s)
		if err == nil {
			continue
		}
		begun = i + 1
		var nothing notBegunError
		if errors.As(err, &nothing) {
			begun = i
		}
		return begun, step.wrap(s.Record, err)
	}
	return len(steps), nil
}

// Undo undoes the first steps, which were begun, last to first, and forgets the others.
// A step that fails does not keep the rest, except for what it stands on: steps about
// the same devices. What is left of the record afterwards is what could not be undone.
// The errors are one for each step that failed.
func Undo(ctx context.Context, steps []Step, begun int, s *Scene) []error {
	for _, step := range slices.Backward(steps[begun:]) {
		step.Forget(s.Record)
	}
	var errs []error
	var blocked []string
	for _, step := range slices.Backward(steps[:begun]) {
		if slices.ContainsFunc(step.Keys, func(key string) bool { return slices.Contains(blocked, key) }) {
			continue
		}
		if err := step.Undo(ctx, s); err != nil {
			errs = append(errs, step.wrap(s.Record, err))
			blocked = append(blocked, step.Keys...)
			continue
		}
		step.Forget(s.Record)
	}
	slices.Reverse(errs)
	return errs
}

// wrap names the published device that a step is about, if it is about any.
func (s Step) wrap(r *journal.Record, err error) error {
	var overlap *OverlapError
	if len(s.Keys) == 0 || errors.As(err, &overlap) {
		return err
	}
	device := s.Keys[0]
	if d := r.Device(device); d != nil {
		device = d.Device
	}
	return fmt.Errorf("device %s: %w", device, err)
}
