// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/fleettest"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/policy"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// take gives devices of a node to a claim, with a pod that has a controller or none.
func take(f *fleettest.Fleet, name, node string, controlled bool, devices ...string) {
	c := f.Claim("team", name)
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpu", Driver: fleettest.Driver, Pool: node, Device: d,
		})
	}
	pod := f.Run(c, node)
	if controlled {
		pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: name, Controller: new(true)}}
	}
}

func find(t *testing.T, f *fleettest.Fleet, o Options) *Report {
	t.Helper()
	r, err := Find(t.Context(), fleet.New(f.Snapshot, fleettest.Driver), o)
	if err != nil {
		t.Fatal(err)
	}
	if r.Unconfirmed > 0 {
		t.Errorf("the allocator did not confirm %d suggestions", r.Unconfirmed)
	}
	return r
}

// hardware is the reference: all layouts that a board can have, by the rules of the hardware
// alone. It knows no counters.
type hardware []map[string][]int // starts by profile

// newHardware tries all sets of partitions: memory slices are not shared, there are at most so
// many of a profile as the driver says, and no more engines than the board has.
func newHardware(t *testing.T, name string) hardware {
	t.Helper()
	node, err := boards.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	g := node.GPUs[0]
	if g.MIG == nil {
		return nil
	}
	type partition struct {
		profile *gpu.Profile
		at      gpu.Placement
	}
	var all []partition
	for i := range g.MIG.Profiles {
		if p := &g.MIG.Profiles[i]; !policy.IsVariant(p.Name) { // those are not offered
			for _, at := range p.Placements {
				all = append(all, partition{p, at})
			}
		}
	}
	legal := func(set []partition) bool {
		var r gpu.Resources
		count := map[string]int{}
		for i, p := range set {
			if slices.ContainsFunc(set[:i], func(q partition) bool { return q.at.Overlaps(p.at) }) {
				return false
			}
			count[p.profile.Name]++
			r.CopyEngines += p.profile.Resources.CopyEngines
			r.Decoders += p.profile.Resources.Decoders
			r.Encoders += p.profile.Resources.Encoders
			r.JPEGEngines += p.profile.Resources.JPEGEngines
			r.OFAEngines += p.profile.Resources.OFAEngines
			if count[p.profile.Name] > p.profile.MaxInstances {
				return false
			}
		}
		whole := g.Resources
		return r.CopyEngines <= whole.CopyEngines && r.Decoders <= whole.Decoders && r.Encoders <= whole.Encoders &&
			r.JPEGEngines <= whole.JPEGEngines && r.OFAEngines <= whole.OFAEngines
	}
	var layouts hardware
	var grow func(from int, set []partition)
	grow = func(from int, set []partition) {
		starts := map[string][]int{}
		for _, p := range set {
			starts[p.profile.Name] = append(starts[p.profile.Name], p.at.Start)
		}
		layouts = append(layouts, starts)
		for i := from; i < len(all); i++ {
			if next := append(slices.Clone(set), all[i]); legal(next) {
				grow(i+1, next)
			}
		}
	}
	grow(0, nil)
	return layouts
}

// instance is a partition that a claim has.
type instance struct {
	device, profile string
	start           int
}

// now is how many of a profile fit beside instances where they are, packed wherever they are.
func (h hardware) now(held []instance, profile string) int {
	return h.most(held, profile, func(l map[string][]int) bool {
		return !slices.ContainsFunc(held, func(i instance) bool { return !slices.Contains(l[i.profile], i.start) })
	})
}

func (h hardware) packed(held []instance, profile string) int {
	return h.most(held, profile, func(l map[string][]int) bool {
		count := map[string]int{}
		for _, i := range held {
			count[i.profile]++
		}
		for p, n := range count {
			if len(l[p]) < n {
				return false
			}
		}
		return true
	})
}

func (h hardware) most(held []instance, profile string, possible func(map[string][]int) bool) int {
	own := 0
	for _, i := range held {
		if i.profile == profile {
			own++
		}
	}
	best := 0
	for _, l := range h {
		if n := len(l[profile]) - own; n > best && possible(l) {
			best = n
		}
	}
	return best
}

// drains are the smallest sets of instances whose end lets a profile fit, as sorted names of
// devices.
func (h hardware) drains(held []instance, profile string) []string {
	var sets []uint
	for set := range uint(1) << len(held) {
		var rest []instance
		for i, in := range held {
			if set&(1<<i) == 0 {
				rest = append(rest, in)
			}
		}
		if h.now(rest, profile) > 0 {
			sets = append(sets, set)
		}
	}
	var out []string
	for _, set := range sets {
		if slices.ContainsFunc(sets, func(smaller uint) bool { return smaller != set && smaller&set == smaller }) {
			continue
		}
		var names []string
		for i, in := range held {
			if set&(1<<i) != 0 {
				names = append(names, in.device)
			}
		}
		slices.Sort(names)
		out = append(out, strings.Join(names, " "))
	}
	slices.Sort(out)
	return out
}

// partitionsOf returns the partitions that the GPU of a node offers.
func partitionsOf(t *testing.T, f *fleettest.Fleet) []instance {
	t.Helper()
	var all []instance
	for _, d := range fleet.New(f.Snapshot, fleettest.Driver).Nodes[0].GPUs[0].Devices {
		if d.Type != fleet.TypeMIG {
			continue
		}
		start, err := strconv.Atoi(d.Name[strings.LastIndex(d.Name, "-")+1:])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, instance{d.Name, d.Profile, start})
	}
	return all
}

// TestBruteForce compares everything with what the rules of the hardware allow, for random
// states of every board.
func TestBruteForce(t *testing.T) {
	t.Parallel()
	const states = 12
	compared, lost, drains := 0, 0, 0
	for _, name := range fleettest.Boards(t) {
		h := newHardware(t, name)
		if len(h) == 0 {
			continue
		}
		random := rand.New(rand.NewPCG(1, uint64(len(name)))) // #nosec G404 -- the same states each time
		for state := range states {
			f := fleettest.New(t)
			f.AddPartitionedNode("n", name, 1)
			offered := partitionsOf(t, f)
			var held []instance
			for _, at := range random.Perm(len(offered)) {
				in := offered[at]
				// Small partitions are what fragments.
				if h.now(append(slices.Clone(held), in), in.profile) >= 0 && possible(h, append(slices.Clone(held), in)) && len(held) <= state%7 {
					held = append(held, in)
				}
			}
			for i, in := range held {
				take(f, fmt.Sprint("claim-", i), "n", true, in.device)
			}
			model := fleet.New(f.Snapshot, fleettest.Driver)
			b := newBoard(model.Nodes[0].GPUs[0])
			for _, profile := range b.profiles {
				r := find(t, f, Options{Profile: profile})
				want := Total{profile, h.now(held, profile), h.packed(held, profile)}
				if len(r.Profiles) != 1 || r.Profiles[0] != want {
					t.Errorf("%s with %v: %+v, want %+v", name, held, r.Profiles, want)
				}
				if want.Packed > want.Now {
					lost++
				}
				if (want.Packed > want.Now) != (len(r.Lost) == 1) {
					t.Errorf("%s with %v: lost %+v, want %+v", name, held, r.Lost, want)
				}
				var got, wantDrains []string
				for _, d := range r.Drains {
					var devices []string
					for _, c := range d.Claims {
						devices = append(devices, c.Devices...)
					}
					slices.Sort(devices)
					got = append(got, strings.Join(devices, " "))
				}
				slices.Sort(got)
				if want.Now == 0 {
					wantDrains = h.drains(held, profile)
				}
				drains += len(wantDrains)
				if diff := cmp.Diff(wantDrains, got); diff != "" {
					t.Errorf("%s with %v, drains for %s (-want +got):\n%s", name, held, profile, diff)
				}
				compared++
			}
		}
	}
	if compared < 400 || lost < 40 || drains < 400 {
		t.Errorf("compared %d, %d with lost room, %d drains", compared, lost, drains)
	}
}

// possible reports whether instances can exist together.
func possible(h hardware, held []instance) bool {
	return slices.ContainsFunc(h, func(l map[string][]int) bool {
		return !slices.ContainsFunc(held, func(i instance) bool { return !slices.Contains(l[i.profile], i.start) })
	})
}

// sample is a fleet in which small partitions are spread over two nodes.
func sample(t *testing.T) *fleettest.Fleet {
	t.Helper()
	f := fleettest.New(t)
	f.AddNode("gpu-1", "h100-80-sxm", 2)
	f.AddNode("gpu-2", "h100-80-sxm", 1)
	const first, second = "gpu-0000-1b-00-0-mig-", "gpu-0000-28-00-0-mig-"
	take(f, "web-1", "gpu-1", true, first+"1g10gb-1")
	take(f, "web-2", "gpu-1", true, first+"1g10gb-5")
	take(f, "notebook", "gpu-1", false, second+"2g20gb-2")
	take(f, "train", "gpu-1", true, second+"3g40gb-4")
	take(f, "pair", "gpu-2", true, first+"1g10gb-0", first+"1g10gb-4")
	return f
}

func TestGolden(t *testing.T) {
	t.Parallel()
	r := find(t, sample(t), Options{Limit: 3})
	compare(t, "all.txt", text(t, r))
	encoded, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "all.json", string(encoded)+"\n")
	compare(t, "profile.txt", text(t, find(t, sample(t), Options{Profile: "3g.40gb"})))
	compare(t, "node.txt", text(t, find(t, sample(t), Options{Nodes: []string{"gpu-2"}})))
}

func text(t *testing.T, r *Report) string {
	t.Helper()
	var out bytes.Buffer
	if err := view(r).Write(&out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func compare(t *testing.T, name, got string) {
	t.Helper()
	path := "testdata/" + name
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func TestFindRefuses(t *testing.T) {
	t.Parallel()
	m := fleet.New(sample(t).Snapshot, fleettest.Driver)
	for want, o := range map[string]Options{
		"no GPU offers partitions of the profile 3g.41gb; there are [1g.10gb": {Profile: "3g.41gb"},
		"node gpu-3 has no devices of the driver gpu.nvidia.com":              {Nodes: []string{"gpu-3"}},
	} {
		if _, err := Find(t.Context(), m, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// TestNotDrainable: claims that nobody would make anew are marked, and come last.
func TestNotDrainable(t *testing.T) {
	t.Parallel()
	f := fleettest.New(t)
	f.AddNode("a", "h100-80-sxm", 1)
	f.AddNode("b", "h100-80-sxm", 1)
	f.AddNode("c", "h100-80-sxm", 1)
	for _, node := range []string{"a", "b", "c"} {
		take(f, "pod-"+node, node, node == "b", "gpu-0000-1b-00-0-mig-1g10gb-0")
	}
	f.Claims[2].Status.ReservedFor = nil
	r := find(t, f, Options{Profile: "7g.80gb"})
	var got []string
	for _, d := range r.Drains {
		got = append(got, fmt.Sprintf("%s %t %s", d.Node, d.Drainable, d.Claims[0].Why))
	}
	if diff := cmp.Diff([]string{"b true ", "c false no pod uses it", "a false pod pod-a has no controller"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestStaysInPlace: partitions that somebody made by hand do not move, nor do tainted ones.
func TestStaysInPlace(t *testing.T) {
	t.Parallel()
	for what, spoil := range map[string]func(*resourceapi.Device){
		"as it is": func(*resourceapi.Device) {},
		"static": func(d *resourceapi.Device) {
			d.Attributes["uuid"] = resourceapi.DeviceAttribute{StringValue: new("MIG-1")}
		},
		"tainted": func(d *resourceapi.Device) {
			d.Taints = []resourceapi.DeviceTaint{{Key: "gpu.nvidia.com/withdrawn", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("a", "h100-80-sxm", 1)
			const device = "gpu-0000-1b-00-0-mig-1g10gb-0"
			for _, s := range f.Slices {
				for i := range s.Spec.Devices {
					if s.Spec.Devices[i].Name == device {
						spoil(&s.Spec.Devices[i])
					}
				}
			}
			take(f, "one", "a", true, device)
			want := []Total{{"4g.40gb", 0, 0}}
			if what == "as it is" {
				want[0].Packed = 1
			}
			if diff := cmp.Diff(want, find(t, f, Options{Profile: "4g.40gb"}).Profiles); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
