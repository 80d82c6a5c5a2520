// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/panics"
)

// lane is what calls can get stuck on together: one GPU, or the driver as a
// whole. While a call that was left behind is out, no other call is made on its
// lane: it would only cost another thread.
type lane struct {
	pci     string // empty for what is no GPU, or not known to be one yet
	limit   time.Duration
	observe func(context.Context, Call) // nil: nobody watches
	panics  panics.Repeated

	mu  sync.Mutex
	out []*gpu.HungError // oldest first
}

// hung returns the oldest call that is out, or nil.
func (l *lane) hung() *gpu.HungError {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.out) == 0 {
		return nil
	}
	return l.out[0]
}

// get makes one call of the library, unless ctx is done or an earlier call is
// out. If it does not return within the limit it is left behind. The end of ctx is
// no reason to leave it behind: that would keep the GPU from others.
//
// f runs in a goroutine of its own, since a call cannot be cancelled. It must not write to what its caller reads: results go through its return values.
func get[T any](ctx context.Context, l *lane, call string, f func() (T, nvml.Return)) (T, error) {
	if l.observe == nil {
		return attempt(ctx, l, call, f)
	}
	start := time.Now()
	value, err := attempt(ctx, l, call, f)
	l.observe(ctx, Call{Function: call, PCIAddress: l.pci, Took: time.Since(start), Answer: plain(value), Err: err})
	return value, err
}

// attempt is get without an observer.
func attempt[T any](ctx context.Context, l *lane, call string, f func() (T, nvml.Return)) (T, error) {
	var none T
	if hung := l.hung(); hung != nil {
		return none, fmt.Errorf("%s is not attempted: %w", call, hung)
	}
	if err := ctx.Err(); err != nil {
		return none, &gpu.Error{Call: call, PCIAddress: l.pci, Text: "not attempted: " + err.Error(), Err: err}
	}
	answers := make(chan answer[T], 1)
	since := time.Now()
	go func() { answers <- run(ctx, l, f) }()
	limit := time.NewTimer(l.limit)
	defer limit.Stop()
	select {
	case a := <-answers:
		return a.value, a.failure(call, l.pci)
	case <-limit.C:
	}
	select {
	case a := <-answers: // at the last moment
		return a.value, a.failure(call, l.pci)
	default:
	}
	return none, l.leave(ctx, call, since, func() nvml.Return { return (<-answers).ret })
}

// answer is what a call has returned.
type answer[T any] struct {
	value T
	ret   nvml.Return
	// panicked is the defect that kept it from returning.
	panicked error
}

// run makes a call. A panic in it must not end the work on the other GPUs.
func run[T any](ctx context.Context, l *lane, f func() (T, nvml.Return)) answer[T] {
	a := answer[T]{ret: nvml.ERROR_UNKNOWN}
	func() {
		defer l.panics.Recover(ctx, &a.panicked)
		a.value, a.ret = f()
	}()
	return a
}

func (a answer[T]) failure(call, pci string) error {
	if a.panicked != nil {
		return &gpu.Error{Call: call, PCIAddress: pci, Text: a.panicked.Error(), Err: a.panicked}
	}
	return failure(call, pci, a.ret)
}

// do is get for a call that returns nothing but a code.
func do(ctx context.Context, l *lane, call string, f func() nvml.Return) error {
	_, err := get(ctx, l, call, func() (struct{}, nvml.Return) { return struct{}{}, f() })
	return err
}

// leave records that a call is out until wait returns.
func (l *lane) leave(ctx context.Context, call string, since time.Time, wait func() nvml.Return) *gpu.HungError {
	done := make(chan struct{})
	hung := &gpu.HungError{Call: call, PCIAddress: l.pci, Since: since, Done: done}
	l.mu.Lock()
	l.out = append(l.out, hung)
	l.mu.Unlock()

	logger := klog.FromContext(ctx)
	go func() {
		ret := wait()
		l.mu.Lock()
		l.out = slices.DeleteFunc(l.out, func(o *gpu.HungError) bool { return o == hung })
		l.mu.Unlock()
		close(done)
		logger.Info("A call that was left behind has returned", "call", call, "pciAddress", l.pci,
			"took", time.Since(since).Round(time.Millisecond), "result", describe(ret))
	}()
	return hung
}

// lanes are all lanes of a client, by name. Unlike handles they outlive a session.
type lanes struct {
	mu      sync.Mutex
	limit   time.Duration // of calls
	observe func(context.Context, Call)
	byName  map[string]*lane
}

// get returns the lane of this name. pci is the GPU's address, if it is known.
func (l *lanes) get(name, pci string) *lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := l.byName[name]
	if found == nil {
		found = &lane{pci: pci, limit: l.limit, observe: l.observe}
		l.byName[name] = found
	}
	return found
}

// system returns the lane of the driver as a whole.
func (l *lanes) system() *lane { return l.get("", "") }

// gpu returns the lane of everything that names the GPU.
func (l *lanes) gpu(pci string) *lane { return l.get(pci, pci) }

// events returns the lane of waiting for the GPU's events. It is not the GPU's own:
// waiting delays no other call on the GPU, and no other call delays it. It is not observed.
func (l *lanes) events(pci string) *lane {
	l.mu.Lock()
	defer l.mu.Unlock()
	name := "events of " + pci
	if l.byName[name] == nil {
		l.byName[name] = &lane{pci: pci, limit: l.limit}
	}
	return l.byName[name]
}

// hung returns a call that is out anywhere, or nil.
func (l *lanes) hung() *gpu.HungError {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lane := range l.byName {
		if hung := lane.hung(); hung != nil {
			return hung
		}
	}
	return nil
}
