// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"slices"
	"sync"

	"github.com/partage-dev/partage/pkg/mps"
)

// statusBoard holds the status of a session for readers that do not have its lock.
type statusBoard struct {
	mu     sync.Mutex
	status mps.Status
}

func (b *statusBoard) set(status mps.Status) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.status = status
}

func (b *statusBoard) get() mps.Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	status := b.status
	status.Spec = status.Spec.Clone()
	status.Servers, status.Clients = slices.Clone(status.Servers), slices.Clone(status.Clients)
	return status
}
