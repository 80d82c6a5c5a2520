// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// overlap is an old and a new driver on one node. Both are called until the old
// one ends; then only calls that have begun come to it.
type overlap struct {
	n        *node
	old, new *process
	ending   atomic.Bool
}

// call makes one call, to the new driver where the old one is not there any more.
func (o *overlap) call(ctx context.Context, toOld bool, what operation, claim *drapb.Claim) ([]string, error) {
	if toOld && !o.ending.Load() {
		ids, err := o.old.try(ctx, what, claim, kubeletTime)
		if status.Code(err) != codes.Unavailable {
			return ids, err
		}
	}
	return o.new.try(ctx, what, claim, kubeletTime)
}

// use prepares and unprepares claims for one place again and again, by one and
// the other, until enough is closed, and then once more.
func (o *overlap) use(ctx context.Context, gpu int, at place, enough <-chan struct{}) error {
	m, err := o.n.state.Snapshot()
	if err != nil {
		return err
	}
	for round, more := 0, true; more; round++ {
		select {
		case <-enough:
			more = false
		default:
		}
		claim := o.n.allocate([]string{deviceName(m.GPUs[gpu].PCIAddress, at)})
		oldPrepares := (round+gpu+at.start)%2 == 0
		ids, err := o.call(ctx, oldPrepares, prepare, claim)
		if err != nil {
			return fmt.Errorf("round %d: prepare %v on GPU %d: %w", round, at, gpu, err)
		}
		if err := o.n.checkPrepared(claim.GetUid(), ids, gpu, at); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if _, err := o.call(ctx, !oldPrepares, unprepare, claim); err != nil {
			return fmt.Errorf("round %d: unprepare %v on GPU %d: %w", round, at, gpu, err)
		}
		if err := o.n.checkNoFiles(claim.GetUid()); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

// TestUpgradeUnderLoad: an old and a new driver are called at the same time, for
// the same GPUs and others, and the old one is told to end in the middle of it.
// Every call ends well, and the devices stay published.
func TestUpgradeUnderLoad(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x3")
	old := n.start(t)
	old.ready(t)
	published := len(n.api.Slices())
	var mu sync.Mutex
	var deleted []string
	n.api.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method == http.MethodDelete {
			mu.Lock()
			defer mu.Unlock()
			deleted = append(deleted, r.URL.Path)
		}
		return nil
	})
	o := &overlap{n: n, old: old, new: n.start(t)}

	enough := make(chan struct{})
	var wg sync.WaitGroup
	load := func(gpu int, at place) {
		wg.Go(func() {
			if err := o.use(t.Context(), gpu, at, enough); err != nil {
				t.Error(err)
			}
		})
	}
	for start := range 4 {
		load(0, place{"1g.10gb", start})
	}
	load(0, place{"3g.40gb", 4})
	load(1, place{"2g.20gb", 0})
	load(1, place{"2g.20gb", 4})
	load(2, place{})
	// Both have work to do when the old one is told to end.
	for _, p := range []*process{o.old, o.new} {
		p.until(t, "some calls", func(context.Context) error {
			if made := strings.Count(p.log.String(), `"Unprepared"`); made < 20 {
				return fmt.Errorf("%d claims are unprepared", made)
			}
			return nil
		})
	}
	o.ending.Store(true)
	if err := old.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	old.wantExit(t, 0)
	close(enough)
	wg.Wait()
	n.wantClean(t)
	mu.Lock()
	defer mu.Unlock()
	if len(deleted) > 0 || len(n.api.Slices()) != published {
		t.Errorf("%d of %d slices are there, deleted were %v", len(n.api.Slices()), published, deleted)
	}
}
