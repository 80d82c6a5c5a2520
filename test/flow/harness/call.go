// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

const (
	// KubeletTimeout is how long the kubelet waits for a call.
	KubeletTimeout = 45 * time.Second
	// ReleaseTimeout is for releases, which take 20 seconds at most where the machine is not busy.
	ReleaseTimeout = 30 * time.Second
	// ShortTimeout cuts retries inside the driver short where only the outcome matters.
	ShortTimeout = time.Second
	// TinyTimeout is for calls that cannot succeed, and would wait for what is in the way.
	TinyTimeout = 300 * time.Millisecond
)

// Operation is what the driver does when a fault strikes.
type Operation string

// Prepare and Unprepare are the kubelet's calls; Observe is what the driver does by
// itself every now and then.
const (
	Prepare   Operation = "prepare"
	Unprepare Operation = "unprepare"
	Observe   Operation = "observe"
)

// Call makes one call for one claim.
func (p *Driver) Call(ctx context.Context, o Operation, claim *drapb.Claim, limit time.Duration) ([]string, error) {
	if o == Prepare {
		return p.TryPrepare(ctx, claim, limit)
	}
	return nil, p.TryUnprepare(ctx, claim, limit)
}

// TryPrepare is MustPrepare for any goroutine, and makes one call only.
func (p *Driver) TryPrepare(ctx context.Context, claim *drapb.Claim, limit time.Duration) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	response, err := p.Kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil {
		return nil, err
	}
	answer, found := response.GetClaims()[claim.GetUid()]
	switch {
	case !found:
		return nil, fmt.Errorf("no answer for claim %s", claim.GetName())
	case answer.GetError() != "":
		return nil, errors.New(answer.GetError())
	}
	return CDIIDs(answer), nil
}

// TryUnprepare is MustUnprepare for any goroutine.
func (p *Driver) TryUnprepare(ctx context.Context, claim *drapb.Claim, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	response, err := p.Kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil {
		return err
	}
	answer, found := response.GetClaims()[claim.GetUid()]
	switch {
	case !found:
		return fmt.Errorf("no answer for claim %s", claim.GetName())
	case answer.GetError() != "":
		return errors.New(answer.GetError())
	}
	return nil
}

// Release repeats the kubelet's call until it succeeds, and returns the last error.
func (p *Driver) Release(ctx context.Context, claim *drapb.Claim) error {
	return Eventually(ctx, func() error { return p.TryUnprepare(ctx, claim, ReleaseTimeout) })
}

// IsTimeout reports whether a deadline ended a call, so that its result is unknown: the
// caller's, or the driver's own for calls into the library.
func IsTimeout(err error) bool {
	return status.Code(err) == codes.DeadlineExceeded || IsHung(err)
}

// IsHung reports whether the driver gave up waiting for a call into the
// library. A call that is slow because the machine is busy counts as one that
// hangs.
func IsHung(err error) bool {
	return err != nil && strings.Contains(err.Error(), "has not returned")
}

// Eventually waits until check returns nil, even when the driver ends.
func Eventually(ctx context.Context, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return nil
		}
		if Soon(ctx) != nil {
			return err
		}
	}
}

// Soon waits a little before the next attempt. It fails when ctx ends.
func Soon(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(5 * time.Millisecond):
		return nil
	}
}

// Patience bounds waits that a passing test never comes near, on a busy machine
// either.
const Patience = 2 * time.Minute
