// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import "sync"

// answers keeps what was found out, for goroutines that ask the same. Each question is worked
// on once; who asks it meanwhile waits.
type answers[K comparable, V any] struct {
	mu    sync.Mutex
	known map[K]*answer[V]
}

type answer[V any] struct {
	once  sync.Once
	value V
}

// of returns the answer to a question, and whether this call worked it out.
func (a *answers[K, V]) of(question K, find func() V) (value V, first bool) {
	a.mu.Lock()
	if a.known == nil {
		a.known = map[K]*answer[V]{}
	}
	found := a.known[question]
	if found == nil {
		found = &answer[V]{}
		a.known[question] = found
	}
	a.mu.Unlock()
	found.once.Do(func() { found.value, first = find(), true })
	return found.value, first
}
