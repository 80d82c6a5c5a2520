// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package call

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// The tests run in bubbles with a clock of their own, which goes on when everything waits. So they know to the
// nanosecond how long something takes, and a bubble fails when a goroutine is left in it at the end.

const first, second = "0000:1b:00.0", "0000:2c:00.0"

var errWrong = errors.New("wrong")

// takes is a call that takes some time and has no other answer.
func takes(d time.Duration) func() (int, error) {
	return func() (int, error) {
		time.Sleep(d)
		return 1, nil
	}
}

// held is a call that returns when it is let go.
func held() (f func() (int, error), release func()) {
	gate := make(chan struct{})
	return func() (int, error) {
		<-gate
		return 1, nil
	}, sync.OnceFunc(func() { close(gate) })
}

// within is a context with a time limit.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// pendingOf returns the pending call in an error.
func pendingOf(t *testing.T, err error) *gpu.PendingError {
	t.Helper()
	var p *gpu.PendingError
	if !errors.As(err, &p) {
		t.Fatalf("no call is pending: %v", err)
	}
	return p
}

// checkIs checks what an error is, and what it is not.
func checkIs(t *testing.T, err error, all, none []error) {
	t.Helper()
	for _, is := range all {
		expect.Is(t, err, is)
	}
	for _, is := range none {
		if errors.Is(err, is) {
			t.Errorf("%v is %v", err, is)
		}
	}
}

// TestOneCall: how one call ends, after how long, and what its caller gets. A call that nobody waits for keeps its
// GPU until it returns.
func TestOneCall(t *testing.T) {
	tests := map[string]struct {
		call   func() (int, error)
		within time.Duration // 0: no limit
		cancel time.Duration // after which it is cancelled, 0: never
		after  time.Duration
		value  int
		is     []error
		isNot  []error
	}{
		"answered":             {call: takes(time.Second), after: time.Second, value: 1},
		"failed":               {call: func() (int, error) { return 0, errWrong }, is: []error{errWrong}},
		"slow, and answered":   {call: takes(40 * time.Second), after: 40 * time.Second, value: 1},
		"hung":                 {call: takes(DefaultLimit + 1), after: DefaultLimit, is: []error{gpu.ErrHung}, isNot: []error{gpu.ErrSlow}},
		"panics":               {call: func() (int, error) { panic("odd") }, is: []error{}},
		"ends in the grace":    {call: takes(5 * time.Second), within: 4*time.Second + 1, after: 5 * time.Second, value: 1},
		"no time for it":       {call: takes(6 * time.Second), within: 4 * time.Second, after: 5 * time.Second, is: []error{context.DeadlineExceeded}, isNot: []error{gpu.ErrHung, gpu.ErrSlow}},
		"no time, and slow":    {call: takes(time.Minute), within: 9 * time.Second, after: 10 * time.Second, is: []error{context.DeadlineExceeded, gpu.ErrSlow}, isNot: []error{gpu.ErrHung}},
		"no time, almost slow": {call: takes(time.Minute), within: 9*time.Second - 1, after: 10*time.Second - 1, is: []error{context.DeadlineExceeded}, isNot: []error{gpu.ErrSlow}},
		"cancelled, answered":  {call: takes(11 * time.Second), cancel: 2 * time.Second, after: 11 * time.Second, value: 1},
		"cancelled":            {call: takes(time.Minute), cancel: 2 * time.Second, after: 12 * time.Second, is: []error{context.Canceled, gpu.ErrSlow}, isNot: []error{gpu.ErrHung}},
		"cancelled, and hung":  {call: takes(time.Minute), cancel: DefaultLimit - time.Second, after: DefaultLimit, is: []error{gpu.ErrHung, context.Canceled}},
		"hung in the grace":    {call: takes(time.Minute), within: DefaultLimit - grace/2, after: DefaultLimit, is: []error{gpu.ErrHung, context.DeadlineExceeded}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := New(0).GPU(first)
				ctx := t.Context()
				if test.within > 0 {
					ctx = within(t, test.within)
				}
				if test.cancel > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithCancel(ctx)
					time.AfterFunc(test.cancel, cancel)
				}
				began := time.Now()
				value, err := Do(ctx, q, "nvmlSomething", test.call)
				if took := time.Since(began); value != test.value || (err == nil) != (test.is == nil) || took != test.after {
					t.Errorf("%d, %v after %s; want %d after %s", value, err, took, test.value, test.after)
				}
				checkIs(t, err, test.is, test.isNot)
				if gpu.IsPending(err) {
					p := pendingOf(t, err)
					if p.Call != "nvmlSomething" || p.PCIAddress != first || !p.Since.Equal(began) {
						t.Errorf("pending is %+v", p)
					}
					if out := q.all.Pending(""); out == nil || out.Done != p.Done {
						t.Errorf("pending is said to be %v", out)
					}
					<-p.Done
				}
				if out := q.all.Pending(""); out != nil {
					t.Errorf("pending after its return: %v", out)
				}
				expect.Equal(t, must.Get(Do(t.Context(), q, "nvmlNext", takes(0)))(t), 1, "the next call")
			})
		})
	}
}

// TestPanicOfAbandonedCall: the GPU is free afterwards.
func TestPanicOfAbandonedCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(0).GPU(first)
		_, err := Do(t.Context(), q, "nvmlOdd", func() (int, error) {
			time.Sleep(time.Minute)
			panic("odd, and late")
		})
		<-pendingOf(t, err).Done
		expect.Do(t, expect.Err(Do(t.Context(), q, "nvmlNext", takes(0))))
	})
}

// TestPanicIsSaid: its caller hears of a panic.
func TestPanicIsSaid(t *testing.T) {
	_, err := Do(t.Context(), New(0).GPU(first), "nvmlOdd", func() (int, error) { panic("odd") })
	expect.Says(t, err, "odd")
}

// TestQueueOrder: calls of one queue are made one after the other, as they came, and those of others at once.
func TestQueueOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := New(0)
		var calls sync.WaitGroup
		var order []int
		began := time.Now()
		for i := range 5 {
			calls.Go(func() {
				_, _ = Do(t.Context(), all.GPU(first), "nvmlSomething", func() (int, error) {
					time.Sleep(time.Second)
					order = append(order, i) // one at a time
					return 0, nil
				})
			})
			synctest.Wait()
		}
		for _, q := range []*Queue{all.GPU(second), all.Of(first, "events"), all.Of("", "the driver")} {
			if _, err := Do(t.Context(), q, "nvmlOther", takes(0)); err != nil || time.Since(began) != 0 {
				t.Errorf("another queue: %v after %s", err, time.Since(began))
			}
		}
		calls.Wait()
		if took := time.Since(began); !slices.Equal(order, []int{0, 1, 2, 3, 4}) || took != 5*time.Second {
			t.Errorf("order %v, after %s", order, took)
		}
	})
}

// TestWaitInVain: who waits in a queue stops at the end of its context, at once, or when the call ahead is hung.
// Its call is never made, and leaves nothing behind.
func TestWaitInVain(t *testing.T) {
	tests := map[string]struct {
		within, cancelled, after time.Duration
		is, isNot                []error
		says                     string
	}{
		"deadline":            {within: 3 * time.Second, after: 3 * time.Second, is: []error{context.DeadlineExceeded}, isNot: []error{gpu.ErrSlow, gpu.ErrHung}, says: "not attempted after 3s in the queue: nvmlAhead"},
		"deadline, slow":      {within: 12 * time.Second, after: 12 * time.Second, is: []error{context.DeadlineExceeded, gpu.ErrSlow}, isNot: []error{gpu.ErrHung}, says: "12s"},
		"cancelled":           {cancelled: 2 * time.Second, after: 2 * time.Second, is: []error{context.Canceled}, isNot: []error{gpu.ErrSlow}, says: "nvmlAhead on GPU " + first},
		"hung":                {after: DefaultLimit, is: []error{gpu.ErrHung}, says: "nvmlBehind is not attempted: nvmlAhead on GPU " + first + " has not returned"},
		"hung, late deadline": {within: time.Hour, after: DefaultLimit, is: []error{gpu.ErrHung}, says: "nvmlBehind is not attempted: nvmlAhead"},
		"no time at all":      {cancelled: -1, is: []error{context.Canceled}, isNot: []error{gpu.ErrSlow}, says: "not attempted: context canceled"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := New(0).GPU(first)
				stuck, release := held()
				ahead := make(chan error, 1)
				go func() {
					_, err := Do(t.Context(), q, "nvmlAhead", stuck)
					ahead <- err
				}()
				synctest.Wait()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				switch {
				case test.within > 0:
					ctx = within(t, test.within)
				case test.cancelled < 0:
					cancel()
				case test.cancelled > 0:
					time.AfterFunc(test.cancelled, cancel)
				}
				made := false
				began := time.Now()
				_, err := Do(ctx, q, "nvmlBehind", func() (int, error) { made = true; return 0, nil })
				if took := time.Since(began); took != test.after || err == nil || !strings.Contains(err.Error(), test.says) {
					t.Errorf("%v after %s, want %q after %s", err, took, test.says, test.after)
				}
				checkIs(t, err, test.is, test.isNot)
				release()
				t.Log("the call ahead:", <-ahead)
				synctest.Wait()
				if made || q.all.Pending("") != nil || !q.Idle() || q.current != nil {
					t.Errorf("made: %v; left: %v, %+v", made, q.all.Pending(""), q)
				}
			})
		})
	}
}

// TestHungIsKnown: who comes after a call that is hung does not wait, and those who come after its return are answered.
func TestHungIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(0).GPU(first)
		stuck, release := held()
		_, err := Do(t.Context(), q, "nvmlAhead", stuck)
		p := pendingOf(t, err)
		began := time.Now()
		for range 3 {
			_, err := Do(t.Context(), q, "nvmlBehind", takes(0))
			if again := pendingOf(t, err); again.Done != p.Done || !errors.Is(err, gpu.ErrHung) || time.Since(began) != 0 {
				t.Errorf("%v after %s", err, time.Since(began))
			}
		}
		release()
		<-p.Done
		expect.Do(t, expect.Err(Do(t.Context(), q, "nvmlBehind", takes(0))), "after its return")
	})
}

// TestTurnComesToOneWhoGivesUp: the turn of a caller whose time is over at that moment goes on to the next one.
func TestTurnComesToOneWhoGivesUp(t *testing.T) {
	for range 100 { // it may see either first
		synctest.Test(t, func(t *testing.T) {
			q := New(0).GPU(first)
			c := must.Get(q.enter(t.Context(), "nvmlAhead"))(t)
			ctx, cancel := context.WithCancel(t.Context())
			late, next := make(chan error, 1), make(chan error, 1)
			for _, one := range []struct {
				ctx  context.Context
				said chan error
			}{{ctx, late}, {t.Context(), next}} {
				go func() {
					_, err := Do(one.ctx, q, "nvmlWaiting", takes(0))
					one.said <- err
				}()
				synctest.Wait()
			}
			cancel()
			q.leave(t.Context(), c, nil)
			expect.Is(t, <-late, context.Canceled, "the one who gives up")
			expect.Do(t, <-next, "the next one")
		})
	}
}

// TestTurnComesInsteadOfHung: where the call ahead returns at the moment at which it would be hung, nobody gives up.
func TestTurnComesInsteadOfHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(0).GPU(first)
		c := must.Get(q.enter(t.Context(), "nvmlAhead"))(t)
		time.Sleep(DefaultLimit)
		expect.Is(t, q.inVain("nvmlNext", time.Now(), nil), gpu.ErrHung)
		q.leave(t.Context(), c, nil)
		expect.Do(t, q.inVain("nvmlNext", time.Now(), nil))
		expect.Do(t, expect.Err(q.enter(t.Context(), "nvmlNext")), "the next one")
		expect.Do(t, q.inVain("nvmlAfter", time.Now(), nil), "another call has begun")
	})
}

// TestReturnsAtLastMoment: a call that returns while its caller gives up is not pending.
func TestReturnsAtLastMoment(t *testing.T) {
	q := New(0).GPU(first)
	c := must.Get(q.enter(t.Context(), "nvmlSomething"))(t)
	q.leave(t.Context(), c, nil)
	expect.Do(t, q.abandon(c, context.Canceled))
}

// TestPending: a queue knows its call that nobody waits for any more, and by now what that one is.
func TestPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := New(0)
		q := all.GPU(first)
		stuck, release := held()
		gone := make(chan error, 1)
		go func() {
			_, err := Do(within(t, time.Second), q, "nvmlSomething", stuck)
			gone <- err
		}()
		synctest.Wait()
		if p := q.Pending(); p != nil {
			t.Errorf("its caller waits: %v", p)
		}
		done := pendingOf(t, <-gone).Done
		for _, is := range []error{gpu.ErrSlow, gpu.ErrHung} {
			for _, p := range []*gpu.PendingError{q.Pending(), all.Pending("nvml")} {
				if !errors.Is(p, is) || errors.Is(p, context.DeadlineExceeded) || p.Call != "nvmlSomething" || p.PCIAddress != first || p.Done != done {
					t.Errorf("got %+v, want that it %v", p, is)
				}
			}
			time.Sleep(DefaultLimit)
		}
		if p := all.GPU(second).Pending(); p != nil {
			t.Errorf("of another queue: %v", p)
		}
		release()
		<-done
		if p := q.Pending(); p != nil {
			t.Errorf("it has returned: %v", p)
		}
	})
}

// TestNoQueues: without queues each call has one of its own.
func TestNoQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var none *Queues
		stuck, release := held()
		_, err := Do(t.Context(), none.GPU(first), "nvmlAhead", stuck)
		expect.Is(t, err, gpu.ErrHung, "hung")
		expect.Do(t, expect.Err(Do(t.Context(), none.GPU(first), "nvmlNext", takes(0))))
		release()
		<-pendingOf(t, err).Done
	})
}

// TestRead: a read waits no longer than its context, and for nothing afterwards.
func TestRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := New(0).Of("", "files")
		stuck, release := held()
		began := time.Now()
		_, err := Read(within(t, 3*time.Second), q, "read of files", stuck)
		if took := time.Since(began); took != 3*time.Second || !errors.Is(err, ErrNoAnswer) || !errors.Is(err, context.DeadlineExceeded) || gpu.IsPending(err) {
			t.Errorf("%v after %s", err, took)
		}
		_, err = Read(t.Context(), q, "read of files", stuck)
		if took := time.Since(began); took != DefaultLimit || !errors.Is(err, ErrNoAnswer) || errors.Is(err, gpu.ErrHung) || !strings.Contains(err.Error(), "read of files has not returned") {
			t.Errorf("%v after %s", err, took)
		}
		release()
		synctest.Wait()
		expect.Equal(t, must.Get(Read(t.Context(), q, "read of files", takes(time.Second)))(t), 1, "afterwards")
		if _, err := Read(t.Context(), q, "read of files", func() (int, error) { return 0, errWrong }); !errors.Is(err, errWrong) || errors.Is(err, ErrNoAnswer) {
			t.Errorf("it fails: %v", err)
		}
	})
}

// TestIdle: a queue is idle until a call is made, and again when the last has returned.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		queues := New(0)
		busy, other := queues.GPU(first), queues.GPU(second)
		call, release := held()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = Do(t.Context(), busy, "one", call)
		}()
		synctest.Wait()
		if busy.Idle() || !other.Idle() {
			t.Errorf("a call is out: idle %t, and the other queue %t", busy.Idle(), other.Idle())
		}
		release()
		<-ended
		if !busy.Idle() {
			t.Error("the call has returned")
		}
	})
}
