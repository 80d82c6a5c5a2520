// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
)

// TestNoGPUs: on a node without GPUs the plugin is ready, so that nobody waits for it.
func TestNoGPUs(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.hardware.setNode(&gpu.Node{})
	r.start(t)
	r.register(t)
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
	if slices := r.api.Slices(); len(slices) > 0 {
		t.Errorf("published %d slices without a GPU", len(slices))
	}
}
