// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"errors"
	"sync"
	"time"
)

// ErrNoAnswer means that a look has not ended within its limit.
var ErrNoAnswer = errors.New("it does not answer")

// Looks are looks at something that may never answer, such as a file of a server that was
// stopped or the memory of a process that is stuck in its driver. One that never ends is
// shared by all who ask for the same, and only the first of them wait for it. The zero
// value is ready to use.
type Looks[K comparable, T any] struct {
	mu      sync.Mutex
	running map[K]*look[T]
}

type look[T any] struct {
	began time.Time
	done  chan struct{}
	value T
	err   error
}

// Do returns what f returns, or ErrNoAnswer if that takes longer than limit since the
// first caller with this key came. Callers that share a look share the value, too.
func (l *Looks[K, T]) Do(key K, limit time.Duration, f func() (T, error)) (T, error) {
	one := l.join(key, f)
	timer := time.NewTimer(limit - time.Since(one.began))
	defer timer.Stop()
	select {
	case <-one.done:
		return one.value, one.err
	case <-timer.C:
	}
	select {
	case <-one.done:
		return one.value, one.err
	default:
		var none T
		return none, ErrNoAnswer
	}
}

func (l *Looks[K, T]) join(key K, f func() (T, error)) *look[T] {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one, running := l.running[key]; running {
		return one
	}
	if l.running == nil {
		l.running = map[K]*look[T]{}
	}
	one := &look[T]{began: time.Now(), done: make(chan struct{})}
	l.running[key] = one
	go func() {
		defer close(one.done)
		defer func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(l.running, key)
		}()
		one.value, one.err = f()
	}()
	return one
}
