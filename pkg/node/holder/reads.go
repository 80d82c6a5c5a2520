// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"errors"
	"sync"
	"time"
)

// errNoAnswer means that what was to be read, such as a file of a server that was stopped, has not answered in time.
var errNoAnswer = errors.New("it does not answer")

// reads are of one thing that may never answer. Their zero value is ready to use.
type reads[T any] struct {
	mu      sync.Mutex
	running *read[T]
}

type read[T any] struct {
	began time.Time
	done  chan struct{}
	value T
	err   error
}

// do returns what f returns, which all who ask meanwhile share, or errNoAnswer when the limit is over since the first of them asked: what
// does not return is called once, and holds up nobody else.
func (r *reads[T]) do(limit time.Duration, f func() (T, error)) (value T, err error) {
	one := r.join(f)
	select {
	case <-one.done:
		return one.value, one.err
	case <-time.After(limit - time.Since(one.began)):
		return value, errNoAnswer
	}
}

func (r *reads[T]) join(f func() (T, error)) *read[T] {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running != nil {
		return r.running
	}
	one := &read[T]{began: time.Now(), done: make(chan struct{})}
	r.running = one
	go func() {
		defer close(one.done)
		one.value, one.err = f()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running = nil
	}()
	return one
}
