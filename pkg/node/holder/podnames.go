// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"sync/atomic"
	"time"

	"github.com/partage-dev/partage/pkg/node/host"
)

// PodNames finds the names of the pods of this node by the folders of their logs. It may be used concurrently.
type PodNames struct {
	Roots host.Roots

	lists reads[map[string]string]
	known atomic.Pointer[map[string]string]
}

// Name returns "namespace/name" of a pod, or "" if it is not known. The folders are listed again when one is missing.
func (n *PodNames) Name(uid string) string {
	if known := n.known.Load(); known != nil {
		if name, found := (*known)[uid]; found {
			return name
		}
	}
	known, err := n.lists.do(time.Second, n.Roots.PodNames)
	if err == nil {
		n.known.Store(&known)
	}
	return known[uid]
}
