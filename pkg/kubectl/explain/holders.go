// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// most is how many nodes are looked at for claims that could end.
const most = 16

// inTheWay finds the claims that have what the requests could use.
func inTheWay(ctx context.Context, s *sight, j *judge) {
	nodes, left := 0, 0
	for _, n := range slices.SortedFunc(slices.Values(s.nodes), func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) }) {
		if nodes == most {
			left++
		} else if on := holdersOn(ctx, s, j, n); len(on) > 0 {
			s.InTheWay = append(s.InTheWay, on...)
			nodes++
		}
	}
	if left > 0 {
		s.note("Who is in the way was not looked for on %d more nodes.", left)
	}
}

func holdersOn(ctx context.Context, s *sight, j *judge, n *corev1.Node) []Holder {
	byClaim := map[*resourceapi.ResourceClaim]sets.Set[string]{}
	add := func(p *allocation.Pool, device string) {
		for _, h := range j.planner.Held(p, device) {
			// The pod cannot wait for the end of what it needs itself.
			if slices.Contains(s.own, h.Claim) {
				continue
			}
			if byClaim[h.Claim] == nil {
				byClaim[h.Claim] = sets.New[string]()
			}
			byClaim[h.Claim].Insert(device)
		}
	}
	for _, a := range asksOf(s.wanted(nil)...) {
		for _, f := range j.onNode(ctx, n, a) {
			if cause := f.cause(); cause == Held || cause == CapacityUsed {
				add(f.Pool, f.Device.Name)
			}
			if f.cause() != Withdrawn && slices.Contains(f.causes, CountersUsed) {
				for _, name := range neighbours(f.Pool, f.Device) {
					add(f.Pool, name)
				}
			}
		}
	}
	var out []Holder
	for c, devices := range byClaim {
		out = append(out, holder(c, n.Name, sets.List(devices), s.x.now))
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(len(a.Pods), len(b.Pods)), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Claim, b.Claim))
	})
	return out
}

// holder says what a claim has, for people and programs.
func holder(c *resourceapi.ResourceClaim, node string, devices []string, now time.Time) Holder {
	h := Holder{Namespace: c.Namespace, Claim: c.Name, Node: node, Devices: devices, claim: c}
	for _, r := range c.Status.ReservedFor {
		h.Pods = append(h.Pods, r.Name)
	}
	if since := fleet.AllocatedAt(c); !since.IsZero() {
		h.Since, h.For = &since, &metav1.Duration{Duration: now.Sub(since.Time)}
	}
	return h
}

// neighbours returns the devices that need the same counters as one.
func neighbours(p *allocation.Pool, d *resourceapi.Device) []string {
	var out []string
	for _, s := range p.Slices {
		for i := range s.Spec.Devices {
			other := &s.Spec.Devices[i]
			if other.Name != d.Name && overlap(d, other) {
				out = append(out, other.Name)
			}
		}
	}
	return out
}

func overlap(a, b *resourceapi.Device) bool {
	for _, x := range a.ConsumesCounters {
		for _, y := range b.ConsumesCounters {
			if x.CounterSet != y.CounterSet {
				continue
			}
			for name, c := range x.Counters {
				if o, has := y.Counters[name]; has && !c.Value.IsZero() && !o.Value.IsZero() {
					return true
				}
			}
		}
	}
	return false
}
