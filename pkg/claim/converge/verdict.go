// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"errors"

	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/sharing"
)

var (
	// ErrTaken means that other claims have the place, or all shares.
	ErrTaken = errors.New("other claims have it")
	// ErrGuarded means that a claim whose record cannot be read may have the place.
	ErrGuarded = errors.New("a record cannot be read")
)

// causes are what verdicts mean for errors.Is.
var causes = map[rules.Code]error{
	rules.Overlap: ErrTaken, rules.SharesTaken: ErrTaken, rules.Divided: partition.ErrDivided, rules.Foreign: partition.ErrForeign,
	rules.InUse: gpu.ErrInUse, rules.NoSupervisor: sharing.ErrNoSupervisor, rules.Guarded: ErrGuarded,
	rules.NotRegistered: gpu.ErrFabricPending,
}

// VerdictError is why a claim cannot be prepared or released now. It wraps what the verdict is about: ErrTaken, ErrGuarded,
// partition.ErrDivided, partition.ErrForeign, gpu.ErrInUse, sharing.ErrNoSupervisor, gpu.ErrFabricPending, or why the GPU has not answered.
type VerdictError struct {
	rules.Verdict
	// cause is why the GPU has not answered, or nil.
	cause error
	// waited means that the place was waited for.
	waited bool
}

func (e *VerdictError) Error() string {
	if e.waited && (e.Code == rules.Overlap || e.Code == rules.SharesTaken) {
		return e.Why + ", and was not released in time"
	}
	return e.Why
}

func (e *VerdictError) Unwrap() []error {
	var all []error
	for _, err := range []error{causes[e.Code], e.cause} {
		if err != nil {
			all = append(all, err)
		}
	}
	return all
}
