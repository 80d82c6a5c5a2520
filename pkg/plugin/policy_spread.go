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
	"math/rand/v2"
	"reflect"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/policy"
)

const (
	// longestSpread bounds the time in which all nodes follow a policy.
	longestSpread = 2 * time.Hour
	// unknownSpread is for a cluster of which it is not known how large it is.
	unknownSpread = 10 * time.Minute
)

// Times between two counts of the cluster's ResourceSlices. They vary by node, because the plugins of
// many nodes may start together.
const (
	// firstCount is the time from a start within which the first one begins.
	firstCount = 30 * time.Second
	// countAgain is when to look whether the cluster has grown, or up to half as much later.
	countAgain = 6 * time.Hour
	// uncounted is how long the API server may fail to answer before that is an error.
	uncounted = time.Hour
)

// countRetry is the time between attempts while the API server does not answer.
var countRetry = wait.Backoff{Duration: 10 * time.Second, Factor: 2, Jitter: 1, Steps: 30, Cap: 10 * time.Minute}

// PolicySpread is a policy that nodes of a cluster follow one after the other. All of
// them hear of a change within a minute or two, and each writes all of its
// ResourceSlices because of it: in a large cluster that is more than etcd holds until
// it removes old revisions. So a node waits for its turn, which follows from its name,
// within a time in proportion to how many ResourceSlices the cluster has. That is known
// before there is a change: if all nodes asked because of one, they would be a burst of
// requests themselves.
type PolicySpread struct {
	source  PolicySource
	options PolicySpreadOptions
	// position is this node's among all, from 0 to 1.
	position float64

	mu sync.Mutex
	// current is the policy to follow, next the one that follows. since is when next was
	// first seen, or one before it that this node has not followed.
	current, next *policy.Policy
	since         time.Time
	// slices is the number of ResourceSlices in the cluster if counted.
	slices  int
	counted bool
	// logged is the turn that was logged last.
	logged logchange.Value[turn]
}

// turn is when this node follows a change.
type turn struct {
	// in is how long after the change, window how long after it all nodes have followed.
	in, window time.Duration
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

// Run counts the ResourceSlices of the cluster now and then until ctx ends.
func (s *PolicySpread) Run(ctx context.Context) {
	if s.options.PerThousand <= 0 {
		return
	}
	problem := logchange.Problem{Patience: uncounted}
	retry := countRetry
	pause := rand.N(firstCount) //nolint:gosec // no secret
	for loop.Pause(ctx, pause) {
		count, err := s.options.CountSlices(ctx)
		if ctx.Err() != nil {
			return
		}
		problem.Log(ctx, err, "Could not count the ResourceSlices of the cluster, will retry", "")
		if err != nil {
			pause = retry.Step()
			continue
		}
		s.setSlices(count)
		pause, retry = wait.Jitter(countAgain, 0.5), countRetry
	}
}

func (s *PolicySpread) setSlices(count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slices, s.counted = count, true
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
		s.since = time.Now()
		s.logged.Set(turn{})
	}
	s.next = found
	turn := s.turn()
	if time.Since(s.since) >= turn.in {
		return s.follow(found), nil
	}
	if s.logged.Set(turn) {
		klog.FromContext(ctx).Info("The sharing policy has changed. This node follows later, so that not all nodes write their ResourceSlices at once; a restart of this pod does not wait",
			"in", (turn.in - time.Since(s.since)).Round(time.Second), "allNodesIn", turn.window, "resourceSlices", s.slices)
	}
	return s.current, nil
}

func (s *PolicySpread) follow(p *policy.Policy) *policy.Policy {
	s.current, s.next = p, nil
	return p
}

// turn returns this node's, by what is known now of the size of the cluster.
func (s *PolicySpread) turn() turn {
	if s.options.PerThousand <= 0 {
		return turn{}
	}
	window := unknownSpread
	if s.counted {
		window = min(longestSpread, time.Duration(s.slices)*s.options.PerThousand/1000)
	}
	if window <= s.options.Negligible {
		return turn{}
	}
	return turn{time.Duration(s.position * float64(window)).Round(time.Second), window}
}

// CountSlices counts the ResourceSlices of all drivers in the cluster. It reads the metadata of one of
// them.
func CountSlices(ctx context.Context, client metadata.Interface) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	list, err := client.Resource(resourceapi.SchemeGroupVersion.WithResource("resourceslices")).List(ctx, metav1.ListOptions{Limit: 1})
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
