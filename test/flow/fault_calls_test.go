// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// kubeletTime is what the kubelet gives a call. hurry is for calls of which
// only the end matters: repetitions inside the driver are cut short. glance is for
// calls that cannot succeed and would wait for something that does not happen.
const (
	kubeletTime = 45 * time.Second
	hurry       = time.Second
	glance      = 300 * time.Millisecond
)

// operation is one of the two calls, for most purposes.
type operation string

const (
	prepare   operation = "prepare"
	unprepare operation = "unprepare"
	// look is what the driver does by itself.
	look operation = "look"
)

// try makes one call for one claim.
func (p *process) try(ctx context.Context, o operation, claim *drapb.Claim, limit time.Duration) ([]string, error) {
	if o == prepare {
		return p.tryPrepare(ctx, claim, limit)
	}
	return nil, p.tryUnprepare(ctx, claim, limit)
}

// tryPrepare makes one call for one claim and returns the CDI ids of its
// devices in the order of its requests, or the claim's error. Unlike the
// methods that end the test it may be called from any goroutine.
func (p *process) tryPrepare(ctx context.Context, claim *drapb.Claim, limit time.Duration) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	response, err := p.kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
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

// tryUnprepare is tryPrepare for the other operation.
func (p *process) tryUnprepare(ctx context.Context, claim *drapb.Claim, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	response, err := p.kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
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

// tookTooLong tells whether the test's own deadline ended a call, so that
// nothing is known of its result, or has just ended one of the driver's own.
func tookTooLong(err error) bool {
	return status.Code(err) == codes.DeadlineExceeded || leftBehind(err)
}

// leftBehind reports whether the driver gave up waiting for a call into the
// library. A call that is slow because the machine is busy counts as one that
// hangs.
func leftBehind(err error) bool {
	return err != nil && strings.Contains(err.Error(), "has not returned")
}

// injected is a fault that is in force until it is removed.
type injected struct {
	n  *node
	id int
}

func (n *node) tryInject(f machine.Fault) (*injected, error) {
	i := &injected{n: n}
	err := n.state.Update(func(m *machine.Machine) error {
		i.id = state.AddFault(m, f)
		return nil
	})
	return i, err
}

// inject makes calls go wrong until the fault is removed.
func (n *node) inject(t testing.TB, f machine.Fault) *injected {
	t.Helper()
	i, err := n.tryInject(f)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// tryRemove returns how many calls were struck.
func (i *injected) tryRemove() (struck uint64, err error) {
	err = i.n.state.Update(func(m *machine.Machine) error {
		at := slices.IndexFunc(m.Faults, func(f machine.Fault) bool { return f.ID == i.id })
		if at < 0 {
			return fmt.Errorf("fault %d is not there", i.id)
		}
		struck = m.Faults[at].Struck
		state.RemoveFault(m, i.id)
		return nil
	})
	return struck, err
}

func (i *injected) remove(t testing.TB) {
	t.Helper()
	if _, err := i.tryRemove(); err != nil {
		t.Fatal(err)
	}
}

// tryStruck returns how many calls were struck up to now.
func (i *injected) tryStruck() (uint64, error) {
	m, err := i.n.state.Snapshot()
	if err != nil {
		return 0, err
	}
	at := slices.IndexFunc(m.Faults, func(f machine.Fault) bool { return f.ID == i.id })
	if at < 0 {
		return 0, fmt.Errorf("fault %d is not there", i.id)
	}
	return m.Faults[at].Struck, nil
}

// struck waits until a call was struck.
func (i *injected) struck(t testing.TB, p *process) {
	t.Helper()
	p.until(t, "a call that is struck by the fault", func(context.Context) error { return i.tryHasStruck() })
}

// tryHasStruck fails unless a call was struck.
func (i *injected) tryHasStruck() error {
	struck, err := i.tryStruck()
	if err == nil && struck == 0 {
		err = errors.New("no call was struck yet")
	}
	return err
}

// update changes the machine as somebody else would.
func (n *node) update(t testing.TB, change func(*machine.Machine)) {
	t.Helper()
	err := n.state.Update(func(m *machine.Machine) error {
		change(m)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// eventually waits until check returns nil, whatever becomes of the driver.
func (n *node) eventually(ctx context.Context, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, eventually)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return nil
		}
		if soon(ctx) != nil {
			return err
		}
	}
}

// soon waits a little, or fails when ctx ends.
func soon(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(5 * time.Millisecond):
		return nil
	}
}

// address is the PCI address of a GPU.
func (n *node) address(t testing.TB, gpu int) string {
	t.Helper()
	return n.machine(t).GPUs[gpu].PCIAddress
}
