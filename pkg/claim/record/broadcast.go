// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import "sync"

// broadcast wakes all who wait. Its zero value is ready for use.
type broadcast struct {
	mu   sync.Mutex
	next chan struct{}
}

// receive returns a channel that the next send closes.
func (b *broadcast) receive() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		b.next = make(chan struct{})
	}
	return b.next
}

func (b *broadcast) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next != nil {
		close(b.next)
		b.next = nil
	}
}
