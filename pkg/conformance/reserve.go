// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
)

// lockLimit is how long to wait for the end of what the driver does to a GPU: it looks at each
// every now and then, and prepares claims.
const lockLimit = defaultLimit / 2

// reservations are the driver's locks of GPUs that this process has: while it has one, the
// driver prepares no claim on that GPU. The kernel frees those that it has at its end.
type reservations struct {
	locks func() (*lock.Locks, error) // makes the folder

	mu   sync.Mutex        // a question that was left behind may still take one
	held map[string]func() // by PCI address
}

func newReservations(dataDir string, calls *call.Queues) *reservations {
	return &reservations{locks: sync.OnceValues(func() (*lock.Locks, error) { return lock.New(dataDir, calls) }), held: map[string]func(){}}
}

// take waits for the locks of GPUs.
func (r *reservations) take(ctx context.Context, pciAddresses []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	locks, err := r.locks()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, lockLimit)
	defer cancel()
	for _, address := range pciAddresses {
		if r.held[address] != nil {
			continue
		}
		release, err := locks.GPUs(ctx, []string{address})
		if err != nil {
			return err
		}
		r.held[address] = release
	}
	return nil
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

// heldClaim is a claim that the driver has prepared on the node.
type heldClaim struct {
	Claim string `json:"claim"`
	// GPUs are the PCI addresses of those that it has devices of, or may have: none are all.
	GPUs []string `json:"gpus,omitempty"`
	// Unreadable is true where the driver's record of it cannot be read.
	Unreadable bool `json:"unreadable,omitempty"`
}

// preparedClaims keeps the driver from preparing claims on GPUs, and returns the claims that are prepared on the node.
// What is said of such a GPU stays true while this process has its lock.
func (q *inquiry) preparedClaims(gpus func(*machine) ([]string, error)) ([]heldClaim, error) {
	return decode[[]heldClaim](put(q.ctx, q.Node, File, "prepared claims", func(ctx context.Context, m *machine) ([]heldClaim, error) {
		addresses, err := gpus(m)
		if err == nil {
			err = m.reserved.take(ctx, addresses)
		}
		if err != nil {
			return nil, err
		}
		boot, err := m.Roots.BootID()
		if err != nil {
			return nil, err
		}
		store, err := record.Open(m.DataDir, boot, record.OS{})
		if err != nil {
			return nil, err
		}
		all := store.Snapshot() //nolint:contextcheck // it is bounded by itself
		return heldClaims(all), all.Err
	}))
}

// heldClaims leaves out claims of an earlier boot, of which nothing is on the hardware, and GPUs that a claim only looks at.
func heldClaims(all *record.Snapshot) []heldClaim {
	held := []heldClaim{}
	for _, r := range all.Records {
		held = append(held, heldClaim{Claim: r.Claim.String(), GPUs: slices.DeleteFunc(r.GPUs(), r.OnlyObserves)})
	}
	for _, file := range all.Guards {
		held = append(held, heldClaim{Claim: string(file.Claim.UID), GPUs: file.GPUs, Unreadable: true})
	}
	return held
}

// claimed returns which claim has a device of a GPU, or may have one, as an end of "GPU X",
// or nothing.
func claimed(claims []heldClaim, pciAddress string) string {
	for _, c := range claims {
		switch {
		case c.Unreadable && (c.GPUs == nil || slices.Contains(c.GPUs, pciAddress)):
			return fmt.Sprintf("may be that of claim %s, whose record cannot be read", c.Claim)
		case !c.Unreadable && slices.Contains(c.GPUs, pciAddress):
			return "has a device that is prepared for claim " + c.Claim
		}
	}
	return ""
}

// candidates returns the GPUs that may be worked on: the one that was asked for, or all; or why there is none.
func (q *inquiry) candidates() (found []*gpu.GPU, missing string) {
	node, err := gpus.try(q)
	if err != nil {
		return nil, fmt.Sprintf("the GPUs cannot be read: %v", err)
	}
	for i := range node.GPUs {
		if g := &node.GPUs[i]; q.header.GPU == "" || q.header.GPU == g.UUID {
			found = append(found, g)
		}
	}
	if len(found) == 0 {
		missing = "there is no GPU " + q.header.GPU
	}
	return found, missing
}

// chooseGPU returns a GPU that nobody uses, that is in compute mode DEFAULT and not in MIG
// mode, or why there is none. It keeps claims off it.
func (q *inquiry) chooseGPU() (*gpu.GPU, string) {
	candidates, missing := q.candidates()
	if missing != "" {
		return nil, missing
	}
	var reasons []string
	for _, g := range candidates {
		claims, err := q.preparedClaims(func(*machine) ([]string, error) { return []string{g.PCIAddress}, nil })
		why := claimed(claims, g.PCIAddress)
		switch {
		case err != nil:
			why = fmt.Sprintf("cannot be kept from claims: %v", err)
		case why == "" && inMIG(g):
			why = "is in MIG mode"
		case why == "":
			why = q.inUse(g, listedBefore)
		}
		if why == "" {
			return g, ""
		}
		reasons = append(reasons, g.PCIAddress+" "+why)
		if q.machine != nil {
			q.machine.reserved.release(g.PCIAddress)
		}
	}
	return nil, "no GPU is free for it: " + strings.Join(reasons, "; ")
}

// inUse returns why a GPU must be left alone, as the end of "GPU X", by the processes that NVML
// lists and what the read-only part has read.
func (q *inquiry) inUse(g *gpu.GPU, processes gpuFact[[]int]) string {
	asking, mode, state := q.anew(), gpu.ComputeDefault, gpu.MIGState{}
	pids := processes(g).of(asking)
	if hasMIG(*g) {
		state = migState(g).of(asking)
	}
	if !inMIG(g) {
		mode = computeMode(g).of(asking)
	}
	switch {
	case asking.err != nil:
		return fmt.Sprintf("cannot be read: %v", asking.err)
	case len(pids) > 0:
		return fmt.Sprintf("is used by %d processes", len(pids))
	case len(state.Instances) > 0:
		return fmt.Sprintf("has %d GPU instances", len(state.Instances))
	case mode != gpu.ComputeDefault:
		return fmt.Sprintf("is in compute mode %s", mode)
	}
	return ""
}
