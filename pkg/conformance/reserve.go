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
func (r *reservations) take(ctx context.Context, pciAddresses ...string) error {
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
		if r.held[address], err = locks.GPUs(ctx, []string{address}); err != nil {
			delete(r.held, address)
			return err
		}
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

// reserve keeps the driver from preparing claims on a GPU, and on those of more, and returns the
// claims that are prepared on the node; or why that is not possible, as the end of "GPU X".
func (n *Node) reserve(ctx context.Context, g *gpu.GPU, more func(*machine) ([]string, error)) (claims []heldClaim, why string) {
	_, err := ask(ctx, n, File, "lock GPU "+g.PCIAddress+" against claims", func(ctx context.Context, m *machine) (bool, error) {
		addresses, err := more(m)
		if err != nil {
			return false, err
		}
		return true, m.reserved.take(ctx, append(addresses, g.PCIAddress)...)
	})
	if err != nil {
		return nil, fmt.Sprintf("cannot be kept from claims: %v", err)
	}
	claims, err = preparedClaims(ctx, n)
	if err != nil {
		return nil, fmt.Sprintf("may have claims, which cannot be read: %v", err)
	}
	return claims, ""
}

// candidates returns the GPUs that may be worked on: the one that was asked for, or all; or why there is none.
func (n *Node) candidates(ctx context.Context) (found []*gpu.GPU, missing string) {
	node, err := gpus.answer(ctx, n)
	if err != nil {
		return nil, fmt.Sprintf("the GPUs cannot be read: %v", err)
	}
	for i := range node.GPUs {
		if g := &node.GPUs[i]; n.header.GPU == "" || n.header.GPU == g.UUID {
			found = append(found, g)
		}
	}
	if len(found) == 0 {
		missing = "there is no GPU " + n.header.GPU
	}
	return found, missing
}

// chooseGPU returns a GPU that nobody uses, that is in compute mode DEFAULT and not in MIG
// mode, or why there is none. It keeps claims off it.
func (n *Node) chooseGPU(ctx context.Context) (*gpu.GPU, string) {
	_, err := onDaemon(ctx, n, Daemon, "end what an earlier run left", func(ctx context.Context, d *daemon) (bool, error) { return true, d.sweep(ctx) })
	if err != nil {
		return nil, err.Error()
	}
	candidates, missing := n.candidates(ctx)
	if missing != "" {
		return nil, missing
	}
	var reasons []string
	for _, g := range candidates {
		why := n.reserveUnused(ctx, g)
		if why == "" {
			return g, ""
		}
		reasons = append(reasons, g.PCIAddress+" "+why)
	}
	return nil, "no GPU is free for it: " + strings.Join(reasons, "; ")
}

// reserveUnused keeps claims off a GPU, unless that cannot be used; then it returns why.
func (n *Node) reserveUnused(ctx context.Context, g *gpu.GPU) string {
	claims, why := n.reserve(ctx, g, func(*machine) ([]string, error) { return nil, nil })
	if why != "" {
		return why
	}
	if why = claimed(claims, g.PCIAddress); why == "" && inMIG(g) {
		why = "is in MIG mode"
	}
	if why == "" {
		why = n.inUse(ctx, g, listedBefore)
	}
	if why != "" && n.machine != nil {
		n.machine.reserved.release(g.PCIAddress)
	}
	return why
}

// inUse returns why a GPU must be left alone, as the end of "GPU X", by the processes that NVML
// lists and what part A has read.
func (n *Node) inUse(ctx context.Context, g *gpu.GPU, processes gpuFact[[]int]) string {
	pids, err := processes(g).answer(ctx, n)
	var state gpu.MIGState
	if err == nil && hasMIG(*g) {
		state, err = migState(g).answer(ctx, n)
	}
	mode := gpu.ComputeDefault
	if err == nil && !inMIG(g) {
		mode, err = computeMode(g).answer(ctx, n)
	}
	switch {
	case err != nil:
		return fmt.Sprintf("cannot be read: %v", err)
	case len(pids) > 0:
		return fmt.Sprintf("is used by %d processes", len(pids))
	case len(state.Instances) > 0:
		return fmt.Sprintf("has %d GPU instances", len(state.Instances))
	case mode != gpu.ComputeDefault:
		return fmt.Sprintf("is in compute mode %s", mode)
	}
	return ""
}

// heldClaim is a claim that the driver has prepared on the node.
type heldClaim struct {
	Claim string `json:"claim"`
	// GPUs are the PCI addresses of those that it has devices of, or may have: none are all.
	GPUs []string `json:"gpus,omitempty"`
	// Unreadable is true where the driver's record of it cannot be read.
	Unreadable bool `json:"unreadable,omitempty"`
}

// preparedClaims returns the claims that are prepared on the node. What is said of a GPU stays
// true while this process has its lock.
func preparedClaims(ctx context.Context, n *Node) ([]heldClaim, error) {
	return ask(ctx, n, File, "prepared claims", func(_ context.Context, m *machine) ([]heldClaim, error) {
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
	})
}

// heldClaims leaves out claims of an earlier boot, of which nothing is on the hardware.
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
