// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// sight is what was read about one pod or claim, and what is said of it. What stands in the way, and what would help, are functions of it.
type sight struct {
	*Explanation
	x *Explainer
	// pod is nil where a claim is asked for alone.
	pod *corev1.Pod
	// references are what the pod calls its claims, own are all of these that there are, and claims those that have to be allocated
	// together.
	references  []allocation.PodClaim
	own, claims []*resourceapi.ResourceClaim
	// planned are claims as they would be allocated.
	planned []*resourceapi.ResourceClaim
	// nodes are those that nothing but devices keeps the pod from, and excluded the others.
	nodes    []*corev1.Node
	excluded []exclusion
	// kinds returns these nodes, those together that are alike for the claims which have to be allocated.
	kinds func() [][]*corev1.Node
}

type exclusion struct {
	node      *corev1.Node
	obstacles []allocation.Obstacle
}

// byClaim is an obstacle that filters of nodes do not know.
const byClaim allocation.ObstacleKind = "ClaimElsewhere"

// look reads what there is about a pod.
func (s *sight) look(pod *corev1.Pod) {
	s.pod, s.references = pod, allocation.ClaimsOf(s.x.model.Snapshot, pod)
	for _, c := range s.references {
		if c.Err == nil && c.Claim != nil {
			s.own = append(s.own, c.Claim)
		}
	}
	if status := pod.Status.ExtendedResourceClaimStatus; status != nil {
		if c := s.x.model.Claim(pod.Namespace, status.ResourceClaimName); c != nil {
			s.own = append(s.own, c)
		}
	}
}

// place tells the nodes apart that the pod may run on, devices aside.
func (s *sight) place() {
	cluster := s.x.planner.Cluster
	for _, n := range cluster.Nodes {
		obstacles := s.x.planner.Obstacles(s.pod, n)
		for _, c := range s.own {
			selector := ptr.Deref(c.Status.Allocation, resourceapi.AllocationResult{}).NodeSelector
			if selector == nil || cluster.Unread(n) && selectsLabels(selector) {
				continue
			}
			if matches, err := nodeaffinity.NewLazyErrorNodeSelector(selector).Match(n); err != nil || !matches {
				obstacles = append(obstacles, allocation.Obstacle{Kind: byClaim, Text: fmt.Sprintf("claim %s has its devices on another node", c.Name)})
			}
		}
		if len(obstacles) > 0 {
			s.excluded = append(s.excluded, exclusion{n, obstacles})
			continue
		}
		s.nodes = append(s.nodes, n)
	}
}

// selectsLabels reports whether a selector looks at more than names of nodes.
func selectsLabels(s *corev1.NodeSelector) bool {
	return slices.ContainsFunc(s.NodeSelectorTerms, func(t corev1.NodeSelectorTerm) bool { return len(t.MatchExpressions) > 0 })
}

// extended returns the claim that the scheduler makes for extended resources on a node, or nil.
func (s *sight) extended(n *corev1.Node) *resourceapi.ResourceClaim {
	if s.pod == nil {
		return nil
	}
	return s.x.planner.Cluster.ExtendedClaim(s.pod, n)
}

// wanted returns the claims that have to be allocated on a node, and with nil on one without device plugins.
func (s *sight) wanted(n *corev1.Node) []*resourceapi.ResourceClaim {
	if extended := s.extended(n); extended != nil {
		return append(slices.Clip(s.claims), extended)
	}
	return s.claims
}

// search asks the allocator about nodes. Nodes whose device plugins offer what the pod wants
// have other claims.
func (s *sight) search(ctx context.Context, p *allocation.Planner, nodes []*corev1.Node) []allocation.Answer {
	groups := map[string][]*corev1.Node{}
	for _, n := range nodes {
		names := ""
		if c := s.extended(n); c != nil {
			for _, r := range c.Spec.Devices.Requests {
				names += " " + r.Name
			}
		}
		groups[names] = append(groups[names], n)
	}
	var out []allocation.Answer
	for _, group := range groups {
		out = append(out, p.OnNodes(ctx, group, s.wanted(group[0]))...)
	}
	slices.SortFunc(out, func(a, b allocation.Answer) int { return cmp.Compare(a.Node, b.Node) })
	return out
}

// devicesOf returns the devices of a class, or with "" all, on the nodes that the pod may run on, of one node of each kind.
func (s *sight) devicesOf(ctx context.Context, class string) []allocation.Published {
	var out []allocation.Published
	for _, kind := range s.kinds() {
		for d := range s.x.planner.Cluster.Devices(kind[0]) {
			if f := newFinding(ctx, s.x.planner.Cluster, d, class, nil); class == "" || f.cause() == "" {
				out = append(out, d)
			}
		}
	}
	return out
}

// names returns those of the objects of a namespace.
func names[T metav1.Object](all []T, namespace string) []string {
	var out []string
	for _, o := range all {
		if o.GetNamespace() == namespace {
			out = append(out, o.GetName())
		}
	}
	return out
}

// textOf returns an attribute by its name without domain, and amountOf a capacity.
func textOf(d *resourceapi.Device, attribute string) string {
	for name, a := range d.Attributes {
		if fleet.Unqualified(string(name)) == attribute && a.StringValue != nil {
			return *a.StringValue
		}
	}
	return ""
}

func amountOf(d *resourceapi.Device, capacity string) resource.Quantity {
	for name, c := range d.Capacity {
		if fleet.Unqualified(string(name)) == capacity {
			return c.Value
		}
	}
	return resource.Quantity{}
}
