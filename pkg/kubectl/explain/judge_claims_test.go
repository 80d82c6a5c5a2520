// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// claimsAsked are claims of more than one device.
func claimsAsked() map[string]resourceapi.DeviceClaim {
	named := func(name string, r resourceapi.DeviceRequest) resourceapi.DeviceRequest {
		r.Name = name
		return r
	}
	all := fleettest.Request(whole)
	all.Exactly.AllocationMode, all.Exactly.Count = resourceapi.DeviceAllocationModeAll, 0
	both := []resourceapi.DeviceRequest{named("a", fleettest.Request(mig)), named("b", fleettest.Request(whole))}
	match := resourceapi.FullyQualifiedName(fleettest.Driver + "/parentUUID")
	odd := resourceapi.FullyQualifiedName("example.com/none")
	return map[string]resourceapi.DeviceClaim{
		"two GPUs":         {Requests: []resourceapi.DeviceRequest{fleettest.Count(2, whole)}},
		"three GPUs":       {Requests: []resourceapi.DeviceRequest{fleettest.Count(3, whole)}},
		"three partitions": {Requests: []resourceapi.DeviceRequest{fleettest.Count(3, mig)}},
		"all GPUs":         {Requests: []resourceapi.DeviceRequest{all}},
		"two requests":     {Requests: both},
		"two shares":       {Requests: []resourceapi.DeviceRequest{named("a", fleettest.Share(mps, "1Gi", "")), named("b", fleettest.Share(mps, "1Ti", ""))}},
		"alternatives":     {Requests: []resourceapi.DeviceRequest{alternatives(fleettest.Count(3, whole), fleettest.Request(mig))}},
		"no alternative":   {Requests: []resourceapi.DeviceRequest{alternatives(fleettest.Count(3, whole), fleettest.Request(mig, fleettest.Profile("9g.9gb")))}},
		"same GPU":         {Requests: []resourceapi.DeviceRequest{fleettest.Count(2, mig)}, Constraints: []resourceapi.DeviceConstraint{{MatchAttribute: &match}}},
		"distinct GPUs":    {Requests: []resourceapi.DeviceRequest{fleettest.Count(2, mig)}, Constraints: []resourceapi.DeviceConstraint{{DistinctAttribute: &match}}},
		"no such match":    {Requests: []resourceapi.DeviceRequest{fleettest.Count(2, whole)}, Constraints: []resourceapi.DeviceConstraint{{MatchAttribute: &odd}}},
	}
}

// TestExplainAgainstAllocator compares explanations of claims with several requests, devices,
// alternatives and constraints with the allocator's verdict and its choice.
func TestExplainAgainstAllocator(t *testing.T) {
	total := struct{ fits, refused, chosen int }{}
	for _, board := range []string{"a100-40", "h100-80-sxm"} {
		for state, fill := range fleets {
			f := fleettest.New(t)
			f.AddNode("n", board, 2)
			if !fill(f) {
				continue
			}
			planner := allocation.New(f.Snapshot).Within(time.Hour)
			x := within(f, time.Hour)
			x.budget, x.tryFor = time.Hour, time.Hour
			for name, spec := range claimsAsked() {
				claim := f.Claim("team", name)
				claim.Spec.Devices = spec
				claim = complete(claim)
				where := board + ", " + state + ", " + name
				answer := planner.OnNode(t.Context(), f.Nodes[0], []*resourceapi.ResourceClaim{claim})
				e := x.Claim(t.Context(), claim)
				if answer.Verdict != allocation.Fits {
					total.refused++
					if e.Verdict != Waits || len(e.Reasons) == 0 || e.Reasons[0].Cause == Unexplained {
						t.Errorf("%s: the allocator says %s (%v), the explanation %s: %+v", where, answer.Verdict, answer.Err, e.Verdict, e.Reasons)
					}
					continue
				}
				total.fits++
				if e.Verdict != Allocatable || len(e.Reasons) > 0 {
					t.Errorf("%s: the allocator allocates, the explanation is %s: %+v", where, e.Verdict, e.Reasons)
				}
				j := newJudge(x.planner)
				for _, r := range answer.Results[0].Devices.Results {
					i := slices.IndexFunc(asksOf(claim), func(a ask) bool { return a.Name == r.Request })
					for _, d := range j.onNode(t.Context(), f.Nodes[0], asksOf(claim)[i]) {
						if d.Device.Name != r.Device {
							continue
						}
						total.chosen++
						if d.cause() != "" {
							t.Errorf("%s: the allocator took %s for %s, the causes are %v", where, r.Device, r.Request, d.causes)
						}
					}
				}
			}
		}
	}
	t.Logf("%+v", total)
	if total.fits < 20 || total.refused < 20 || total.chosen < 40 {
		t.Errorf("compared too little: %+v", total)
	}
}
