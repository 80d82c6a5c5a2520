// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// Index finds what was told of a claim's device.
type Index struct {
	claims map[ID]*Claim
	failed map[string]bool
}

// NewIndex makes an index of what the pods told.
func NewIndex(r *Result) *Index {
	x := &Index{claims: map[ID]*Claim{}, failed: map[string]bool{}}
	for i := range r.Claims {
		x.claims[r.Claims[i].ID] = &r.Claims[i]
	}
	for _, f := range r.Failures {
		x.failed[f.Node] = true
	}
	return x
}

// IDOf returns the identity under which the driver tells of a holding.
func IDOf(h *fleet.Holding) ID {
	id := ID{Namespace: h.Claim.Namespace, Name: h.Claim.Name, Node: h.Result.Pool, Device: h.Result.Device}
	if h.Device != nil {
		id.Node = h.Device.GPU.Node.Name
	}
	return id
}

// Of returns what was told of a holding, or nil and why nothing was.
func (x *Index) Of(h *fleet.Holding) (*Claim, string) {
	id := IDOf(h)
	if c := x.claims[id]; c != nil {
		return c, ""
	}
	if x.failed[id.Node] {
		return nil, "the driver's pod on node " + id.Node + " does not answer"
	}
	return nil, "the driver on node " + id.Node + " has not prepared it, or has no pod there"
}
