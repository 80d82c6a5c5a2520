// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// KubeletTimeout is what the kubelet gives a call. hurry is for calls of which
// only the end matters: repetitions inside the driver are cut short. glance is for
// calls that cannot succeed and would wait for something that does not happen.
const (
	KubeletTimeout = 45 * time.Second
	ShortTimeout   = time.Second
	TinyTimeout    = 300 * time.Millisecond
)

// Operation is one of the two calls, for most purposes.
type Operation string

const (
	Prepare   Operation = "prepare"
	Unprepare Operation = "unprepare"
	// look is what the driver does by itself.
	Look Operation = "look"
)

// Call makes one call for one claim.
func (p *Driver) Call(ctx context.Context, o Operation, claim *drapb.Claim, limit time.Duration) ([]string, error) {
	if o == Prepare {
		return p.TryPrepare(ctx, claim, limit)
	}
	return nil, p.TryUnprepare(ctx, claim, limit)
}

// TryPrepare makes one call for one claim and returns the CDI ids of its
// devices in the order of its requests, or the claim's error. Unlike the
// methods that end the test it may be called from any goroutine.
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
	devices := slices.Clone(answer.GetDevices())
	slices.SortFunc(devices, func(a, b *drapb.Device) int { return strings.Compare(a.RequestNames[0], b.RequestNames[0]) })
	var ids []string
	for _, d := range devices {
		ids = append(ids, d.GetCdiDeviceIds()...)
	}
	return ids, nil
}

// TryUnprepare is tryPrepare for the other operation.
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

// IsTimeout tells whether the test's own deadline ended a call, so that
// nothing is known of its result, or has just ended one of the driver's own.
func IsTimeout(err error) bool {
	return status.Code(err) == codes.DeadlineExceeded || IsHung(err)
}

// IsHung reports whether the driver gave up waiting for a call into the
// library. A call that is slow because the machine is busy counts as one that
// hangs.
func IsHung(err error) bool {
	return err != nil && strings.Contains(err.Error(), "has not returned")
}

// Eventually waits until check returns nil, whatever becomes of the driver.
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

// Soon waits a little, or fails when ctx ends.
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
