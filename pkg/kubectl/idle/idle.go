// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package idle finds claims that hold devices which nothing uses, and says how to free them.
package idle

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// Reasons for which a claim is listed.
const (
	// Idle: nothing has run on any of its devices for a while.
	Idle = "Idle"
	// PodsDone: all pods that the claim is reserved for have ended.
	PodsDone = "PodsDone"
	// Unused: the claim is allocated, and reserved for nobody.
	Unused = "Unused"
)

// grace is how long a claim may be idle, or reserved for nobody, before that says anything: it is reserved for nobody for a moment while a
// pod is scheduled.
const grace = time.Minute

// ClaimList is what the command prints.
type ClaimList struct {
	metav1.TypeMeta `json:",inline"`

	// ForSeconds is for how long a claim must have been idle.
	ForSeconds float64 `json:"forSeconds"`
	Items      []Claim `json:"items"`
	// Less is how many have been idle for a while, but not for as long.
	Less int `json:"idleForLess,omitempty"`
	// Unknown is how many claims may be idle or not.
	Unknown int `json:"unknown,omitempty"`
	// Young are nodes whose driver has not looked for that long: who is idle there is not known.
	Young []Young `json:"young,omitempty"`
}

// Young is a node whose driver has been running for a short time.
type Young struct {
	Node    string  `json:"node"`
	Seconds float64 `json:"seconds"`
}

// Claim is one that holds devices which nothing uses.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Reason    string `json:"reason"`
	// IdleSeconds is for how long nothing has run, as far as it is known.
	IdleSeconds *float64 `json:"idleSeconds,omitempty"`
	// IdleForLonger says that it may have been longer: it is the time since the driver was started.
	IdleForLonger bool `json:"idleForLonger,omitempty"`
	// GPUs is how much it keeps from others, in GPUs.
	GPUs    float64  `json:"gpus"`
	Devices []Device `json:"devices"`
	Pods    []Pod    `json:"pods,omitempty"`
	// Owners are what the pods belong to, such as Deployment/web.
	Owners []string `json:"owners,omitempty"`
	// Commands would free the devices, and stop nothing that is not idle. What frees those of several claims is at the first.
	Commands []string `json:"commands"`
	// Freed means that the commands, of this claim or of an earlier one, free its devices.
	Freed bool `json:"freed"`
	// Notes say why there is no command.
	Notes []string `json:"notes,omitempty"`

	holding *fleet.Holding
}

// Device is one that the claim has.
type Device struct {
	Node    string `json:"node"`
	Name    string `json:"name"`
	Type    string `json:"type,omitempty"`
	Profile string `json:"profile,omitempty"`
}

// Pod is one that the claim is reserved for.
type Pod struct {
	Name  string `json:"name"`
	Phase string `json:"phase"`
}

// Query says what is looked for.
type Query struct {
	// For is how long a claim must have been idle.
	For time.Duration
	// Now is when.
	Now time.Time
	fleet.Scope
}

// Find returns the claims that hold devices which nothing uses, with those first that hold the
// most.
func Find(m *fleet.Model, r *scrape.Result, q Query) *ClaimList {
	list := &ClaimList{TypeMeta: printer.TypeMeta("IdleClaimList"), ForSeconds: q.For.Seconds(), Items: []Claim{}, Young: young(r, q)}
	reaper := newReaper(m)
	for i := 0; i < len(m.Holdings); {
		// The holdings of a claim follow each other.
		all := []*fleet.Holding{m.Holdings[i]}
		for i++; i < len(m.Holdings) && m.Holdings[i].Claim == all[0].Claim; i++ {
			all = append(all, m.Holdings[i])
		}
		// A claim with admin access keeps nothing from others.
		all = slices.DeleteFunc(all, (*fleet.Holding).Admin)
		if len(all) == 0 || !q.Has(all[0]) {
			continue
		}
		idle := idleFor(all, r)
		if reason := reasonOf(all[0], idle, q); reason == "" && (idle == nil || shortly(all, r, q)) {
			list.Unknown++
		} else if reason == "" && *idle >= grace {
			list.Less++
		} else if reason != "" {
			reaper.idle[all[0].Claim] = true
			c := newClaim(all, reason, idle)
			c.IdleForLonger = idle != nil && atLeast(all, r, q.Now)
			list.Items = append(list.Items, c)
		}
	}
	slices.SortStableFunc(list.Items, func(a, b Claim) int { return cmp.Compare(b.GPUs, a.GPUs) })
	for i := range list.Items {
		reaper.reap(&list.Items[i])
	}
	return list
}

// idleFor returns for how long nothing has run on any of the devices, or nil if that is not
// known of all.
func idleFor(all []*fleet.Holding, r *scrape.Result) *time.Duration {
	var least *time.Duration
	for _, h := range all {
		told, _ := r.Of(h)
		if told == nil || told.Idle == nil {
			return nil
		}
		if least == nil || *told.Idle < *least {
			least = told.Idle
		}
	}
	return least
}

// shortly reports whether the driver has not looked at a device for as long as a claim must have been idle.
func shortly(all []*fleet.Holding, r *scrape.Result, q Query) bool {
	return slices.ContainsFunc(all, func(h *fleet.Holding) bool {
		told, _ := r.Of(h)
		since := fleet.AllocatedAt(h.Claim).Time
		return told != nil && q.Now.Sub(since) >= q.For && told.IdleForLonger(since, q.Now)
	})
}

// atLeast reports whether a claim may have been idle for longer than is known.
func atLeast(all []*fleet.Holding, r *scrape.Result, now time.Time) bool {
	return slices.ContainsFunc(all, func(h *fleet.Holding) bool {
		told, _ := r.Of(h)
		return told != nil && told.IdleForLonger(fleet.AllocatedAt(h.Claim).Time, now)
	})
}

func reasonOf(h *fleet.Holding, idle *time.Duration, q Query) string {
	switch reserved := h.Claim.Status.ReservedFor; {
	case len(reserved) == 0 && q.Now.Sub(fleet.AllocatedAt(h.Claim).Time) >= grace:
		return Unused
	case len(reserved) > 0 && len(h.Pods) == len(reserved) && !slices.ContainsFunc(h.Pods, func(p *corev1.Pod) bool { return !fleet.Ended(p) }):
		return PodsDone
	case idle != nil && *idle >= q.For:
		return Idle
	}
	return ""
}

func newClaim(all []*fleet.Holding, reason string, idle *time.Duration) Claim {
	h := all[0]
	c := Claim{Namespace: h.Claim.Namespace, Name: h.Claim.Name, Reason: reason, Commands: []string{}, holding: h}
	if idle != nil {
		c.IdleSeconds = new(idle.Seconds())
	}
	for _, one := range all {
		d := Device{Node: scrape.IDOf(one).Node, Name: one.Result.Device}
		if one.Device != nil {
			d.Type, d.Profile = one.Device.Type, one.Device.Profile
		}
		c.Devices = append(c.Devices, d)
		c.GPUs += one.Part()
	}
	for _, p := range h.Pods {
		c.Pods = append(c.Pods, Pod{Name: p.Name, Phase: string(p.Status.Phase)})
	}
	return c
}

// young returns nodes whose driver has not looked for long enough, each once.
func young(r *scrape.Result, q Query) (all []Young) {
	for _, c := range r.Claims {
		if looked := q.Now.Sub(c.Since); !c.Since.IsZero() && looked < q.For {
			all = append(all, Young{Node: c.Node, Seconds: looked.Seconds()})
		}
	}
	slices.SortFunc(all, func(a, b Young) int { return cmp.Compare(a.Node, b.Node) })
	return slices.CompactFunc(all, func(a, b Young) bool { return a.Node == b.Node })
}
