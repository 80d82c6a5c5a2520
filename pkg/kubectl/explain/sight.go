// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
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

// read reads what there is about a pod.
func (s *sight) read(pod *corev1.Pod) {
	s.pod, s.references = pod, allocation.ClaimsOf(s.x.model.Snapshot, pod)
	for _, c := range s.references {
		if c.Err == nil && c.Claim != nil {
			s.own = append(s.own, c.Claim)
		}
		if c.Template != "" && c.Claim != nil {
			s.personal = append(s.personal, c.Claim.Name)
		}
	}
	// The replacement of names takes the first that fits, and those of claims begin with that of the pod.
	s.personal = append(s.personal, pod.Name)
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
			if isElsewhere(cluster, c, n) {
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

// isElsewhere reports whether a claim has devices that a node does not have.
func isElsewhere(cluster *allocation.Cluster, c *resourceapi.ResourceClaim, n *corev1.Node) bool {
	selector := ptr.Deref(c.Status.Allocation, resourceapi.AllocationResult{}).NodeSelector
	if selector == nil || cluster.Unread(n) && selectsLabels(selector) {
		return false
	}
	matches, err := nodeaffinity.NewLazyErrorNodeSelector(selector).Match(n)
	return err != nil || !matches
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

// ask is one of a claim.
type ask struct {
	claim *resourceapi.ResourceClaim
	fleet.Ask
}

func asksOf(claims ...*resourceapi.ResourceClaim) []ask {
	var out []ask
	for _, c := range claims {
		for _, a := range fleet.AsksOf(&c.Spec.Devices) {
			out = append(out, ask{c, a})
		}
	}
	return out
}

// invalid finds what the API server refuses in claims that it has not got yet. It is not all that the
// API server looks at, but all that the allocator takes for granted.
func invalid(s *sight) {
	for _, c := range s.claims {
		refuse := func(format string, args ...any) {
			s.because(Reason{Cause: ClaimInvalid, Claim: c.Name}, "the API server refuses such a claim: "+format, args...)
		}
		for _, r := range c.Spec.Devices.Requests {
			if (r.Exactly == nil) == (len(r.FirstAvailable) == 0) {
				refuse("request %s has to have either exactly or firstAvailable", r.Name)
			}
		}
		for _, a := range asksOf(c) {
			switch exact := *a.Mode == resourceapi.DeviceAllocationModeExactCount; {
			case !exact && *a.Mode != resourceapi.DeviceAllocationModeAll:
				refuse("allocationMode %s of request %s has to be ExactCount or All", *a.Mode, a.Name)
			case exact && *a.Count < 1:
				refuse("count %d of request %s has to be 1 or more", *a.Count, a.Name)
			}
		}
	}
}

// changed returns a copy of the claim in which the ask is different.
func (a ask) changed(change func(ask)) *resourceapi.ResourceClaim {
	c := a.claim.DeepCopy()
	for _, b := range asksOf(c) {
		if b.Position == a.Position {
			change(b)
		}
	}
	return c
}

// complete sets what the API server sets where a claim leaves it out.
func complete(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c = c.DeepCopy()
	for _, a := range asksOf(c) {
		if *a.Mode == "" {
			*a.Mode = resourceapi.DeviceAllocationModeExactCount
		}
		if *a.Mode == resourceapi.DeviceAllocationModeExactCount && *a.Count == 0 {
			*a.Count = 1
		}
		for i, t := range *a.Tolerations {
			if t.Operator == "" {
				(*a.Tolerations)[i].Operator = resourceapi.DeviceTolerationOpEqual
			}
		}
	}
	return c
}

// capacities returns what is asked for of a device.
func (a ask) capacities() map[resourceapi.QualifiedName]resource.Quantity {
	return ptr.Deref(*a.Capacity, resourceapi.CapacityRequirements{}).Requests
}

// compared says what the constraints of claims compare.
func compared(claims []*resourceapi.ResourceClaim) []string {
	var out []string
	for _, c := range claims {
		for i := range c.Spec.Devices.Constraints {
			constraint, relation := &c.Spec.Devices.Constraints[i], "the same"
			if constraint.DistinctAttribute != nil {
				relation = "a different"
			}
			if name := fleet.Compared(constraint); name != "" {
				out = append(out, fmt.Sprintf("claim %s wants devices with %s %s", c.Name, relation, name))
			}
		}
	}
	return out
}

// missingName finds what a selector reads that a device does not have, and the device's driver.
var missingName = regexp.MustCompile(`on device ([^/\s]+)/.*no such key: ([A-Za-z_][A-Za-z0-9_]*)`)

// engines are what no device has a part of.
var engines = []string{"copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"}

// whoHas says, in a sentence to add, which types of a driver's devices have an attribute or capacity where others do not. It is
// empty where none has it, or all have.
func whoHas(s *sight, driver, name string) string {
	having, lacking := sets.New[string](), sets.New[string]()
	for _, kind := range s.kinds() {
		for p := range s.x.planner.Cluster.Devices(kind[0]) {
			switch kind := textOf(p.Device, "type"); {
			case p.Driver != driver:
			case has(p.Device.Attributes, name) || has(p.Device.Capacity, name):
				having.Insert(kind)
			default:
				lacking.Insert(kind)
			}
		}
	}
	having, lacking = having.Difference(lacking).Delete(""), lacking.Delete("")
	if len(having) == 0 || len(lacking) == 0 {
		return ""
	}
	text := fmt.Sprintf(". Devices of type %s have %s, those of type %s do not", strings.Join(sets.List(having), ", "), name, strings.Join(sets.List(lacking), ", "))
	switch {
	case name == "smPercent":
		text += ": a partition has the multiprocessors of its profile"
	case slices.Contains(engines, name):
		text += ": nothing divides engines among claims"
	}
	return text
}

// has reports whether something has a name, without domain.
func has[V any](all map[resourceapi.QualifiedName]V, name string) bool {
	return slices.ContainsFunc(sortedNames(all), func(n resourceapi.QualifiedName) bool { return fleet.Unqualified(string(n)) == name })
}

// nearest returns the name that was probably meant, or "".
func nearest(name string, names []string) string {
	best, least := "", max(2, len(name)/3)+1
	for _, n := range names {
		if d := distance(name, n); n != name && d < least {
			best, least = n, d
		}
	}
	return best
}

// byDistance sorts names by how much they are like a name.
func byDistance(name string, names []string) []string {
	sorted := slices.Clone(names)
	slices.SortStableFunc(sorted, func(a, b string) int { return cmp.Compare(distance(name, a), distance(name, b)) })
	return sorted
}

// distance is how many letters have to be added, taken away or replaced.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			before, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, before+cost)
		}
	}
	return row[len(b)]
}
