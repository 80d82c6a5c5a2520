// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// TestWatchesOwnNode: nothing lists or watches the objects of other nodes. In a cluster
// with 5,000 nodes that would be a gigabyte in each of their plugins.
func TestWatchesOwnNode(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var mu sync.Mutex
	watched, other := 0, map[string]bool{}
	r.api.Refuse(func(request *http.Request) *apierrors.StatusError {
		query := request.URL.Query()
		_, name, _ := strings.Cut(request.URL.Path, "/resourceslices/")
		single := name != "" || request.URL.Path == "/version" || strings.Contains(request.URL.Path, "/nodes/") || strings.Contains(request.URL.Path, "/resourceclaims/")
		if request.Method != http.MethodGet || single {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(query.Get("fieldSelector"), "spec.nodeName="+testNode) {
			watched++
		} else {
			other[request.URL.String()] = true
		}
		return nil
	})
	r.start(t)
	r.untilPublished(t, 4, 1)
	r.policy.set(onlyWhole(), nil)
	r.untilTainted(t, partitionsTainted("withdrawn"))
	mu.Lock()
	defer mu.Unlock()
	if watched == 0 || len(other) > 0 {
		t.Errorf("%d lists and watches of the own node, and of others: %v", watched, other)
	}
}
