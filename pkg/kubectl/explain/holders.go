// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// most is how many nodes are looked at for claims that could end, and mostPairs how many claims
// of a node for two that could end together.
const (
	most      = 16
	mostPairs = 12
)

type deviceName struct{ driver, pool, device string }

// inTheWay finds the claims that have what the requests could use, by node.
func inTheWay(ctx context.Context, s *sight, j *judge) (map[string][]Holder, found) {
	byDevice := map[deviceName][]*resourceapi.ResourceClaim{}
	for _, c := range s.x.planner.Claims() {
		// The pod cannot wait for the end of what it needs itself.
		if slices.Contains(s.own, c) {
			continue
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			if !ptr.Deref(r.AdminAccess, false) {
				d := deviceName{r.Driver, r.Pool, r.Device}
				byDevice[d] = append(byDevice[d], c)
			}
		}
	}
	held, left := map[string][]Holder{}, 0
	for _, n := range s.nodes {
		if len(held) == most {
			left++
		} else if on := holdingsOn(ctx, s, j, n, byDevice); len(on) > 0 {
			held[n.Name] = on
		}
	}
	if left > 0 {
		return held, found{notes: []string{fmt.Sprintf("Who is in the way was not looked for on %d more nodes.", left)}}
	}
	return held, found{}
}

func holdingsOn(ctx context.Context, s *sight, j *judge, n *corev1.Node, byDevice map[deviceName][]*resourceapi.ResourceClaim) []Holder {
	byClaim := map[*resourceapi.ResourceClaim]sets.Set[string]{}
	add := func(p *allocation.Pool, device string) {
		for _, c := range byDevice[deviceName{p.Driver, p.Name, device}] {
			if byClaim[c] == nil {
				byClaim[c] = sets.New[string]()
			}
			byClaim[c].Insert(device)
		}
	}
	for _, c := range s.wanted(nil) {
		for _, a := range asksOf(c) {
			for _, f := range j.onNode(ctx, n, a) {
				if cause := f.cause(); cause == Held || cause == CapacityUsed {
					add(f.pool, f.device.Name)
				}
				if slices.Contains(f.causes, CountersUsed) {
					for _, name := range neighbours(f.pool, f.device) {
						add(f.pool, name)
					}
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

// fewest returns a smallest set of claims after whose end it fits or, of many claims, one of
// which none can be spared. It is nil if not even the end of all is enough.
func fewest(claims []*resourceapi.ResourceClaim, fits func(...*resourceapi.ResourceClaim) bool) []*resourceapi.ResourceClaim {
	if !fits(claims...) {
		return nil
	}
	for _, c := range claims {
		if fits(c) {
			return []*resourceapi.ResourceClaim{c}
		}
	}
	if len(claims) <= mostPairs {
		for i, c := range claims {
			for _, d := range claims[i+1:] {
				if fits(c, d) {
					return []*resourceapi.ResourceClaim{c, d}
				}
			}
		}
	}
	set := slices.Clone(claims)
	for i := len(set) - 1; i >= 0; i-- {
		if without := slices.Delete(slices.Clone(set), i, i+1); fits(without...) {
			set = without
		}
	}
	return set
}
