// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// countWrites counts the requests that write slices, and those that write the status of claims.
func countWrites(n *harness.Node) (slices, statuses *atomic.Int64) {
	slices, statuses = &atomic.Int64{}, &atomic.Int64{}
	n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
		switch {
		case r.Method == http.MethodGet || r.URL.Query().Has("dryRun"):
		case strings.Contains(r.URL.Path, "/resourceslices"):
			slices.Add(1)
		case strings.HasSuffix(r.URL.Path, "/status"):
			statuses.Add(1)
		}
		return nil
	})
	return slices, statuses
}

// isTold reports whether a device has a taint without an effect.
func isTold(n *harness.Node) (told bool) {
	n.API.EachDevice(func(d *resourceapi.Device) {
		for _, taint := range d.Taints {
			told = told || taint.Effect == resourceapi.DeviceTaintEffectNone && strings.HasSuffix(taint.Key, "/row-remap-pending")
		}
	})
	return told
}

// flap lets a condition of a GPU come and go that has no effect on pods, as throttling does at the GPU's thermal
// limit. Each time it waits until that is told, for as long as a driver needs that tells everything. It ends when
// enough was written.
func flap(t *testing.T, n *harness.Node, times int, enough func() bool) {
	t.Helper()
	const tells = 3 * time.Second // after the quiet period, a second here, and readings all the time
	for i := range 2 * times {
		if enough() {
			return
		}
		on := i%2 == 0
		n.Update(t, func(m *machine.Machine) { m.GPUs[0].Health.RemappedRows.Pending = on })
		_ = wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, tells, true, func(context.Context) (bool, error) {
			return isTold(n) == on, nil
		})
	}
}

// TestFlappingConditionIsSteady: what changes all the time and keeps no pod away is not written all the time. On
// thousands of nodes that would be more than etcd has room for.
func TestFlappingConditionIsSteady(t *testing.T) {
	t.Parallel()
	const times, most = 3, 2
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t, append([]string{harness.ClaimStatusOn}, harness.Frequent...)...)
	p.Ready(t)
	claim := n.AllocateNamed([]string{harness.DeviceName(n.Address(t, 0), harness.Place{})})
	p.MustPrepare(t, claim)
	untilStatus(t, n, p, claim, "a device", func(entries []harness.StatusEntry) bool { return len(entries) == 1 })
	slices, statuses := countWrites(n)
	flap(t, n, times, func() bool { return slices.Load() > most || statuses.Load() > most })
	for what, got := range map[string]int64{"slices": slices.Load(), "statuses": statuses.Load()} {
		if got > most {
			t.Errorf("a condition without effect comes and goes within seconds, and %s were written %d times, want %d at most", what, got, most)
		}
	}
}
