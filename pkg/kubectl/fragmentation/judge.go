// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// className is that of a class which only this package's copy of the snapshot has: what it
// finds must not depend on the classes of the cluster.
const className = "fragmentation.kubectl.partage.dev"

// judge asks the scheduler's allocator.
type judge struct {
	driver  string
	planner *allocation.Planner
	nodes   map[string]*corev1.Node
	// known are answers about GPUs from which everything was moved away: they depend on what
	// the GPU can be and on what is asked.
	known answers[string, bool]
}

func newJudge(m *fleet.Model) *judge {
	snapshot := *m.Snapshot
	snapshot.Classes = append(slices.Clone(m.Classes), &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: className},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.driver == %q", m.Driver),
		}}}},
	})
	j := &judge{driver: m.Driver, planner: allocation.New(&snapshot), nodes: map[string]*corev1.Node{}}
	for _, n := range j.planner.Nodes() {
		j.nodes[n.Name] = n
	}
	return j
}

// group are devices of a GPU that are alike.
type group struct{ deviceType, profile string }

// fits reports whether the allocator finds so many devices of each group on a GPU, all at once.
func (j *judge) fits(ctx context.Context, p *allocation.Planner, g *fleet.GPU, groups map[group]int) bool {
	node := j.nodes[g.Node.Name]
	if node == nil {
		return false
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "fragmentation", UID: "fragmentation"}}
	for _, of := range slices.SortedFunc(maps.Keys(groups), func(a, b group) int {
		return cmp.Or(cmp.Compare(a.deviceType, b.deviceType), cmp.Compare(a.profile, b.profile))
	}) {
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{
			Name: fmt.Sprintf("group-%d", len(claim.Spec.Devices.Requests)),
			Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: className, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(groups[of]),
				Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf(
					"device.attributes[%[1]q].type == %[2]q && device.attributes[%[1]q].profile == %[3]q && device.attributes[%[1]q].parentUUID == %[4]q",
					j.driver, of.deviceType, of.profile, g.UUID)}}},
			},
		})
	}
	return p.OnNode(ctx, node, []*resourceapi.ResourceClaim{claim}).Verdict == allocation.Fits
}

// packed reports whether the allocator finds room on each GPU for all that would be there, and
// for as many partitions of a profile as the layout says. It may choose other places.
func (j *judge) packed(ctx context.Context, profile string, layouts []layout) bool {
	var before, after []*resourceapi.ResourceClaim
	for _, l := range layouts {
		for _, d := range l.board.held {
			for _, h := range d.Held() {
				if movable(d) && !slices.Contains(before, h.Claim) {
					before, after = append(before, h.Claim), append(after, j.fixed(h.Claim, layouts))
				}
			}
		}
	}
	planner := j.planner.Without(before...).With(after...)
	for _, l := range layouts {
		groups := map[group]int{}
		for _, d := range l.places {
			if movable(d) {
				groups[group{d.Type, d.Profile}]++
			}
		}
		if l.count > 0 {
			groups[group{fleet.TypeMIG, profile}] += l.count
		}
		if len(groups) == 0 {
			continue
		}
		if slices.ContainsFunc(l.board.held, func(d *fleet.Device) bool { return !movable(d) }) {
			if !j.fits(ctx, planner, l.board.gpu, groups) {
				return false
			}
			continue
		}
		key := l.board.shape(false) + fmt.Sprint(groups) // which prints maps in order
		if fits, _ := j.known.of(key, func() bool { return j.fits(ctx, planner, l.board.gpu, groups) }); !fits {
			return false
		}
	}
	return true
}

// fixed returns a claim with those of its devices that stay where they are.
func (j *judge) fixed(claim *resourceapi.ResourceClaim, layouts []layout) *resourceapi.ResourceClaim {
	moves := map[*resourceapi.DeviceRequestAllocationResult]bool{}
	for _, l := range layouts {
		for _, d := range l.board.held {
			for _, h := range d.Held() {
				moves[h.Result] = movable(d)
			}
		}
	}
	rest := claim.DeepCopy()
	rest.Status.Allocation.Devices.Results = nil
	for i := range claim.Status.Allocation.Devices.Results {
		if r := &claim.Status.Allocation.Devices.Results[i]; !moves[r] {
			rest.Status.Allocation.Devices.Results = append(rest.Status.Allocation.Devices.Results, *r)
		}
	}
	return rest
}

// freed reports whether a partition fits on a GPU once claims have ended.
func (j *judge) freed(ctx context.Context, g *fleet.GPU, profile string, ended []*resourceapi.ResourceClaim) bool {
	return j.fits(ctx, j.planner.Without(ended...), g, map[group]int{{fleet.TypeMIG, profile}: 1})
}
