// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/claimtest"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

func planFor(t *testing.T, claim *resourceapi.ResourceClaim) (*record.Record, error) {
	t.Helper()
	return New(claim, Node{Driver: driverName, Pool: poolName, BootID: "boot-1", Inventory: testInventory(t)})
}

// texts renders what is recorded of a claim's devices: "requests device".
func texts(r *record.Record) (out []string) {
	for i := range r.Devices {
		d := &r.Devices[i]
		text := strings.Join(d.Requests, ",") + " " + d.Device
		if d.ShareID != nil {
			text += " share " + string(*d.ShareID)
		}
		if d.Admin {
			text += " admin"
		}
		out = append(out, text)
	}
	return out
}

// configured renders what a claim is allocated with the kind of configuration of each device.
func configured(t *testing.T, claim *resourceapi.ResourceClaim) []string {
	t.Helper()
	plan := must.Get(planFor(t, claim))(t)
	all, err := Node{Driver: driverName, Pool: poolName, Inventory: testInventory(t)}.find(claim)
	out := texts(plan)
	if err != nil || len(out) != len(all) {
		t.Fatal(out, all, err)
	}
	for i, d := range all {
		switch c := d.config.(type) {
		case *api.GpuConfig:
			out[i] += " GpuConfig"
			if c.Sharing != nil {
				out[i] += "/" + string(c.Sharing.Strategy)
			}
		case *api.MigDeviceConfig:
			out[i] += " MigDeviceConfig"
		}
	}
	return out
}

func withResults(results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	claim := newClaim("u1")
	claim.Status.Allocation.Devices.Results = results
	return claim
}

func TestPlan(t *testing.T) {
	other := result("r9", "channel-0")
	other.Driver = "compute-domain.nvidia.com"
	share := func(request, device string, id types.UID) resourceapi.DeviceRequestAllocationResult {
		r := result(request, device)
		r.ShareID = &id
		return r
	}
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  []string
	}{
		"nothing":       {newClaim("u1"), nil},
		"other driver":  {withResults(other), nil},
		"whole":         {newClaim("u1", wholeA), []string{"r0 " + wholeA}},
		"one of others": {withResults(other, result("r0", sliceA0)), []string{"r0 " + sliceA0}},
		"total order": {
			newClaim("u1", wholeC, sliceA4, sliceB0, sliceA0),
			[]string{"r3 " + sliceA0, "r1 " + sliceA4, "r2 " + sliceB0, "r0 " + wholeC},
		},
		"subrequest": {withResults(result("gpu/small", sliceA0)), []string{"gpu/small " + sliceA0}},
		"admin":      {withResults(observed("watch", wholeA)), []string{"watch " + wholeA + " admin"}},
		"observer":   {withResults(observed("watch", wholeA+"-observer")), []string{"watch " + wholeA + "-observer admin"}},
		"observer of parts": {
			withResults(observed("watch", wholeA+"-observer"), result("use", sliceA0)),
			[]string{"watch " + wholeA + "-observer admin", "use " + sliceA0},
		},
		"admin overlaps":  {withResults(observed("watch", wholeA), result("use", sliceA0)), []string{"watch " + wholeA + " admin", "use " + sliceA0}},
		"admin and owner": {withResults(observed("watch", wholeA), result("use", wholeA)), []string{"use,watch " + wholeA}},
		// What it looks at has to be made first.
		"admin and share": {
			withResults(observed("watch", sliceA0), observed("a", mpsSliceA0), share("b", mpsSliceA0, "z")),
			[]string{"b " + mpsSliceA0 + " share z", "watch " + sliceA0 + " admin", "a " + mpsSliceA0 + " share share-a admin"},
		},
		"shares": {
			withResults(share("b", mpsSliceA0, "s2"), share("a", mpsSliceA0, "s1")),
			[]string{"a " + mpsSliceA0 + " share s1", "b " + mpsSliceA0 + " share s2"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			plan := must.Get(planFor(t, test.claim))(t)
			expect.Same(t, texts(plan), test.want, "devices")
		})
	}
}

func TestPlanRefuses(t *testing.T) {
	elsewhere := result("r0", wholeA)
	elsewhere.Pool = "node-2"
	unallocated := newClaim("u1")
	unallocated.Status.Allocation = nil
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  string
	}{
		"not allocated":  {unallocated, "the claim is not allocated"},
		"unknown device": {newClaim("u1", "gpu-0000-ff-00-0"), "device gpu-0000-ff-00-0 does not exist on this node"},
		"other pool":     {withResults(elsewhere), `pool "node-2", this node's is "node-1"`},
		"observer without admin access": {newClaim("u1", wholeA+"-observer"), "device " + wholeA + "-observer is for claims that observe its GPU, " +
			"and request r0 has no admin access: set adminAccess: true"},
		"whole and partition":   {newClaim("u1", wholeA, sliceA0), "the claim is allocated " + wholeA + " and " + sliceA0 + ", which overlap"},
		"overlapping placement": {newClaim("u1", halfA4, sliceA4), "which overlap"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := planFor(t, test.claim)
			claimtest.WantError(t, err, test.want)
		})
	}
}

func TestPlanConfigs(t *testing.T) {
	mixed := func() *resourceapi.ResourceClaim { return newClaim("u1", wholeA, sliceB0) } // r0, r1
	choice := func(device string) *resourceapi.ResourceClaim {
		return withResults(result("gpu/first", device))
	}
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		want  []string
		err   string
	}{
		"claim over class": {
			claim: configure(configure(newClaim("u1", wholeA), fromClaim, gpuSlicing), fromClass, gpuConfig),
			want:  []string{"r0 " + wholeA + " GpuConfig/TimeSlicing"},
		},
		"later over earlier": {
			claim: configure(configure(newClaim("u1", wholeA), fromClaim, gpuSlicing), fromClaim, gpuConfig),
			want:  []string{"r0 " + wholeA + " GpuConfig"},
		},
		"one kind each, for all": {
			claim: configure(configure(mixed(), fromClaim, gpuConfig), fromClaim, migConfig),
			want:  []string{"r0 " + wholeA + " GpuConfig", "r1 " + sliceB0 + " MigDeviceConfig"},
		},
		"for all, one kind": {
			claim: configure(mixed(), fromClaim, migConfig),
			want:  []string{"r0 " + wholeA, "r1 " + sliceB0 + " MigDeviceConfig"},
		},
		"by request": {
			claim: configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuSlicing, "r1"),
			want:  []string{"r0 " + wholeA, "r1 " + wholeB + " GpuConfig/TimeSlicing"},
		},
		"main request of an alternative": {
			claim: configure(choice(wholeA), fromClaim, gpuSlicing, "gpu"),
			want:  []string{"gpu/first " + wholeA + " GpuConfig/TimeSlicing"},
		},
		"the alternative itself": {
			claim: configure(choice(wholeA), fromClaim, gpuSlicing, "gpu/first"),
			want:  []string{"gpu/first " + wholeA + " GpuConfig/TimeSlicing"},
		},
		"another alternative": {
			claim: configure(choice(wholeA), fromClaim, gpuSlicing, "gpu/second"),
			want:  []string{"gpu/first " + wholeA},
		},
		"for all alternatives, kind of another": {
			claim: configure(choice(sliceA0), fromClaim, gpuConfig, "gpu"),
			want:  []string{"gpu/first " + sliceA0},
		},
		"class of another kind": {
			claim: configure(newClaim("u1", sliceA0), fromClass, gpuConfig, "r0"),
			want:  []string{"r0 " + sliceA0},
		},
		"exactly named, other kind": {
			claim: configure(mixed(), fromClaim, gpuConfig, "r0", "r1"),
			err:   "(of the claim, for requests r0, r1): GpuConfig does not apply to device " + sliceB0 + ", which is a MIG partition and takes a MigDeviceConfig",
		},
		"alternative named, other kind": {
			claim: configure(choice(wholeA), fromClaim, migConfig, "gpu/first"),
			err:   "MigDeviceConfig does not apply to device " + wholeA + ", which is a whole GPU and takes a GpuConfig",
		},
		"for all, none of the kind": {
			claim: configure(newClaim("u1", sliceA0), fromClaim, gpuConfig),
			err:   "configuration 0 of the allocation (of the claim): GpuConfig does not apply to device " + sliceA0,
		},
		"invalid": {
			claim: configure(newClaim("u1", wholeA), fromClaim, gpuBad),
			err:   `configuration 0 of the allocation (of the claim): invalid GpuConfig: sharing.strategy: Unsupported value: "Sometimes"`,
		},
		"invalid and overridden": {
			claim: configure(configure(newClaim("u1", wholeA), fromClass, gpuBad, "r0"), fromClaim, gpuConfig),
			err:   "(of the device class, for requests r0): invalid GpuConfig",
		},
		"not text": {
			claim: configure(newClaim("u1", wholeA), fromClaim, `null`),
			err:   "must be an object",
		},
		"one for two GPUs": {
			claim: configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuMPS),
			want:  []string{"r0 " + wholeA + " GpuConfig/MPS", "r1 " + wholeB + " GpuConfig/MPS"},
		},
		"two for two GPUs": {
			claim: configure(configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuMPS, "r0"), fromClaim, ownMPS, "r1"),
			err:   "devices " + wholeA + " and " + wholeB + ` have different configurations with strategy "MPS"`,
		},
		"for who only looks on": {
			claim: configure(admin(newClaim("u1", wholeA)), fromClaim, gpuMPS, "r0"),
			err:   "request r0 has admin access, which changes nothing: device " + wholeA,
		},
		"nothing for who only looks on": {
			claim: configure(admin(newClaim("u1", wholeA)), fromClaim, gpuSlicing, "r0"),
			want:  []string{"r0 " + wholeA + " admin GpuConfig/TimeSlicing"},
		},
		"the same for two GPUs": {
			claim: configure(configure(newClaim("u1", wholeA, wholeB), fromClass, gpuMPS, "r0"), fromClass, gpuMPS, "r1"),
			want:  []string{"r0 " + wholeA + " GpuConfig/MPS", "r1 " + wholeB + " GpuConfig/MPS"},
		},
		"for a share": {
			claim: configure(newClaim("u1", wholeA+"-mps"), fromClaim, gpuMPS, "r0"),
			err:   "GpuConfig does not apply to device " + wholeA + "-mps, which is a share: its limits are what the claim asks for in capacity.requests, and it takes a GpuConfig with nothing but sharing.mpsConfig.defaultClientPriority",
		},
		"a priority for a share": {
			claim: configure(newClaim("u1", wholeA+"-mps"), fromClaim, gpuPriority("Normal"), "r0"),
			want:  []string{"r0 " + wholeA + "-mps share share-u1-r0 GpuConfig/MPS"},
		},
		"a priority for a share of a partition": {
			claim: configure(newClaim("u1", mpsSliceA0), fromClaim, gpuPriority("Normal"), "r0"),
			err:   mpsSliceA0 + ", which is a share: its limits are what the claim asks for in capacity.requests, and it takes a MigDeviceConfig",
		},
		"a priority for who only looks on": {
			claim: configure(admin(newClaim("u1", wholeA+"-mps")), fromClaim, gpuPriority("Normal"), "r0"),
			err:   "request r0 has admin access, which changes nothing: device " + wholeA,
		},
		"a priority for turns": {
			claim: configure(newClaim("u1", wholeA+"-timeslice"), fromClaim, gpuPriority("Normal"), "r0"),
			err:   "which is a share: how it is shared is for the administrator's SharingPolicy to say",
		},
		"of a class, for a share": {
			claim: configure(newClaim("u1", wholeA+"-timeslice"), fromClass, gpuMPS),
			want:  []string{"r0 " + wholeA + "-timeslice share share-u1-r0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if test.err != "" {
				_, err := planFor(t, test.claim)
				claimtest.WantError(t, err, test.err)
				return
			}
			expect.Same(t, configured(t, test.claim), test.want, "configurations")
		})
	}
}

func TestPlanIgnoresConfigsOfOthers(t *testing.T) {
	claim := configure(newClaim("u1", wholeA), fromClaim, `nonsense`)
	claim.Status.Allocation.Devices.Config[0].Opaque.Driver = "other.example.com"
	claim.Status.Allocation.Devices.Config = append(claim.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{})
	if got := configured(t, claim); got[0] != "r0 "+wholeA {
		t.Errorf("got %v", got)
	}
}

// A configuration that cannot be carried out is told by the same type of error as one that cannot be read.
func TestPlanErrorTypes(t *testing.T) {
	for _, bad := range []string{gpuBad, strings.ReplaceAll(ownMPS, `{"1":"5Gi"}`, `{"7":"5Gi"}`)} {
		_, err := planFor(t, configure(newClaim("u1", wholeA), fromClaim, bad))
		var invalid *api.InvalidError
		if !errors.As(err, &invalid) {
			t.Errorf("got %T: %v", err, err)
		}
	}
}

// The order of the results in the claim makes no difference to the steps.
func TestPlanOrderIsTotal(t *testing.T) {
	names := []string{wholeC, sliceA4, sliceB0, sliceA0, sliceA1}
	want := ""
	for shift := range names {
		var results []resourceapi.DeviceRequestAllocationResult
		for i := range names {
			name := names[(i+shift)%len(names)]
			results = append(results, result(name, name))
		}
		plan := must.Get(planFor(t, withResults(results...)))(t)
		got := fmt.Sprint(texts(plan))
		if want == "" {
			want = got
		}
		expect.Same(t, got, want, "order")
	}
}

func whole(name string) record.Device {
	return record.Device{Device: name, Type: device.Whole, PCIAddress: claimtest.PCIA}
}

func slice(address string, start, size int) record.Device {
	return record.Device{Type: device.Partition, PCIAddress: address, Partition: &record.Partition{Place: record.Place{ProfileID: 19, Placement: gpu.Placement{Start: start, Size: size}}}}
}

func share(name, id string, kind device.Kind) record.Device {
	return record.Device{Device: name, Type: kind, PCIAddress: claimtest.PCIA, ShareID: ptr.To(types.UID(id))}
}

func TestOverlap(t *testing.T) {
	admin, turns := whole("a"), share("turns", "s1", device.TimeSlice)
	admin.Admin = true
	for name, test := range map[string]struct {
		a, b record.Device
		want bool
	}{
		"the same place":         {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIA, 0, 1), true},
		"beside":                 {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIA, 4, 1), false},
		"inside":                 {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIA, 0, 4), true},
		"whole and part":         {whole("a"), slice(claimtest.PCIA, 4, 1), true},
		"whole and whole":        {whole("a"), whole("a"), true},
		"another GPU":            {slice(claimtest.PCIA, 0, 1), slice(claimtest.PCIB, 0, 1), false},
		"observed":               {admin, whole("a"), false},
		"shares of one device":   {turns, share("turns", "s2", device.TimeSlice), false},
		"one share twice":        {turns, share("turns", "s1", device.TimeSlice), true},
		"shares of two kinds":    {turns, share("mps", "s2", device.MPS), true},
		"share and the whole":    {turns, whole("a"), true},
		"share and a partition":  {turns, slice(claimtest.PCIA, 0, 1), true},
		"same name, not a share": {whole("turns"), turns, true},
	} {
		if got := overlap(&test.a, &test.b); got != test.want || overlap(&test.b, &test.a) != test.want {
			t.Errorf("%s: got %v, want %v both ways", name, got, test.want)
		}
	}
}

// observed is a result with admin access.
func observed(request, device string) resourceapi.DeviceRequestAllocationResult {
	r := result(request, device)
	r.AdminAccess = ptr.To(true)
	return r
}

// TestObserverDoesNotConfigure: what a claim's request with admin access brings along, from its
// class or from the claim, changes nothing of the same device that another of its requests has.
func TestObserverDoesNotConfigure(t *testing.T) {
	share := result("use", mpsA)
	share.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi"), "smPercent": resource.MustParse("50")}
	watchedShare := observed("watch", mpsA)
	watchedShare.ShareID = share.ShareID
	both := []resourceapi.DeviceRequestAllocationResult{observed("watch", wholeA), result("use", wholeA)}
	const limits = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{` +
		`"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi"}}}`
	cases := 0
	for name, test := range map[string]struct {
		results   []resourceapi.DeviceRequestAllocationResult
		configure func(*resourceapi.ResourceClaim)
	}{
		"the owner has MPS, the observer's class has none": {both, func(c *resourceapi.ResourceClaim) {
			configure(configure(c, fromClass, gpuConfig, "watch"), fromClaim, limits, "use")
		}},
		"the owner has none, the observer's class has MPS": {both, func(c *resourceapi.ResourceClaim) {
			configure(c, fromClass, gpuMPS, "watch")
		}},
		"classes with different settings": {both, func(c *resourceapi.ResourceClaim) {
			configure(configure(c, fromClass, gpuLong, "watch"), fromClass, gpuMPS, "use")
		}},
		"one for all requests": {both, func(c *resourceapi.ResourceClaim) {
			configure(c, fromClaim, gpuLong)
		}},
		"a share": {[]resourceapi.DeviceRequestAllocationResult{watchedShare, share}, func(c *resourceapi.ResourceClaim) {
			configure(c, fromClass, gpuPriority("BelowNormal"), "watch")
		}},
	} {
		// As if nobody observed.
		alone := withResults(test.results[1])
		test.configure(alone)
		want, err := planFor(t, alone)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		backwards := slices.Clone(test.results)
		slices.Reverse(backwards)
		for order, results := range map[string][]resourceapi.DeviceRequestAllocationResult{"observer first": test.results, "owner first": backwards} {
			cases++
			claim := withResults(results...)
			test.configure(claim)
			got, err := planFor(t, claim)
			if err != nil {
				t.Errorf("%s, %s: %v", name, order, err)
				continue
			}
			for i := range got.Devices {
				got.Devices[i].Requests = slices.DeleteFunc(got.Devices[i].Requests, func(r string) bool { return r == "watch" })
			}
			expect.Same(t, got, want, name+", "+order+": what the owner gets alone and observed")
		}
	}
	if t.Logf("%d cases", cases); cases != 10 {
		t.Errorf("%d cases", cases)
	}
}
