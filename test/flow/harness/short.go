// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// Run is Start for a driver that is ready.
func (n *Node) Run(t testing.TB, flags ...string) *Driver {
	t.Helper()
	p := n.Start(t, flags...)
	p.Ready(t)
	return p
}

// NewDriver is a node with a driver that is ready.
func NewDriver(t testing.TB, machineName string, flags ...string) (*Node, *Driver) {
	t.Helper()
	n := NewNode(t, machineName)
	return n, n.Run(t, flags...)
}

// NewMPSDriver is NewDriver with an MPS supervisor.
func NewMPSDriver(t testing.TB, machineName string, flags ...string) (*Node, *Driver) {
	t.Helper()
	n := NewNode(t, machineName)
	n.StartSupervisor(t)
	return n, n.Run(t, flags...)
}

// UntilTrue is Until for a condition that says nothing more.
func (p *Process) UntilTrue(t testing.TB, what string, is func() bool) {
	t.Helper()
	p.Until(t, what, func(context.Context) error {
		if !is() {
			return errors.New("not yet")
		}
		return nil
	})
}

// NewClaim allocates and prepares a claim for one device.
func (p *Driver) NewClaim(t testing.TB, n *Node, device Device, configs ...Config) (claim *drapb.Claim, ids []string) {
	t.Helper()
	claim = n.Allocate(t, []Device{device}, configs...)
	return claim, p.MustPrepare(t, claim)
}

// WantFree fails the test unless a claim for each device comes and goes, one after the other.
func (p *Driver) WantFree(t testing.TB, n *Node, devices ...Device) {
	t.Helper()
	for _, d := range devices {
		claim, _ := p.NewClaim(t, n, d)
		p.MustUnprepare(t, claim)
	}
}

// WantTaken fails if a claim for one of the devices is prepared, all of which are asked for at the same time. A claim
// that waits for what is in its way is not prepared either, so that the test does not wait for the end of the call.
func (p *Driver) WantTaken(t testing.TB, n *Node, why string, devices ...Device) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	claims, refused := make([]*drapb.Claim, len(devices)), make([]atomic.Bool, len(devices))
	var calls sync.WaitGroup
	for i, d := range devices {
		claims[i] = n.Allocate(t, []Device{d})
		calls.Go(func() {
			if _, err := p.TryPrepare(ctx, claims[i], KubeletTimeout); err == nil {
				t.Errorf("%+v is prepared: %s", d, why)
			}
			refused[i].Store(true)
		})
	}
	for i, c := range claims {
		waits := regexp.MustCompile(`"Waiting".* claimUID="` + c.GetUid() + `"`)
		p.UntilTrue(t, "a claim to be refused, or to wait", func() bool { return refused[i].Load() || waits.MatchString(p.Log.String()) })
	}
	cancel()
	calls.Wait()
	p.MustUnprepare(t, claims...)
}

// WantDevice fails unless CheckDevice is content with a device of a claim.
func (n *Node) WantDevice(t testing.TB, claim *drapb.Claim, id string, d Device) {
	t.Helper()
	if err := n.CheckDevice(claim.GetUid(), id, d, &n.Machine(t).GPUs[d.GPU]); err != nil {
		t.Errorf("claim %s, %+v: %v", claim.GetName(), d, err)
	}
}

// WantPrepared fails unless CheckPrepared is content with a claim for one device.
func (n *Node) WantPrepared(t testing.TB, claim *drapb.Claim, ids []string, d Device) {
	t.Helper()
	if err := n.CheckPrepared(claim.GetUid(), ids, d.GPU, Place{Profile: d.Profile, Start: d.Start}); err != nil {
		t.Errorf("claim %s, %+v: %v", claim.GetName(), d, err)
	}
}
