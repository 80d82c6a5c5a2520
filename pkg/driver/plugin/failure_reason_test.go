// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestFailureReason: the cause counts, not what followed, also where the kubelet gets a
// shorter text, and the set is bounded.
func TestFailureReason(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"":                 nil,
		"refused":          &claim.RefusedError{Err: errors.New("no such device")},
		"overlap":          rules.ErrTaken,
		"gpu_unresponsive": errors.Join(context.DeadlineExceeded, &gpu.PendingError{Call: "nvmlDeviceGetUUID"}),
		"gpu_lost":         errors.Join(&gpu.PendingError{}, &gpu.Error{Err: gpu.ErrLost}),
		"mps_unavailable":  fmt.Errorf("start MPS: %w", sharing.ErrNoSupervisor),
		"busy":             fmt.Errorf("GPU %w: %w", lock.ErrBusy, context.DeadlineExceeded),
		"no_disk_space":    fmt.Errorf("journal: %w", unix.ENOSPC),
		"other":            errors.New("something else"),
	} {
		if got := failureReason(err); got != want {
			t.Errorf("%v is %q, want %q", err, got, want)
		}
		if want != "" && !slices.Contains(FailureReasons(), want) {
			t.Errorf("%q is not among the reasons", want)
		}
	}
}
