// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// A claim that does not exist any more is left to the kubelet for a while, counted
// from when this process saw it.
func TestOrphanGrace(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("u2", sliceA4))
	before := b.state()
	keeps := func(when string) {
		t.Helper()
		mustReconcile(t, m)
		b.wantState(t, when, before)
	}
	keeps("it exists")
	b.pass(time.Hour)
	b.deleteClaim("u1")
	keeps("just gone")
	b.pass(DefaultOrphanGrace - time.Second)
	keeps("gone, but not for long")

	// Another process begins to count anew.
	other := b.manager()
	mustReconcile(t, other)
	b.wantState(t, "seen by another process", before)

	// While the API server does not answer, nothing is known.
	b.pass(time.Second)
	b.clusterErr = errors.New("connection refused")
	wantError(t, reconcile(t, m), "it is not known which claims still exist: connection refused")
	b.wantState(t, "no API server", before)
	b.clusterErr = nil

	b.wantWarnings()
	mustReconcile(t, m)
	expect.Same(t, b.state(), []string{"MIG mode of " + pciA, "instance " + addressA4.String() + " complete=true", "record of u2", "spec of u2"})
	b.wantWarnings([]string{"u1 OrphanedClaimReleased", "default/claim-u1"})
	// A Prepare that was on its way comes too late.
	wantError(t, runPrepare(arrivedAt(t.Context(), b.clock()-time.Second), m, newClaim("u1", sliceA0)), "out of date")
	mustReconcile(t, other)
	b.endAll(m, "u1", "u2")
}

// A claim that is back was never gone: another API server was behind.
func TestOrphanIsBack(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	before := b.state()
	for range 3 {
		b.gone["u1"] = true
		mustReconcile(t, m)
		b.pass(DefaultOrphanGrace - time.Second)
		b.gone["u1"] = false
		mustReconcile(t, m)
	}
	b.wantState(t, "at the end", before)
	// So is one that the kubelet has released and prepared again.
	b.gone["u1"] = true
	mustReconcile(t, m)
	mustUnprepare(t, m, "u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustReconcile(t, m)
	b.wantState(t, "prepared again", before)
}

// Processes on the devices keep an orphan: they may be those of a container that
// the kubelet has not stopped yet.
func TestOrphanInUse(t *testing.T) {
	for name, test := range map[string]struct {
		device string
		at     partition.Address // nothing for a whole GPU
		taint  []string
	}{
		"whole":     {device: wholeA, taint: []string{"release-pending " + pciA + " whole"}},
		"static":    {device: staticA0, at: addressA0, taint: []string{static(addressA0), "release-pending " + pciA + " 19@0:1"}},
		"partition": {device: sliceA4, at: addressA4, taint: []string{"release-pending " + pciA + " 19@4:1"}},
		"share":     {device: mpsA}, // others may have the rest
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			if name == "static" {
				b.makeForeign(addressA0)
			}
			want := b.state()
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", test.device))
			before := b.state()
			b.deleteClaim("u1")
			mustReconcile(t, m)
			b.pass(DefaultOrphanGrace)
			instance := -1
			if live, found := b.look(test.at); found {
				instance = live.InstanceID
			}
			b.run(pciA, gpu.Process{PID: 4711, InstanceID: instance}, gpu.Process{PID: 4712, InstanceID: instance})
			for range 2 {
				wantError(t, reconcile(t, m), "claim u1", "process 4711 (", "process 4712 (")
			}
			b.wantState(t, "in use", before)
			b.wantStatements(m, []string{"u1 OrphanedClaimInUse", "default/claim-u1", "process 4711 (", "process 4712 ("})
			wantFindings(t, m, test.taint...)

			b.breakDown(pciA, gpu.ErrUnknown)
			wantError(t, reconcile(t, m), "claim u1", "no", pciA)
			b.wantState(t, "nobody knows", before)
			b.breakDown(pciA, nil)

			b.run(pciA, gpu.Process{PID: 4713, InstanceID: 99}) // on another instance
			if name == "whole" || name == "share" {
				b.run(pciA)
			}
			mustReconcile(t, m)
			b.wantState(t, "released", want)
			b.wantStatements(m)
			for _, c := range survey(t.Context(), m).Conditions {
				t.Errorf("it is released: %+v", c)
			}
			b.wantWarnings([]string{"u1 OrphanedClaimReleased"})
		})
	}
}

// TestOrphanWithPods: a claim whose pod was deleted by force is kept as long as its containers run, also if they use nothing: they can open
// its devices at any time.
func TestOrphanWithPods(t *testing.T) {
	b := newBox(t)
	var running string
	var unknown error
	m := b.manager()
	m.orphans.pods = func(context.Context, Ref) (string, error) { return running, unknown }
	mustPrepare(t, m, newClaim("u1", wholeC))
	before := b.state()
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	running = "pod team/train-0, which was deleted and runs"
	wantError(t, reconcile(t, m), "claim u1", running)
	b.wantState(t, "it runs", before)
	b.wantStatements(m, []string{"u1 OrphanedClaimInUse", running})
	running, unknown = "", errors.New("no answer")
	wantError(t, reconcile(t, m), "claim u1", "no answer")
	b.wantState(t, "nobody knows", before)
	b.wantStatements(m, []string{"u1 OrphanedClaimInUse", "train-0"}) // what was known last
	wantFindings(t, m, "release-pending "+pciC+" whole")
	unknown = nil
	mustReconcile(t, m)
	b.wantNothing()
}

// TestOrphanWithCall: what a call is at work with is left to it.
func TestOrphanWithCall(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", wholeC))
	before := b.state()
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	unlock := must.Get(b.manager().locks.TryClaim("u1"))(t)
	wantError(t, reconcile(t, m), "claim u1", "a call is at work")
	b.wantState(t, "while a call is at work", before)
	b.wantWarnings()
	unlock()
	mustReconcile(t, m)
	b.wantNothing()
}

// TestOrphanOfEarlierBoot: nothing of an earlier boot is left that somebody may use.
func TestOrphanOfEarlierBoot(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("gone", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("stays", sliceA4))
	b.boot("boot-2")
	b.deleteClaim("gone")
	m = b.manager()
	// Its place is another claim's now.
	mustPrepare(t, m, newClaim("new", sliceA0))
	b.run(pciC, gpu.Process{PID: 4711, InstanceID: -1}) // and somebody uses what it had
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	mustReconcile(t, m)
	expect.Same(t, b.state(), []string{"MIG mode of " + pciA, "instance " + addressA0.String() + " complete=true", "record of new", "record of stays", "spec of new"})
}

// TestOrphanOfOldAnswer: a claim that the API server knows again is not released on what it said before.
func TestOrphanOfOldAnswer(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", wholeA))
	b.deleteClaim("u1") // the API server was restored from a backup that is older than the claim
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	b.run(pciA, gpu.Process{PID: 4711, InstanceID: -1}) // its container runs
	wantError(t, reconcile(t, m), "claim u1")
	b.mu.Lock()
	b.gone["u1"] = false // the API server is right again, and stays so
	b.mu.Unlock()
	b.run(pciA) // the container is started again, so that nothing is on the GPU for a moment
	b.pass(30 * time.Second)
	_ = m.cleanUp(t.Context()) // as every 30 seconds
	if b.spec("u1") == nil {
		t.Errorf("the claim exists, is allocated here, and its pod runs; it was released on an old answer: %v, events %q", b.state(), b.warnings)
	}
}

// during does something while the API server is asked.
type during struct {
	*box
	do func()
}

func (d during) Claim(ctx context.Context, ref Ref) (*resourceapi.ResourceClaim, error) {
	d.do()
	return d.box.Claim(ctx, ref)
}

// TestOrphansRecordsUnreadable: a claim whose record cannot be read is not asked about again at once.
func TestOrphansRecordsUnreadable(t *testing.T) {
	_, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", wholeC))
	o := m.orphans
	o.next()
	o.recheck("u1")
	first, due := o.next()
	if first == nil || due.After(time.Now()) {
		t.Fatalf("claim %v is asked about next, at %v", first, due)
	}
	folder := filepath.Dir(m.store.Path("u1"))
	must.Do(t, errors.Join(os.Rename(folder, folder+".away"), os.WriteFile(folder, nil, 0o600)))
	o.ask(t.Context(), first)
	if next, due := o.next(); next != nil || !due.After(time.Now()) {
		t.Errorf("claim %v is asked about again at once", next)
	}
}

// TestOrphanMeanwhile: what was released or prepared anew while the API server was asked is no orphan.
func TestOrphanMeanwhile(t *testing.T) {
	for name, test := range map[string]struct {
		happens func(t *testing.T, b *box, m *Manager)
		left    int
	}{
		"released":       {func(t *testing.T, _ *box, m *Manager) { mustUnprepare(t, m, "u1") }, 0},
		"prepared again": {func(t *testing.T, _ *box, m *Manager) { mustPrepare(t, m, newClaim("u1", sliceA0)) }, 1},
		"allocated anew": {func(t *testing.T, b *box, m *Manager) {
			mustUnprepare(t, m, "u1")
			b.pass(time.Millisecond)
			mustPrepare(t, m, newClaim("u1", sliceA4))
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.deleteClaim("u1")
			mustReconcile(t, m)
			b.pass(DefaultOrphanGrace)
			m.orphans.cluster = during{b, func() { test.happens(t, b, m) }}
			mustReconcile(t, m)
			b.wantWarnings()
			if b.count(pciA) != test.left || len(b.spec("u1")) != test.left {
				t.Errorf("left: %v", b.state())
			}
		})
	}
}

// TestOrphanOnFailingGPU: one that is lost, or has to be reset, does not keep what an orphan has elsewhere, nor what only observes it. One
// that fails for a moment does.
func TestOrphanOnFailingGPU(t *testing.T) {
	for _, out := range []error{gpu.ErrLost, gpu.ErrResetRequired} {
		b, m := newNode(t)
		mustPrepare(t, m, newClaim("u1", sliceA0, wholeC))
		mustPrepare(t, m, admin(newClaim("u2", wholeC)))
		b.deleteClaim("u1")
		b.deleteClaim("u2")
		mustReconcile(t, m)
		b.pass(DefaultOrphanGrace)
		b.breakDown(pciC, gpu.ErrUnknown)
		wantError(t, reconcile(t, m), "claim u1", pciC)
		if b.spec("u1") == nil || b.count(pciA) == 0 || b.spec("u2") != nil {
			t.Errorf("after the time of grace: %v", b.state())
		}
		b.breakDown(pciC, out)
		_ = reconcile(t, m)
		expect.Same(t, b.state(), []string{"record of u1"})
		b.wantWarnings([]string{"u1 OrphanedClaimReleased"}, []string{"u2 OrphanedClaimReleased"})
		mustPrepare(t, m, newClaim("u3", wholeA))
		mustUnprepare(t, m, "u3")
		b.breakDown(pciC, nil)
		mustReconcile(t, m)
		b.wantNothing()
	}
}

// TestOrphanReleased: a claim that is not allocated here any more is released as one that does not exist, also on a full disk and on a GPU
// that never tells its processes.
func TestOrphanReleased(t *testing.T) {
	for name, happens := range map[string]func(b *box){
		"deallocated":     func(b *box) { b.locked(func() { b.deallocated["u1"] = true }) },
		"full disk":       func(b *box) { b.deleteClaim("u1"); b.hooks(fullDisk, nil) },
		"no process list": func(b *box) { b.deleteClaim("u1"); b.breakDown(pciC, gpu.ErrNotSupported) },
	} {
		t.Run(name, func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, newClaim("u1", wholeC))
			happens(b)
			mustReconcile(t, m)
			b.pass(DefaultOrphanGrace - time.Second)
			mustReconcile(t, m)
			if b.spec("u1") == nil {
				t.Error("released before its time")
			}
			b.pass(time.Second)
			mustReconcile(t, m)
			b.wantNothing()
		})
	}
}

// answers is an API server.
type answers func(ref Ref) (*resourceapi.ResourceClaim, error)

func (a answers) Claim(_ context.Context, ref Ref) (*resourceapi.ResourceClaim, error) { return a(ref) }

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
	must.Do(t, err)
	for i := 1; i < n; i++ {
		// What devices they have makes no difference here.
		r.Claim.UID = types.UID(fmt.Sprint("c", i))
		must.Do(t, a.m.store.Put(r, func(*record.Record) error { return nil }))
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
		expect.Same(t, len(a.byClaim), fullNode)
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
	for device, n := range map[string]int{sliceA0: 1, mpsA: policy.DefaultClients} {
		runInBubble(t, device, func(t *testing.T) {
			a := newAsker(t, 1)
			var claims []types.UID
			for i := range n {
				claims = append(claims, types.UID(fmt.Sprint("u", i)))
			}
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() { a.m.ReleaseOrphans(ctx) })
			synctest.Wait()
			// Their turns come much later, while those of claims that the plugin finds come by chance:
			// one that was just asked about is not asked about again at once.
			for _, uid := range claims {
				mustPrepare(t, a.m, newClaim(string(uid), device))
			}
			time.Sleep(time.Minute)
			gone := claims[len(claims)-1]
			a.deleteClaim(gone)
			begun := time.Since(a.start)
			expect.Is(t, runPrepare(t.Context(), a.m, newClaim("new", device)), rules.ErrTaken)
			if asked := a.about(gone); len(asked) == 0 || asked[0]-begun > time.Second {
				t.Errorf("asked at %v, which should be soon after %v", asked, begun)
			}
			// The kubelet comes back every minute or so.
			err := rules.ErrTaken
			for err != nil && time.Since(a.start)-begun < 2*DefaultOrphanGrace {
				time.Sleep(time.Minute)
				err = runPrepare(t.Context(), a.m, newClaim("new", device))
			}
			expect.Is(t, err, nil)
			// Others were asked about once.
			for _, uid := range claims[:len(claims)-1] {
				if n := len(a.about(uid)); n > 3 {
					t.Errorf("claim %s was asked about %d times", uid, n)
				}
			}
			cancel()
			running.Wait()
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
		expect.Is(t, a.m.cleanUp(t.Context()), nil)
		mustPrepare(t, a.m, newClaim("u1", sliceA0))
		mustPrepare(t, a.m, newClaim("u2", sliceA4))
		mustUnprepare(t, a.m, "u1")
		wantWithin(t, begun, 0)
		cancel()
		running.Wait()
	})
}

// A GPU whose driver cannot list processes is not given away under a container: the
// kernel knows who has it open.
func TestOrphanOnGPUWithoutProcessList(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", wholeC))
	b.processesErr = gpu.ErrNotSupported
	descriptor := filepath.Join(b.root, "proc/5004711/fd/5") // no process has this ID: the manager leaves its own out
	must.Do(t, os.MkdirAll(filepath.Dir(descriptor), 0o755))
	must.Do(t, os.Symlink("/dev/nvidia1", descriptor))
	b.deleteClaim("u1")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	wantError(t, reconcile(t, m), "is kept, because processes use", "process 5004711")
	b.wantRecord("u1", record.Prepared)
	must.Do(t, os.Remove(descriptor))
	mustReconcile(t, m)
	b.wantNothing()
}

// A GPU can get another minor while the driver runs, when its kernel module is loaded
// again. The CDI spec is of this moment and not of the last discovery.
func TestMinorOfThisMoment(t *testing.T) {
	b, m := newNode(t)
	b.put("proc/driver/nvidia/gpus/"+pciC+"/information", "Device Minor: \t 0\n")
	mustPrepare(t, m, newClaim("u1", wholeC))
	if nodes := b.spec("u1")[0].Nodes; nodes[0].Path != "/dev/nvidia0" {
		t.Errorf("got %+v", nodes)
	}
	b.endAll(m, "u1")
}
