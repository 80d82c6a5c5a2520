// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package logchange helps loops to log a state when it changes rather than every
// time they observe it: an hour of retries is one line.
//
// The zero values are ready to use, by any number of goroutines.
package logchange

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Value remembers one value. At first that is the zero value of T.
type Value[T comparable] struct {
	mu   sync.Mutex
	last T
}

// Set replaces the value and reports whether it was another one.
func (v *Value[T]) Set(value T) (changed bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	changed = v.last != value
	v.last = value
	return changed
}

// Problem is the error of something that is tried again and again. At first there
// is none.
type Problem struct {
	// Patience is for what may fail for a moment, such as a request to a busy API server:
	// a problem that has not lasted as long is logged once, as information, and not as an
	// error. Optional.
	Patience time.Duration

	mu   sync.Mutex
	last problemState
	// since is when the problem began that lasts, if there is one.
	since time.Time
}

// problemState is what is logged when it changes.
type problemState struct {
	failed bool
	// text is empty as long as there is patience.
	text string
}

// Log logs an error unless the last one that was logged had the same text, and, where
// resolved is not empty, that there is no error any more.
func (p *Problem) Log(ctx context.Context, err error, failed, resolved string, keysAndValues ...any) {
	// Held while logging, so that the last line is about the last state.
	p.mu.Lock()
	defer p.mu.Unlock()
	now := problemState{failed: err != nil}
	switch {
	case err == nil:
		p.since = time.Time{}
	case p.since.IsZero():
		p.since = time.Now()
	}
	passing := err != nil && time.Since(p.since) < p.Patience
	if err != nil && !passing {
		now.text = err.Error()
	}
	if p.last == now {
		return
	}
	p.last = now
	logger := klog.FromContext(ctx).WithCallDepth(1)
	switch {
	case passing:
		logger.Info(failed, append([]any{"err", err}, keysAndValues...)...)
	case err != nil:
		logger.Error(err, failed, keysAndValues...)
	case resolved != "":
		logger.Info(resolved, keysAndValues...)
	}
}

// Set remembers values by a key: two with the same key are the same, whatever else
// differs. At first it is empty.
type Set[K comparable, V any] struct {
	mu   sync.Mutex
	last map[K]bool
}

// Update replaces all values and returns those that have appeared since the last call,
// each once and in the order they were given in. Of values with the same key the first
// counts.
func (s *Set[K, V]) Update(values []V, key func(V) K) (appeared []V) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := make(map[K]bool, len(values))
	for _, value := range values {
		k := key(value)
		if !now[k] && !s.last[k] {
			appeared = append(appeared, value)
		}
		now[k] = true
	}
	s.last = now
	return appeared
}
