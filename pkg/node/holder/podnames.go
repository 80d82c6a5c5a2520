// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"context"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/node/host"
)

// PodNames finds the names of the pods of this node by the folders of their logs. It may be used concurrently.
type PodNames struct {
	Roots host.Roots

	lists reads[map[string]string]

	mu    sync.Mutex
	known map[string]string
}

// Name returns "namespace/name" of a pod, or "" if it is not known. The folders are listed again when one is missing.
func (n *PodNames) Name(_ context.Context, _, uid string) string {
	name, found := n.cached()[uid]
	if !found {
		name = n.list()[uid]
	}
	return name
}

func (n *PodNames) cached() map[string]string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.known
}

func (n *PodNames) list() map[string]string {
	known, err := n.lists.do(time.Second, n.Roots.PodNames)
	if err != nil {
		return n.cached()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.known = known
	return known
}
