// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package lock

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Watch notes the calls in an error that have not returned, and returns the error.
// All who wait for their GPUs stop, and the locks are not free before the calls
// return: until then they may take effect at any time. With a PCI address the error is
// that of a call on this GPU; otherwise the calls know theirs.
func (l *Locks) Watch(pciAddress string, err error) error {
	for _, call := range hungCalls(err) {
		l.noteHung(cmp.Or(pciAddress, call.PCIAddress), call)
	}
	return err
}

func (l *Locks) noteHung(pciAddress string, call *gpu.PendingError) {
	n := gpuLock(pciAddress)
	call = call.ForOthers()
	l.mu.Lock()
	defer l.mu.Unlock()
	// Whoever waits for a call has an error of its own, and each of them the same Done.
	known := slices.IndexFunc(l.hung[n], func(known *gpu.PendingError) bool { return known.Done == call.Done })
	if known < 0 {
		l.hung[n] = append(l.hung[n], call)
	} else {
		l.hung[n][known] = call // which says more of it by now
	}
	if l.firstHung(n) == nil {
		return // it has returned meanwhile
	}
	l.waiting = slices.DeleteFunc(l.waiting, func(w *waiter) bool {
		if !slices.Contains(w.names, n) {
			return false
		}
		w.granted <- unusable(n, call)
		return true
	})
	// Others may have waited behind these.
	l.grant()
}

func unusable(n name, call *gpu.PendingError) error {
	return fmt.Errorf("%s is not used before a call on it has returned: %w", n, call)
}

// firstHung returns a call on a GPU that has not returned, or nil. There may be
// several: what only looks at a GPU does so without its lock. The caller holds mu.
func (l *Locks) firstHung(n name) *gpu.PendingError {
	hung := slices.DeleteFunc(l.hung[n], func(call *gpu.PendingError) bool { return !call.IsOut() })
	if len(hung) == 0 {
		delete(l.hung, n)
		return nil
	}
	l.hung[n] = hung
	return hung[0]
}

// hungCall is firstHung for those who do not hold mu.
func (l *Locks) hungCall(n name) *gpu.PendingError {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.firstHung(n)
}

// checkHung fails when a call on one of the GPUs has not returned. The caller holds mu.
func (l *Locks) checkHung(names []name) error {
	for _, n := range names {
		if call := l.firstHung(n); call != nil {
			return unusable(n, call)
		}
	}
	return nil
}

// hungCalls finds all of them: a session may be on several GPUs.
func hungCalls(err error) []*gpu.PendingError {
	switch e := err.(type) { //nolint:errorlint // this walks through the wrapped ones
	case nil:
		return nil
	case *gpu.PendingError:
		return []*gpu.PendingError{e}
	case interface{ Unwrap() error }:
		return hungCalls(e.Unwrap())
	case interface{ Unwrap() []error }:
		var calls []*gpu.PendingError
		for _, wrapped := range e.Unwrap() {
			calls = append(calls, hungCalls(wrapped)...)
		}
		return calls
	}
	return nil
}
