// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/partage-dev/partage/pkg/call"
	"github.com/partage-dev/partage/pkg/claim/lock"
	"github.com/partage-dev/partage/pkg/claim/record"
)

// lockLimit is how long to wait for the end of what the driver does to a GPU: it looks at each
// every now and then, and prepares claims.
const lockLimit = defaultLimit / 2

// reservations are the driver's locks of GPUs that this process has: while it has one, the
// driver prepares no claim on that GPU. A question that was left behind may still take one.
type reservations struct {
	calls *call.Queues

	mu       sync.Mutex
	locks    *lock.Locks
	held     map[string]func() // by PCI address
	released bool              // all, for good
}

// in returns the driver's locks.
func (r *reservations) in(dataDir string) (*lock.Locks, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.locks != nil {
		return r.locks, nil
	}
	var err error
	r.locks, err = lock.New(dataDir, r.calls)
	return r.locks, err
}

// take waits for the locks of GPUs.
func (r *reservations) take(ctx context.Context, dataDir string, pciAddresses ...string) error {
	locks, err := r.in(dataDir)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, lockLimit)
	defer cancel()
	for _, address := range pciAddresses {
		if r.has(address) {
			continue
		}
		release, err := locks.GPUs(ctx, []string{address})
		if err != nil {
			return err
		}
		r.keep(address, release)
	}
	return nil
}

func (r *reservations) has(pciAddress string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held[pciAddress] != nil
}

func (r *reservations) keep(pciAddress string, release func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released {
		release()
		return
	}
	if r.held == nil {
		r.held = map[string]func(){}
	}
	r.held[pciAddress] = release
}

// release lets the driver have a GPU again.
func (r *reservations) release(pciAddress string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if release := r.held[pciAddress]; release != nil {
		release()
		delete(r.held, pciAddress)
	}
}

// releaseAll lets the driver have all GPUs again, also those whose lock comes late.
func (r *reservations) releaseAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.released = true
	for address, release := range r.held {
		release()
		delete(r.held, address)
	}
}

// heldClaim is a claim that the driver has prepared on the node.
type heldClaim struct {
	Claim string `json:"claim"`
	// GPUs are the PCI addresses of those that it has devices of, or may have: none are all.
	GPUs []string `json:"gpus,omitempty"`
	// Unreadable is true where the driver's record of it cannot be read.
	Unreadable bool `json:"unreadable,omitempty"`
}

// claims returns the claims that are prepared on the node. What is said of a GPU stays
// true while this process has its lock.
func (n *Node) claims(ctx context.Context) ([]heldClaim, error) {
	return Ask(ctx, n, File, "prepared claims", func(context.Context) ([]heldClaim, error) {
		boot, err := n.Roots.BootID()
		if err != nil {
			return nil, err
		}
		store, err := record.Open(n.DataDir, boot, record.OS{})
		if err != nil {
			return nil, err
		}
		all := store.Snapshot() //nolint:contextcheck // it is bounded by itself
		return heldClaims(all), all.Err
	})
}

func heldClaims(all *record.Snapshot) []heldClaim {
	held := []heldClaim{}
	for _, r := range all.Records {
		one := heldClaim{Claim: r.Claim.String()}
		for i := range r.Devices {
			// Who has admin access takes nothing from others.
			if d := &r.Devices[i]; !d.Admin && !slices.Contains(one.GPUs, d.PCIAddress) {
				one.GPUs = append(one.GPUs, d.PCIAddress)
			}
		}
		held = append(held, one)
	}
	for _, file := range all.Guards {
		held = append(held, heldClaim{Claim: string(file.Claim), GPUs: file.GPUs, Unreadable: true})
	}
	return held
}

// claimed returns which claim has a device of a GPU, or may have one, as an end of "GPU X",
// or nothing.
func claimed(claims []heldClaim, pciAddress string) string {
	for _, c := range claims {
		switch {
		case c.Unreadable && c.GPUs != nil && !slices.Contains(c.GPUs, pciAddress):
		case c.Unreadable:
			return fmt.Sprintf("may be that of claim %s, whose record cannot be read", c.Claim)
		case slices.Contains(c.GPUs, pciAddress):
			return "has a device that is prepared for claim " + c.Claim
		}
	}
	return ""
}
