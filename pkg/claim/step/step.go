// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

// Step is one effect with its identity.
type Step struct {
	// Name is unique in the claim, "partition gpu-0000-1b-00-0-mig-1g10gb-4".
	Name string
	// Keys are the devices of the record that it is about.
	Keys []string
	Effect
}

// Effect is something outside of the journal that a claim has. All methods are called
// under the locks of the group's GPUs. Apply and Undo are idempotent.
type Effect interface {
	// Check finds out whether Apply may be called. It does not change anything.
	Check(s *Scene) error
	// Apply makes the effect and notes in the record what came of it. An error that
	// is marked with notBegun left nothing to undo.
	Apply(ctx context.Context, s *Scene) error
	// Undo takes the effect back.
	Undo(ctx context.Context, s *Scene) error
	// Forget removes the effect from the record. It does not fail and does not need
	// to be called again.
	Forget(r *journal.Record)
}

// Attempt says what of a claim may be there before its steps are applied.
type Attempt int

const (
	// First means that nothing of the claim is there.
	First Attempt = iota
	// Resumed means that an earlier attempt may have made any of it.
	Resumed
	// Repeated means that all of it was there and should still be.
	Repeated
)

// Scene is what the steps of one group work with.
type Scene struct {
	// Record is the group's part of the claim's record.
	Record *journal.Record
	// Others are the other claims. What they say of the group's GPUs stays true, except
	// that they may begin to be released.
	Others *journal.Snapshot
	// Instances are those on the group's GPUs when the locks were taken, by PCI
	// address. A GPU without MIG is not in it.
	Instances map[string][]gpu.Instance
	Attempt   Attempt
	// Supervisor is why no MPS session can be started, or nil.
	Supervisor error
	// gone are the partitions of the record that do not exist any more, by their key, with
	// what may be in their place.
	gone map[string]partition.Expect
	// MaxShares is how many claims can have a share of a device, by its name. A device
	// that is not in it has as many as claims got.
	MaxShares map[string]int
}
