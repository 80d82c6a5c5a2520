// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"math/rand/v2"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/policy"
)

// PolicySpread is a policy whose changes the nodes of a cluster follow at random times. All of them hear
// of a change within a minute or two, and each writes all of its ResourceSlices because of it: in a large
// cluster that is more than etcd holds until it removes old revisions. It is for one goroutine.
type PolicySpread struct {
	source PolicySource
	over   time.Duration

	// current is the policy to follow. at is when this node follows another one, zero if there is none.
	current *policy.Policy
	at      time.Time
}

// NewPolicySpread makes a PolicySpread of the policy that the source provides. Over is the longest that a
// node waits; with 0 none does.
func NewPolicySpread(source PolicySource, over time.Duration) *PolicySpread {
	return &PolicySpread{source: source, over: over}
}

// Read returns the first policy at once, so that a restart is a way not to wait, and a later one when it
// is this node's turn. A policy that changes again in the meantime keeps the turn; one that changes back
// has nothing to wait for. While the policy is invalid nothing waits.
func (s *PolicySpread) Read(ctx context.Context) (*policy.Policy, error) {
	found, err := s.source.Read(ctx)
	if err != nil {
		s.at = time.Time{}
		return nil, err
	}
	if s.over > 0 && s.current != nil && !reflect.DeepEqual(found, s.current) {
		if s.at.IsZero() {
			wait := rand.N(s.over) //nolint:gosec // no secret
			s.at = time.Now().Add(wait)
			klog.FromContext(ctx).Info("The sharing policy has changed. This node follows later, so that not all nodes write their ResourceSlices at once; a restart of this pod does not wait", "in", wait)
		}
		if time.Now().Before(s.at) {
			return s.current, nil
		}
	}
	s.current, s.at = found, time.Time{}
	return found, nil
}
