// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/policy"
)

// asker is a node with claims, and the questions that it asks.
type asker struct {
	*box
	m     *Manager
	start time.Time
	begin sync.Once

	mu sync.Mutex
	// troubles and recoveries are how often they were logged.
	troubles, recoveries int
	// asked are the times of all questions, byClaim those of each claim.
	asked   []time.Duration
	byClaim map[types.UID][]time.Duration
}

// newAsker makes a node whose plugin finds n prepared claims. It is for a synctest bubble.
func newAsker(t *testing.T, n int) *asker {
	t.Helper()
	a := &asker{box: newBox(t), start: time.Now(), byClaim: map[types.UID][]time.Duration{}}
	a.m = a.manager()
	mustPrepare(t, a.m, newClaim("c0", wholeC))
	r, err := a.m.store.Read("c0")
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i < n; i++ {
		// What devices they have makes no difference here.
		r.Claim.UID = types.UID(fmt.Sprint("c", i))
		if err := a.m.store.Put(r, func(*record.Record) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	clock := func() time.Duration { return time.Since(a.start) + a.clock() }
	a.m.clock, a.m.engine.Clock, a.m.orphans.cluster = clock, clock, a
	return a
}

func (a *asker) Claim(ctx context.Context, ref Ref) (*resourceapi.ResourceClaim, error) {
	a.mu.Lock()
	a.asked = append(a.asked, time.Since(a.start))
	a.byClaim[ref.UID] = append(a.byClaim[ref.UID], time.Since(a.start))
	a.mu.Unlock()
	return a.box.Claim(ctx, ref)
}

// run lets the node ask for a while. It does not ask when this returns.
func (a *asker) run(t *testing.T, d time.Duration) {
	t.Helper()
	a.begin.Do(func() {
		var running sync.WaitGroup
		running.Go(func() { a.m.ReleaseOrphans(klog.NewContext(t.Context(), funcr.New(a.log, funcr.Options{}))) })
		t.Cleanup(running.Wait)
	})
	time.Sleep(d)
	synctest.Wait()
}

// log counts what is said.
func (a *asker) log(_, args string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case strings.Contains(args, "Claims are left alone"):
		a.troubles++
	case strings.Contains(args, "It is known again"):
		a.recoveries++
	}
}

func (a *asker) said() (troubles, recoveries int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.troubles, a.recoveries
}

// answer makes the API server answer with an error or not.
func (a *asker) answer(err error) {
	a.box.mu.Lock()
	defer a.box.mu.Unlock()
	a.clusterErr = err
}

// about are the times of the questions about a claim.
func (a *asker) about(uid types.UID) []time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.byClaim[uid])
}

// between is how many questions there were.
func (a *asker) between(from, to time.Duration) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, at := range a.asked {
		if at >= from && at < to {
			n++
		}
	}
	return n
}

// most is how many questions there were in any time as long as this.
func (a *asker) most(d time.Duration) int {
	most := 0
	for _, at := range slices.Clone(a.asked) {
		most = max(most, a.between(at, at+d))
	}
	return most
}

const (
	bigCluster  = 5000
	fullNode    = 56
	allRequests = 300 // per second, of all nodes of a big cluster
)

// TestQuestionsOfFullNode: those of a big cluster of such nodes are few, also while all
// plugins start, and none of its claims is forgotten.
func TestQuestionsOfFullNode(t *testing.T) {
	const hours = 6 * time.Hour
	synctest.Test(t, func(t *testing.T) {
		a := newAsker(t, fullNode)
		a.run(t, hours)
		perSecond := float64(len(a.asked)) / hours.Seconds() * bigCluster
		t.Logf("%d questions in %v; %.0f per second for %d nodes; every 30 s it would be %d times as many",
			len(a.asked), hours, perSecond, bigCluster, fullNode*int(hours/(30*time.Second))/len(a.asked))
		if perSecond > allRequests {
			t.Errorf("%.0f requests per second, want %d at most", perSecond, allRequests)
		}
		// Chance decides how many of them come in one minute, but not beyond the budget.
		if first := a.between(0, DefaultCheckInterval); first > fullNode*3/2 {
			t.Errorf("%d questions in the %v after the start", first, DefaultCheckInterval)
		}
		if most, limit := a.most(time.Minute), inquiryBurst+5; most > limit {
			t.Errorf("%d questions in a minute, want %d at most", most, limit)
		}
		for uid, times := range a.byClaim {
			last := time.Duration(0)
			for _, at := range append(times, hours) {
				if at-last > DefaultCheckInterval*5/4 {
					t.Errorf("claim %s was not asked about between %v and %v", uid, last, at)
				}
				last = at
			}
		}
		if len(a.byClaim) != fullNode {
			t.Errorf("%d claims were asked about, want %d", len(a.byClaim), fullNode)
		}
	})
}

// TestVanishedWhilePluginWasDown: the devices of a claim are released within one interval
// and the grace period.
func TestVanishedWhilePluginWasDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAsker(t, 3)
		a.deleteClaim("c1")
		a.run(t, DefaultCheckInterval+DefaultOrphanGrace+time.Minute)
		if left := a.m.claims(); slices.Contains(left, "c1") || len(left) != 2 {
			t.Errorf("left are %v", left)
		}
		if times := a.byClaim["c1"]; len(times) != 2 {
			t.Errorf("asked at %v, want twice: to see it, and when the grace was over", times)
		}
	})
}

// TestClaimInTheWay: it is asked about at once, and released after the grace period.
func TestClaimInTheWay(t *testing.T) {
	for name, test := range map[string]struct{ device, other string }{
		"partition": {sliceA0, sliceA0},
		"share":     {mpsA, mpsA},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAsker(t, 1)
				claims := []types.UID{"u1"}
				for i := 2; name == "share" && i <= policy.DefaultClients; i++ {
					claims = append(claims, types.UID(fmt.Sprint("u", i)))
				}
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { a.m.ReleaseOrphans(ctx) })
				synctest.Wait()
				// Their turns come much later, while those of claims that the plugin finds come by chance:
				// one that was just asked about is not asked about again at once.
				for _, uid := range claims {
					mustPrepare(t, a.m, newClaim(string(uid), test.device))
				}
				time.Sleep(time.Minute)
				gone := claims[len(claims)-1]
				a.deleteClaim(gone)
				begun := time.Since(a.start)
				if _, err := a.m.Prepare(t.Context(), newClaim("new", test.other)); err == nil {
					t.Fatal("the place is taken")
				}
				if len(a.about(gone)) == 0 {
					t.Fatal("the claim in the way was not asked about")
				}
				if asked := a.about(gone)[0] - begun; asked > time.Second {
					t.Errorf("asked after %v", asked)
				}
				// The kubelet comes back every minute or so.
				prepared := false
				for !prepared && time.Since(a.start)-begun < 2*DefaultOrphanGrace {
					time.Sleep(time.Minute)
					_, err := a.m.Prepare(t.Context(), newClaim("new", test.other))
					prepared = err == nil
				}
				t.Logf("prepared after %v, with %d questions", time.Since(a.start)-begun, a.between(begun, time.Since(a.start)))
				if !prepared {
					t.Error("the claim in the way was not released")
				}
				// Others were asked about once.
				for _, uid := range claims[:len(claims)-1] {
					if n := len(a.about(uid)); n > 3 {
						t.Errorf("claim %s was asked about %d times", uid, n)
					}
				}
				cancel()
				running.Wait()
			})
		})
	}
}

// TestNoAnswers: a cluster whose API server is in trouble is asked less, not more, and not
// all at once when it is back.
func TestNoAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAsker(t, fullNode)
		a.answer(errors.New("connection refused"))
		const away, after = 3 * time.Hour, time.Hour
		a.run(t, away)
		if troubles, recoveries := a.said(); troubles != 1 || recoveries != 0 {
			t.Errorf("it was said %d times, want once", troubles)
		}
		perSecond := float64(a.between(0, 24*time.Hour)) / away.Seconds() * bigCluster
		t.Logf("%.0f per second for %d nodes while there is no answer", perSecond, bigCluster)
		if perSecond > allRequests {
			t.Errorf("%.0f requests per second, want %d at most", perSecond, allRequests)
		}
		before := a.between(0, 24*time.Hour)
		a.answer(nil)
		a.run(t, after)
		if n := a.between(0, 24*time.Hour) - before; float64(n)/after.Seconds()*bigCluster > allRequests {
			t.Errorf("%d questions in the hour after", n)
		}
		if most, limit := a.most(time.Minute), inquiryBurst+5; most > limit {
			t.Errorf("%d questions in a minute, want %d at most", most, limit)
		}
		if troubles, recoveries := a.said(); troubles != 1 || recoveries != 1 {
			t.Errorf("it was said %d times that there are answers, want once", recoveries)
		}
	})
}

// TestNoAnswerAboutOrphan: a claim that was seen to be gone is asked about again soon.
func TestNoAnswerAboutOrphan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAsker(t, 1)
		a.deleteClaim("c0")
		a.run(t, DefaultCheckInterval+time.Minute)
		seen := a.about("c0")[0]
		a.answer(errors.New("connection refused"))
		a.run(t, seen+DefaultOrphanGrace+10*time.Minute-time.Since(a.start))
		a.answer(nil)
		a.run(t, 2*recheckPause)
		a.wantNothing()
	})
}

// TestNobodyWaitsForQuestions: the API server does not answer one.
func TestNobodyWaitsForQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAsker(t, 1)
		mustPrepare(t, a.m, newClaim("u1", sliceA0))
		ctx, cancel := context.WithCancel(t.Context())
		a.m.orphans.cluster = answers(func(Ref) (*resourceapi.ResourceClaim, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		var running sync.WaitGroup
		running.Go(func() { a.m.ReleaseOrphans(ctx) })
		time.Sleep(DefaultCheckInterval)
		synctest.Wait()
		begun := time.Now()
		if err := a.m.cleanUp(t.Context()); err != nil {
			t.Error(err)
		}
		mustPrepare(t, a.m, newClaim("u1", sliceA0))
		mustPrepare(t, a.m, newClaim("u2", sliceA4))
		mustUnprepare(t, a.m, "u1")
		if waited := time.Since(begun); waited > 0 {
			t.Errorf("waited %v", waited)
		}
		cancel()
		running.Wait()
	})
}
