// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package idle

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// reaper finds the commands that free devices and stop nothing that is not idle.
type reaper struct {
	pods []*corev1.Pod
	// idle are the claims that are listed, and claims those that pods have devices by.
	idle   map[*resourceapi.ResourceClaim]bool
	claims map[types.UID][]*resourceapi.ResourceClaim
	// said are the commands and notes that were given: an owner of several claims needs one.
	said map[string]bool
}

func newReaper(m *fleet.Model) *reaper {
	r := &reaper{pods: m.Pods, idle: map[*resourceapi.ResourceClaim]bool{}, claims: map[types.UID][]*resourceapi.ResourceClaim{}, said: map[string]bool{}}
	for _, h := range m.Holdings {
		for _, u := range h.Claim.Status.ReservedFor {
			if !h.Admin() && !slices.Contains(r.claims[u.UID], h.Claim) {
				r.claims[u.UID] = append(r.claims[u.UID], h.Claim)
			}
		}
	}
	return r
}

// uses reports whether a pod has devices that are not idle.
func (r *reaper) uses(pod types.UID) bool {
	return slices.ContainsFunc(r.claims[pod], func(c *resourceapi.ResourceClaim) bool { return !r.idle[c] })
}

// reap adds to a claim what its pods belong to, and the commands that would free its devices.
func (r *reaper) reap(c *Claim) {
	h := c.holding
	c.Freed = true
	for _, p := range h.Pods {
		kind, name := fleet.OwnerOf(p)
		if owner := kind + "/" + name; kind != "" && !slices.Contains(c.Owners, owner) {
			c.Owners = append(c.Owners, owner)
		}
		if c.Reason == PodsDone {
			r.say(&c.Commands, fleet.DeleteCommand("pod", p.Namespace, p.Name))
			continue
		}
		all, busy := r.members(p, kind, name)
		if busy == 0 {
			r.say(&c.Commands, command(p, kind, name))
			continue
		}
		what := busyElsewhere(p.Name)
		if all > 1 {
			what = fmt.Sprintf("%d of %d pods of %s %s are not idle, and no command stops the others alone", busy, all, kind, name)
		}
		c.Freed = false
		r.say(&c.Notes, p.Namespace+": "+what)
	}
	users := h.Users()
	if len(users) == 0 {
		r.say(&c.Commands, fleet.DeleteCommand("resourceclaim", h.Claim.Namespace, h.Claim.Name))
	}
	for _, u := range users {
		// Where no pod could be read, their names are known.
		switch {
		case len(h.Pods) > 0:
		case r.uses(u.UID):
			c.Freed = false
			r.say(&c.Notes, u.Namespace+": "+busyElsewhere(u.Name))
		default:
			r.say(&c.Commands, fleet.DeleteCommand(u.Resource, u.Namespace, u.Name))
		}
	}
}

// members counts the pods that a command about a pod would stop, and how many of them do something: they use devices, or run without any.
// One that has neither devices nor a node has nothing to lose.
func (r *reaper) members(pod *corev1.Pod, kind, name string) (all, busy int) {
	for _, p := range r.pods {
		k, n := fleet.OwnerOf(p)
		together := scalable(kind) && p.Namespace == pod.Namespace && k == kind && n == name
		if p != pod && !together || fleet.Ended(p) {
			continue
		}
		if all++; r.uses(p.UID) || len(r.claims[p.UID]) == 0 && p.Spec.NodeName != "" {
			busy++
		}
	}
	return all, busy
}

func busyElsewhere(pod string) string {
	return "pod " + pod + " has other devices, which are not idle"
}

func (r *reaper) say(list *[]string, text string) {
	if !r.said[text] {
		r.said[text] = true
		*list = append(*list, text)
	}
}

// scalable reports whether the pods of an owner are stopped together.
func scalable(kind string) bool {
	return slices.Contains([]string{"Deployment", "ReplicaSet", "StatefulSet", "Job"}, kind)
}

// command frees what a pod has, for good: a pod that something else makes anew is of no use.
func command(p *corev1.Pod, kind, name string) string {
	switch {
	case kind == "Job":
		return fleet.DeleteCommand("job", p.Namespace, name)
	case scalable(kind):
		return fmt.Sprintf("kubectl scale -n %s %s/%s --replicas=0", p.Namespace, strings.ToLower(kind), name)
	}
	return fleet.DeleteCommand("pod", p.Namespace, p.Name)
}
