// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// askAgain is how long the API server is not asked again about the same claim.
const askAgain = time.Minute

// Facts remembers what the journal does not have of claims: which pods they are reserved
// for, and how much memory was asked for. They come from calls of the kubelet and from all
// answers of the API server that pass through. Its methods may be called concurrently.
type Facts struct {
	driver  string
	cluster claim.Cluster

	mu sync.Mutex
	// known is nil until somebody follows which claims there are: nobody would forget any.
	known map[types.UID]facts
	asked map[types.UID]time.Time
}

var _ claim.Cluster = (*Facts)(nil)

type facts struct {
	// pods are names by UID.
	pods map[string]string
	// requested is memory by device.
	requested map[string]int64
}

// names of the pods in order.
func (f facts) names() []string { return slices.Sorted(maps.Values(f.pods)) }

// NewFacts makes Facts about what a driver has allocated.
func NewFacts(driver string, cluster claim.Cluster) *Facts {
	return &Facts{driver: driver, cluster: cluster, asked: map[types.UID]time.Time{}}
}

// Claim asks the cluster, and remembers the answer.
func (f *Facts) Claim(ctx context.Context, ref claim.Ref) (*resourceapi.ResourceClaim, error) {
	found, err := f.cluster.Claim(ctx, ref)
	if err == nil && found != nil {
		f.Remember(found)
	}
	return found, err
}

// Remember takes what a claim says. Call it once the claim is prepared: others are forgotten.
func (f *Facts) Remember(c *resourceapi.ResourceClaim) {
	now := facts{pods: map[string]string{}, requested: map[string]int64{}}
	for _, user := range c.Status.ReservedFor {
		if user.APIGroup == "" && user.Resource == "pods" {
			now.pods[string(user.UID)] = user.Name
		}
	}
	if c.Status.Allocation != nil {
		for _, r := range c.Status.Allocation.Devices.Results {
			if memory := r.ConsumedCapacity["memory"]; r.Driver == f.driver && memory.Value() > 0 {
				now.requested[r.Device] += memory.Value()
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known != nil {
		f.known[c.UID] = now
	}
}

func (f *Facts) of(uid types.UID) (facts, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	found, ok := f.known[uid]
	return found, ok
}

// may reports whether a claim is reserved for a pod.
func (f *Facts) may(h *Holding, pod string) bool {
	known, _ := f.of(h.Claim.UID)
	_, ok := known.pods[pod]
	return ok
}

// learn asks about a claim, but not again and again. What cannot be found out stays unknown.
func (f *Facts) learn(ctx context.Context, ref claim.Ref) {
	now := time.Now()
	f.mu.Lock()
	due := now.Sub(f.asked[ref.UID]) >= askAgain
	if due {
		f.asked[ref.UID] = now
	}
	f.mu.Unlock()
	if due && ref.Name != "" {
		_, _ = f.Claim(ctx, ref)
	}
}

// keep forgets all claims but these. From the first time on others are remembered.
func (f *Facts) keep(uids map[types.UID]bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known = map[types.UID]facts{}
	}
	maps.DeleteFunc(f.known, func(uid types.UID, _ facts) bool { return !uids[uid] })
	maps.DeleteFunc(f.asked, func(uid types.UID, _ time.Time) bool { return !uids[uid] })
}
