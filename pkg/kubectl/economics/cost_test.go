// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// Requests, and what each is by itself.
func timeSlice() resourceapi.DeviceRequest { return fleettest.Request("timeslice.partage.dev") }
func whole() resourceapi.DeviceRequest     { return fleettest.Request("gpu.nvidia.com") }
func mps() resourceapi.DeviceRequest       { return fleettest.Request("mps.partage.dev") }
func partition(profile string) resourceapi.DeviceRequest {
	return fleettest.Request("mig.nvidia.com", fleettest.Profile(profile))
}

// TestPublishedFigures has the examples of published articles as fleets, by the ids of the formulas.
func TestPublishedFigures(t *testing.T) {
	ran := map[string]bool{}
	run := func(id, name string, test func(t *testing.T)) {
		ran[id] = true
		t.Run(id+" "+name, test)
	}
	run("E1", "four teams", func(t *testing.T) {
		alone := fleettest.New(t)
		alone.AddNode("n1", "a100-80", 4)
		shared := fleettest.New(t)
		shared.AddNode("n1", "a100-80", 1)
		for i := range 4 {
			alone.Held("team", fmt.Sprint("service-", i), "n1", whole())
			shared.Held("team", fmt.Sprint("service-", i), "n1", timeSlice())
		}
		before, after := report(alone, 3.25).Fleet, report(shared, 3.25).Fleet
		is(t, "four GPUs a month", *before.PerMonth, 9490)
		is(t, "one GPU a month", *after.PerMonth, 2372.50)
		is(t, "rounded", RoundHalfUp(*after.PerMonth, 0), 2373)
		is(t, "unshared", *after.UnsharedMonth, 9490)
	})
	for name, mechanism := range map[string]struct {
		board   string
		request resourceapi.DeviceRequest
	}{
		"time-slicing 4x": {"a100-80", timeSlice()}, "MPS with 4 clients": {"a100-80", mps()}, "4 of 1g.10gb": {"h100-80-sxm", partition("1g.10gb")},
	} {
		run("E2", name, func(t *testing.T) {
			f := fleettest.New(t)
			f.AddNode("n1", mechanism.board, 1)
			for i := range 4 {
				f.Held("team", fmt.Sprint("service-", i), "n1", mechanism.request)
			}
			r := report(f, 0)
			is(t, "saving", r.Fleet.SavingPercent, 75)
		})
	}
	ten := func(t *testing.T) *Report {
		t.Helper()
		f := fleettest.New(t)
		f.AddNode("n1", "a100-80", 10)
		for i := range 40 {
			f.Held("team", fmt.Sprintf("service-%02d", i), "n1", timeSlice())
		}
		return report(f, 3.50)
	}
	run("E3", "ten A100 with four tenants each", func(t *testing.T) {
		m := ten(t).Models[0]
		is(t, "tenants", float64(m.Unshared)/float64(m.InUse), 4)
		shared := CostPerWorkload(3.50, 0.08, m.Unshared/m.InUse)
		is(t, "shared", RoundHalfUp(shared, 2), 0.95)
		is(t, "saved", RoundHalfUp(100*Saving(shared, 3.50), 0), 73)
	})
	run("E4", "the same", func(t *testing.T) { is(t, "recovered", ten(t).Fleet.RecoveredPerDay, 180) })
	for name, c := range map[string]struct {
		board string
		mig   bool
		offer policy.Offer
		want  int
	}{
		"28 on an A100": {"a100-80", true, policy.Offer{Partition: &policy.PartitionOffer{
			Profiles: []string{}, Shares: []policy.PartitionShares{{Profiles: []string{"1g.10gb"}, TimeSlice: slices4()}},
		}}, 28},
		"T4":   {"t4", false, policy.Offer{TimeSlice: slices4()}, 4},
		"A100": {"a100-80", false, policy.Offer{MPS: &policy.MPSOffer{Clients: 8, MemoryOvercommit: 1, ComputeOvercommit: 1}}, 8},
	} {
		run("E5", name, func(t *testing.T) {
			f := fleettest.New(t)
			f.AddNodeOf("n1", factsOfBoard(t, c.board, c.mig), device.Terms{Policy: &policy.Policy{Default: c.offer}})
			if got := report(f, 0).Models[0].ShareRoom; got != c.want {
				t.Errorf("room for %d, want %d", got, c.want)
			}
		})
	}
	run("E6", "overheads", func(t *testing.T) {
		for m, want := range map[Mechanism]Range{
			Whole: {}, Partition: {}, MPS: {0.05, 0.05}, PartitionMPS: {0.05, 0.05}, TimeSlice: {0.10, 0.15},
			PartitionTimeSlice: {0.10, 0.15}, SoftwareLimits: {0.10, 0.15},
		} {
			if got := Guarantees[m].Overhead; got != want {
				t.Errorf("%s: %v, want %v", m, got, want)
			}
		}
	})
	if len(ran) != 6 {
		t.Errorf("formulas %v, want E1 to E6", ran)
	}
}

func slices4() *policy.TimeSliceOffer {
	return &policy.TimeSliceOffer{Clients: 4, MemoryOvercommit: 1}
}

func is(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9 {
		t.Errorf("%s: %g, want %g", what, got, want)
	}
}

func report(f *fleettest.Fleet, price float64) *Report {
	return NewReport(fleet.New(f.Snapshot, fleettest.Driver), &price)
}

// mixedFleet is a fleet of two models with claims of two teams: partitions of different size on one
// GPU, MPS shares of different size, time slices, and a whole GPU.
func mixedFleet(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 4)
	f.AddNode("n2", "t4", 2)
	f.Held("team-a", "large", "n1", partition("3g.40gb"))
	f.Held("team-b", "small", "n1", partition("1g.10gb"))
	f.Held("team-a", "mps-30", "n1", fleettest.Share("mps.partage.dev", "30Gi", "25"))
	f.Held("team-b", "mps-10", "n1", fleettest.Share("mps.partage.dev", "10Gi", "25"))
	f.Held("team-b", "whole", "n1", whole())
	f.Held("team-a", "notebook-1", "n2", timeSlice())
	f.Held("team-b", "notebook-2", "n2", timeSlice())
	f.Held("team-b", "notebook-3", "n2", timeSlice())
	return f
}

// TestParts: a claim pays for its part of a GPU, which is the one that idle and rightsize speak of, and all money adds up to that of all GPUs,
// with what nobody has.
func TestParts(t *testing.T) {
	r := report(mixedFleet(t), 3.25)
	parts := map[string]float64{}
	for _, h := range fleet.New(mixedFleet(t).Snapshot, fleettest.Driver).Holdings {
		parts[h.Claim.Name] = h.Part()
	}
	if len(r.Claims) != len(parts) {
		t.Fatalf("%d claims, want %d", len(r.Claims), len(parts))
	}
	sum, all := *r.Idle.PerHour, r.Idle.GPUs
	for _, c := range r.Claims {
		is(t, c.Name, c.GPUs, parts[c.Name])
		sum, all = sum+*c.PerHour, all+c.GPUs
	}
	is(t, "all claims and what is idle", sum, 6*3.25)
	is(t, "all GPUs", all, 6)
	is(t, "the fleet", *r.Fleet.PerHour, 4*3.25)
	is(t, "unshared", *r.Fleet.UnsharedPerHour, 8*3.25)
	sum = *r.Idle.PerHour
	for _, n := range r.Namespaces {
		sum += *n.PerHour
	}
	is(t, "all namespaces and what is idle", sum, 6*3.25)
}

// TestOutOfUse: a GPU that nobody can have is not idle. Who has a part of one keeps it, and what people reserve is for somebody.
func TestOutOfUse(t *testing.T) {
	for name, c := range map[string]struct {
		taint     string
		effect    resourceapi.DeviceTaintEffect
		cordon    bool
		idle, out float64
	}{
		"lost":            {"gpu.nvidia.com/gpu-lost", resourceapi.DeviceTaintEffectNoExecute, false, 1, 0.5},
		"cordoned":        {"gpu.nvidia.com/cordoned", resourceapi.DeviceTaintEffectNoSchedule, false, 1, 0.5},
		"no effect":       {"gpu.nvidia.com/unmonitored", resourceapi.DeviceTaintEffectNone, false, 1.5, 0},
		"reserved":        {"team-b", resourceapi.DeviceTaintEffectNoSchedule, false, 1.5, 0},
		"node is drained": {"team-b", resourceapi.DeviceTaintEffectNone, true, 0, 1.5},
	} {
		f := fleettest.New(t)
		node := f.AddNode("n1", "h100-80-sxm", 2)
		node.Spec.Unschedulable = c.cordon
		f.Held("team", "part", "n1", partition("3g.40gb"))
		for _, d := range fleet.New(f.Snapshot, fleettest.Driver).Nodes[0].GPUs[0].Devices {
			d.Published.Taints = append(d.Published.Taints, resourceapi.DeviceTaint{Key: c.taint, Effect: c.effect})
		}
		r := report(f, 2)
		is(t, name+": idle", RoundHalfUp(r.Idle.GPUs, 1), c.idle)
		is(t, name+": out of use", RoundHalfUp(r.OutOfUse.GPUs, 1), c.out)
		is(t, name+": money", RoundHalfUp(*r.Idle.PerHour+*r.OutOfUse.PerHour, 1), 3)
		var out bytes.Buffer
		if err := r.view().Write(&out, printer.Format{}); err != nil || strings.Contains(out.String(), "(out of use") != (c.out > 0) {
			t.Errorf("%s: %v, %s", name, err, out.String())
		}
	}
}

// TestHiddenClaims: where claims of others cannot be read, no GPU is said to be idle.
func TestHiddenClaims(t *testing.T) {
	f := mixedFleet(t)
	f.Claims = slices.DeleteFunc(f.Claims, func(c *resourceapi.ResourceClaim) bool { return c.Namespace != "team-a" })
	f.Missing = []fleet.Missing{{Resource: fleet.ResourceClaims}}
	r := report(f, 3.25)
	var out bytes.Buffer
	if err := r.view().Write(&out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	if r.Fleet != nil || r.Models != nil || r.Idle != nil || len(r.Claims) != 3 || strings.Contains(out.String(), "IN USE") || !strings.Contains(out.String(), "is unknown") {
		t.Errorf("%+v\n%s", r, out.String())
	}
}

// TestPromisedTooMuch: claims that were promised more than there is pay for the GPU together, and no more.
func TestPromisedTooMuch(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("team-a", "memory", "n1", fleettest.Share("mps.partage.dev", "60Gi", "10"))
	f.Held("team-b", "compute", "n1", fleettest.Share("mps.partage.dev", "10Gi", "80"))
	r := report(f, 2)
	is(t, "both", *r.Claims[0].PerHour+*r.Claims[1].PerHour, 2)
	is(t, "idle", r.Idle.GPUs, 0)
}

// TestPrice: what is no price is an error that names the flag.
func TestPrice(t *testing.T) {
	for price, want := range map[float64]string{-1: "--price -1", math.NaN(): "--price NaN", 1e300: "--price 1e+300"} {
		if err := runCost(t.Context(), options.New(genericiooptions.IOStreams{}), nil, &price); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

// TestAllNamespaces: -A is what the command does anyway, and wins over -n as in kubectl.
func TestAllNamespaces(t *testing.T) {
	var out bytes.Buffer
	o := options.New(genericiooptions.IOStreams{Out: &out, ErrOut: io.Discard})
	if err := NewCost(o).ParseFlags([]string{"-A"}); err != nil {
		t.Fatal(err)
	}
	*o.Config.Namespace = "team-a"
	if err := runCost(t.Context(), o, client(mixedFleet(t)), nil); err != nil {
		t.Fatal(err)
	}
	golden(t, "hours.txt", out.String())
}

// TestOutput runs the command on a cluster and compares what it prints.
func TestOutput(t *testing.T) {
	for name, c := range map[string]struct {
		price             *float64
		output, namespace string
	}{
		"hours.txt":     {},
		"money.txt":     {price: new(3.25), output: "wide"},
		"money.json":    {price: new(3.25), output: "json"},
		"namespace.txt": {price: new(3.25), output: "wide", namespace: "team-a"},
		"names.txt":     {output: "name"},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			o := options.New(genericiooptions.IOStreams{Out: &out, ErrOut: &errOut})
			o.Output = c.output
			*o.Config.Namespace = c.namespace
			if err := runCost(t.Context(), o, client(mixedFleet(t)), c.price); err != nil {
				t.Fatal(err)
			}
			golden(t, name, out.String())
			if errOut.Len() > 0 {
				t.Errorf("stderr: %s", &errOut)
			}
		})
	}
}

// TestWithoutRights: nobody is told that there are no GPUs, or no driver, who may not see them.
func TestWithoutRights(t *testing.T) {
	c := client(mixedFleet(t))
	c.PrependReactor("list", "resourceslices", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceslices"}, "", errors.New("no role"))
	})
	for name, run := range map[string]func(o *options.Options) error{
		"cost":   func(o *options.Options) error { return runCost(t.Context(), o, c, nil) },
		"advise": func(o *options.Options) error { return (&adviseFlags{}).run(t.Context(), o, c) },
	} {
		var out bytes.Buffer
		err := run(options.New(genericiooptions.IOStreams{Out: &out, ErrOut: &out}))
		if err == nil || !strings.Contains(err.Error(), "resourceslices.resource.k8s.io") || out.Len() > 0 {
			t.Errorf("%s: error %v, output %q", name, err, &out)
		}
	}
}

// TestUnpublished: what is not published is not known to be nothing, and GPUs without claims are not in use.
func TestUnpublished(t *testing.T) {
	for name, c := range map[string]struct {
		nodes        []string
		gpus, claims int
		says, silent string
	}{
		"nothing":  {nil, 0, 0, "No node publishes devices of driver gpu.nvidia.com: how the GPUs are used, and what is idle, is unknown.", "NAMESPACE"},
		"one node": {[]string{"n1"}, 2, 1, "Of 1 devices that claims have, ResourceSlices are missing", "unknown.\n\nNo"},
		"all":      {[]string{"n1", "n2"}, 4, 2, "IN USE", "unknown"},
	} {
		f := fleettest.New(t)
		for _, node := range []string{"n1", "n2"} {
			f.AddNode(node, "t4", 2)
			f.Held("team", node, node, whole())
		}
		f.Slices = slices.DeleteFunc(f.Slices, func(s *resourceapi.ResourceSlice) bool { return !slices.Contains(c.nodes, *s.Spec.NodeName) })
		r := report(f, 1)
		var out bytes.Buffer
		if err := r.view().Write(&out, printer.Format{Wide: true}); err != nil {
			t.Fatal(err)
		}
		if (r.Fleet != nil) != (c.gpus > 0) || r.Fleet != nil && r.Fleet.GPUs != c.gpus || len(r.Claims) != c.claims ||
			!strings.Contains(out.String(), c.says) || strings.Contains(out.String(), c.silent) {
			t.Errorf("%s: %+v\n%s", name, r, &out)
		}
	}
	f := fleettest.New(t)
	f.AddNode("n1", "t4", 3)
	r := report(f, 1)
	if r.Fleet.GPUs != 3 || r.Fleet.InUse != 0 || *r.Fleet.PerHour != 0 {
		t.Errorf("%+v", r.Fleet)
	}
}

func client(f *fleettest.Fleet) *fake.Clientset {
	c := fake.NewClientset()
	for _, s := range f.Slices {
		_ = c.Tracker().Add(s)
	}
	for _, x := range f.Claims {
		_ = c.Tracker().Add(x)
	}
	for _, x := range f.Classes {
		_ = c.Tracker().Add(x)
	}
	return c
}

// TestHalfWritten: while ResourceSlices are written anew, nobody says that none is there.
func TestHalfWritten(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "t4", 1)
	f.Held("team", "llm", "n1", whole())
	f.Slices[0].Spec.Pool.Generation++
	var out bytes.Buffer
	if err := report(f, 1).view().Write(&out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "No node publishes") || strings.Contains(out.String(), "no ResourceSlice is there") {
		t.Errorf("the node does publish:\n%s", &out)
	}
}

// TestUnpublishedForAdmins: who only watches costs nothing, whether what it watches is published or not.
func TestUnpublishedForAdmins(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "t4", 1)
	result := &f.Held("team", "watch", "n1", whole()).Status.Allocation.Devices.Results[0]
	result.AdminAccess, result.Device = new(true), "gpu-gone"
	if r := report(f, 1); r.Unpublished != 0 {
		t.Errorf("what %d devices cost is unknown", r.Unpublished)
	}
}
