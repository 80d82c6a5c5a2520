// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

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

	"github.com/partage-dev/partage/test/flow/harness"
)

// overlap is an old and a new driver on one node. Both get calls until the old one is
// told to end, which then only finishes those that it has.
type overlap struct {
	n        *harness.Node
	old, new *harness.Driver
	ending   atomic.Bool
}

// call makes one call, to the new driver if the old one is gone.
func (o *overlap) call(ctx context.Context, toOld bool, what harness.Operation, claim *drapb.Claim) ([]string, error) {
	if toOld && !o.ending.Load() {
		ids, err := o.old.Call(ctx, what, claim, harness.KubeletTimeout)
		if status.Code(err) != codes.Unavailable {
			return ids, err
		}
	}
	return o.new.Call(ctx, what, claim, harness.KubeletTimeout)
}

// use prepares and unprepares claims for one place with alternating drivers until enough
// is closed, and then once more.
func (o *overlap) use(ctx context.Context, gpu int, at harness.Place, enough <-chan struct{}) error {
	m, err := o.n.State.Snapshot()
	if err != nil {
		return err
	}
	for round, more := 0, true; more; round++ {
		select {
		case <-enough:
			more = false
		default:
		}
		claim := o.n.AllocateNamed([]string{harness.DeviceName(m.GPUs[gpu].PCIAddress, at)})
		oldPrepares := (round+gpu+at.Start)%2 == 0
		ids, err := o.call(ctx, oldPrepares, harness.Prepare, claim)
		if err != nil {
			return fmt.Errorf("round %d: prepare %v on GPU %d: %w", round, at, gpu, err)
		}
		if err := o.n.CheckPrepared(claim.GetUid(), ids, gpu, at); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if _, err := o.call(ctx, !oldPrepares, harness.Unprepare, claim); err != nil {
			return fmt.Errorf("round %d: unprepare %v on GPU %d: %w", round, at, gpu, err)
		}
		if err := o.n.CheckNoFiles(claim.GetUid()); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

// TestUpgradeUnderLoad checks that every call succeeds and all devices stay published while
// an old and a new driver are called for the same GPUs and the old one ends.
func TestUpgradeUnderLoad(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x3")
	old := n.Start(t)
	old.Ready(t)
	published := len(n.API.Slices())
	var mu sync.Mutex
	var deleted []string
	n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method == http.MethodDelete {
			mu.Lock()
			defer mu.Unlock()
			deleted = append(deleted, r.URL.Path)
		}
		return nil
	})
	o := &overlap{n: n, old: old, new: n.Start(t)}

	enough := make(chan struct{})
	var wg sync.WaitGroup
	load := func(gpu int, at harness.Place) {
		wg.Go(func() {
			if err := o.use(t.Context(), gpu, at, enough); err != nil {
				t.Error(err)
			}
		})
	}
	for start := range 4 {
		load(0, harness.Place{Profile: "1g.10gb", Start: start})
	}
	load(0, harness.Place{Profile: "3g.40gb", Start: 4})
	load(1, harness.Place{Profile: "2g.20gb", Start: 0})
	load(1, harness.Place{Profile: "2g.20gb", Start: 4})
	load(2, harness.Place{})
	// Both have work to do when the old one is told to end.
	for _, p := range []*harness.Driver{o.old, o.new} {
		p.Until(t, "some calls", func(context.Context) error {
			if made := strings.Count(p.Log.String(), `"Unprepared"`); made < 20 {
				return fmt.Errorf("%d claims are unprepared", made)
			}
			return nil
		})
	}
	o.ending.Store(true)
	if err := old.Cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	old.WantExit(t, 0)
	close(enough)
	wg.Wait()
	n.WantClean(t)
	mu.Lock()
	defer mu.Unlock()
	if len(deleted) > 0 || len(n.API.Slices()) != published {
		t.Errorf("%d of %d slices are there, deleted were %v", len(n.API.Slices()), published, deleted)
	}
}
