// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"reflect"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/policy"
)

const (
	// longestSpread bounds the time in which all nodes follow a policy.
	longestSpread = 2 * time.Hour
	// unknownSpread is for a cluster that does not say how large it is.
	unknownSpread = 10 * time.Minute
)

// PolicySpread is a policy that nodes of a cluster follow one after the other. All of
// them hear of a change within a minute or two, and each writes all of its
// ResourceSlices because of it: in a large cluster that is more than etcd holds until
// it removes old revisions. So a node waits for its turn, which follows from its name,
// within a time in proportion to how many ResourceSlices the cluster has.
type PolicySpread struct {
	source  PolicySource
	options PolicySpreadOptions
	// position is this node's among all, from 0 to 1.
	position float64

	mu sync.Mutex
	// current is the policy to follow, next the one that follows at due.
	current, next *policy.Policy
	due           time.Time
}

// PolicySpreadOptions are all mandatory.
type PolicySpreadOptions struct {
	NodeName string
	// PerThousand is how long the nodes of a cluster with 1,000 ResourceSlices take
	// together; 0 turns waiting off.
	PerThousand time.Duration
	// Negligible is a time that is not worth waiting for: nodes do not poll their
	// policies at the same time anyway.
	Negligible time.Duration
	// CountSlices counts the ResourceSlices of the cluster.
	CountSlices func(ctx context.Context) (int, error)
}

// NewPolicySpread makes a PolicySpread of the policy that the source provides.
func NewPolicySpread(source PolicySource, o PolicySpreadOptions) *PolicySpread {
	hash := sha256.Sum256([]byte(o.NodeName))
	position := float64(binary.BigEndian.Uint64(hash[:])) / math.Exp2(64)
	return &PolicySpread{source: source, options: o, position: position}
}

// Read returns the first policy at once, so that a restart is a way not to wait, and a
// later one when it is this node's turn. A policy that changes again in the meantime
// keeps the turn; one that changes back has nothing to wait for. While the policy is
// invalid nothing waits.
func (s *PolicySpread) Read(ctx context.Context) (*policy.Policy, error) {
	found, err := s.source.Read(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		s.next = nil
		return nil, err
	case s.current == nil || reflect.DeepEqual(found, s.current):
		return s.follow(found), nil
	case s.next == nil:
		s.due = time.Now().Add(s.delay(ctx))
	}
	s.next = found
	if time.Until(s.due) > 0 {
		return s.current, nil
	}
	return s.follow(found), nil
}

func (s *PolicySpread) follow(p *policy.Policy) *policy.Policy {
	s.current, s.next = p, nil
	return p
}

// delay returns how long this node waits.
func (s *PolicySpread) delay(ctx context.Context) time.Duration {
	if s.options.PerThousand <= 0 {
		return 0
	}
	logger := klog.FromContext(ctx)
	window := unknownSpread
	count, err := s.options.CountSlices(ctx)
	if err != nil {
		logger.Error(err, "It is not known how large the cluster is")
	} else {
		window = min(longestSpread, time.Duration(count)*s.options.PerThousand/1000)
	}
	if window <= s.options.Negligible {
		return 0
	}
	delay := time.Duration(s.position * float64(window)).Round(time.Second)
	logger.Info("The sharing policy has changed. This node follows later, so that not all nodes write their ResourceSlices at once; a restart of this pod does not wait",
		"in", delay, "allNodesIn", window, "resourceSlices", count)
	return delay
}

// CountSlices counts the ResourceSlices of all drivers in the cluster. It reads one of
// them.
func CountSlices(ctx context.Context, client kubernetes.Interface) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return 0, fmt.Errorf("count the ResourceSlices of the cluster: %w", err)
	}
	switch more := list.RemainingItemCount; {
	case more != nil:
		return len(list.Items) + int(*more), nil
	case list.Continue != "":
		return 0, errors.New("count the ResourceSlices of the cluster: the API server does not say how many there are")
	}
	return len(list.Items), nil
}
