// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
)

// failureReasons are the reasons that metrics tell apart. Of several that an error has, the
// first counts: what somebody can do something about comes before what follows from it.
var failureReasons = []struct {
	name string
	is   func(error) bool
}{
	{"foreign_claim", as[foreignError]},
	{"invalid_config", as[*api.InvalidError]},
	{"refused", as[*claim.RefusedError]},
	{"out_of_date", is(record.ErrOutOfDate)},
	{"driver_not_loaded", is(gpu.ErrDriverNotLoaded)},
	{"driver_version", is(gpu.ErrVersionMismatch)},
	{"gpu_lost", is(gpu.ErrLost)},
	{"gpu_reset_required", is(gpu.ErrResetRequired)},
	{"gpu_unresponsive", is(gpu.ErrHung)},
	{"mps_unavailable", is(sharing.ErrNoSupervisor)},
	{"foreign_partition", func(err error) bool {
		return errors.Is(err, partition.ErrForeign) || errors.Is(err, partition.ErrDivided)
	}},
	{"overlap", is(rules.ErrTaken)},
	{"gpu_in_use", is(gpu.ErrInUse)},
	{"no_room", is(gpu.ErrNoRoom)},
	{"no_permission", is(gpu.ErrNoPermission)},
	{"not_found", is(gpu.ErrNotFound)},
	{"record_unreadable", is(rules.ErrGuarded)},
	{"no_disk_space", func(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }},
	{"busy", is(lock.ErrBusy)},
	{"timeout", func(err error) bool {
		return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, gpu.ErrTimeout)
	}},
	{"canceled", is(context.Canceled)},
	{"other", func(error) bool { return true }},
}

func as[T error](err error) bool {
	var target T
	return errors.As(err, &target)
}

func is(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

// FailureReasons are all reasons, for metrics.
func FailureReasons() []string {
	var names []string
	for _, reason := range failureReasons {
		names = append(names, reason.name)
	}
	return names
}

// failureReason returns "" without an error.
func failureReason(err error) string {
	for _, reason := range failureReasons {
		if err != nil && reason.is(err) {
			return reason.name
		}
	}
	return ""
}
