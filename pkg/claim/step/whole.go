// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"

	"github.com/partage-dev/partage/pkg/claim/journal"
)

// whole is an undivided GPU, or a share of one. MIG mode is turned off for it; the next
// partition turns it on again, so that there is nothing to undo.
type whole struct {
	*Kit
	key string
}

func (w whole) Check(s *Scene) error { return checkPlace(s, s.Record.Device(w.key)) }

func (w whole) Apply(ctx context.Context, s *Scene) error {
	d := s.Record.Device(w.key)
	if d.Admin || !d.Divisible && !d.DynamicMIG {
		return nil
	}
	if err := w.Partitions.EnsureWhole(ctx, d.PCIAddress, d.DynamicMIG); err != nil || s.Attempt == Repeated {
		return err // containers run already, whatever becomes of the fabric
	}
	return w.Partitions.FabricJoined(ctx, d.PCIAddress)
}

func (whole) Undo(context.Context, *Scene) error { return nil }

func (w whole) Forget(r *journal.Record) { r.Remove(w.key) }
