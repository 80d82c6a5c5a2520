// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
)

// request is what a claim asks for.
type request struct {
	class, profile string
	count          int64
}

// Requests of pods, and of those that are there already.
var (
	oneG      = request{class: "mig.nvidia.com", profile: "1g.10gb", count: 1}
	oneGClass = request{class: "mig-1g.10gb.nvidia.com", count: 1}
	twoG      = request{class: "mig.nvidia.com", profile: "2g.20gb", count: 1}
	threeG    = request{class: "mig.nvidia.com", profile: "3g.40gb", count: 1}
	whole     = request{class: "gpu.nvidia.com", count: 1}
	share     = request{class: "mps.partage.dev", count: 1}
	oneToy    = request{class: "toy", count: 1}
)

// of is a request for several devices at once.
func (r request) of(count int64) request {
	r.count = count
	return r
}

func (r request) spec() resourceapi.ResourceClaimSpec {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: r.class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: r.count}
	if r.profile != "" {
		exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: fmt.Sprintf("device.attributes['gpu.nvidia.com'].profile == '%s'", r.profile),
		}}}
	}
	return resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "device", Exactly: exactly}}}}
}

// load is what pods ask for, and what is in use when they come.
type load struct {
	name string
	// pods have these claims in turn. share is how many of the pods of the benchmark there are, in
	// percent: a load whose pods take long has fewer.
	pods  []request
	share int
	// inUse is what is allocated on every node, except for one in 50 if some are empty.
	inUse     []request
	someEmpty bool
}

// scenario is a load on a fleet. The first fleet of a load is what the others are compared with.
type scenario struct {
	load
	fleet string
	// machines are the files of slices that nodes have in turn.
	machines []string
}

// extra are the names of cases that tell little more than others. They run only if asked for.
var extra = []string{"one-1g_a100", "one-1g_mixed", "one-1g-by-class_h100"}

func (c *scenario) name() string { return c.load.name + "_" + c.fleet }

// Half of eight GPUs in use, and nine tenths.
var (
	half                = []request{share.of(1), whole, oneG.of(7), threeG.of(2)}
	nearly              = []request{share.of(1), whole.of(2), oneG.of(21), threeG.of(3)}
	halfWithoutShares   = []request{whole.of(2), oneG.of(7), threeG.of(2)}
	nearlyWithoutShares = []request{whole.of(3), oneG.of(21), threeG.of(3)}
	oneFree             = []request{whole.of(7)}
)

// cases are in the order in which they run, so that what is compared runs one after the other.
// NVIDIA's driver has no MPS shares beside dynamic partitions; where others ask for one, its pods ask for a 1g.
var cases = []scenario{
	{load{name: "one-1g", pods: []request{oneG}, share: 100}, "h100", []string{"dgx-h100"}},
	{load{name: "one-1g", pods: []request{oneG}, share: 100}, "reference", []string{"reference"}},
	{load{name: "one-1g", pods: []request{oneToy}, share: 100}, "toy", []string{"toy"}},
	{load{name: "one-1g", pods: []request{oneG}, share: 100}, "a100", []string{"dgx-a100"}},
	{load{name: "one-1g", pods: []request{oneG}, share: 100}, "mixed", []string{"dgx-h100", "dgx-a100", "l4"}},
	{load{name: "one-1g-by-class", pods: []request{oneGClass}, share: 100}, "h100", []string{"dgx-h100"}},
	{load{name: "one-share", pods: []request{share}, share: 100}, "h100", []string{"dgx-h100"}},
	{load{name: "one-gpu", pods: []request{whole}, share: 100}, "h100", []string{"dgx-h100"}},
	{load{name: "one-gpu", pods: []request{whole}, share: 100}, "reference", []string{"reference"}},
	{load{name: "half-full", pods: []request{oneG, threeG, whole, share}, share: 25, inUse: half}, "h100", []string{"dgx-h100"}},
	{load{name: "half-full", pods: []request{oneG, threeG, whole, oneG}, share: 25, inUse: halfWithoutShares}, "reference", []string{"reference"}},
	{load{name: "nearly-full", pods: []request{oneG, oneG, twoG, share}, share: 25, inUse: nearly}, "h100", []string{"dgx-h100"}},
	{load{name: "nearly-full", pods: []request{oneG, oneG, twoG, oneG}, share: 25, inUse: nearlyWithoutShares}, "reference", []string{"reference"}},
	{load{name: "slow", pods: []request{oneG.of(8)}, share: 6, inUse: oneFree, someEmpty: true}, "h100", []string{"dgx-h100"}},
	{load{name: "slow", pods: []request{oneG.of(8)}, share: 6, inUse: oneFree, someEmpty: true}, "reference", []string{"reference"}},
}
