// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// runAll runs the cases PREFIX1 to PREFIXn, all of which must be there and no other.
func runAll(t *testing.T, cases map[string]func(t *testing.T), prefix string, n int) {
	t.Helper()
	ran := 0
	for i := 1; i <= n; i++ {
		id := fmt.Sprint(prefix, i)
		if cases[id] == nil {
			t.Errorf("%s is not tested", id)
			continue
		}
		t.Run(id, cases[id])
		ran++
	}
	if ran != len(cases) {
		t.Errorf("%d cases ran, there are %d", ran, len(cases))
	}
}

// everything is a fleet that offers all of it.
func everything() Fleet {
	f := Fleet{Offered: map[Mechanism]bool{}, MIG: true, Models: 1, Room: 1000}
	for _, m := range Mechanisms {
		f.Offered[m] = true
	}
	delete(f.Offered, SoftwareLimits)
	return f
}

// noMIG offers all that a GPU such as an L4 does.
func noMIG() Fleet {
	f := everything()
	f.MIG = false
	for _, m := range []Mechanism{Partition, PartitionMPS, PartitionTimeSlice} {
		delete(f.Offered, m)
	}
	return f
}

// TestRules has the published rules of decision, by their ids.
func TestRules(t *testing.T) {
	decides := func(id string, w Workload, f Fleet, want Mechanism) func(*testing.T) {
		return func(t *testing.T) {
			t.Helper()
			d := Decide(w, f)
			if d.Rule.ID != id || d.Mechanism != want {
				t.Errorf("%+v: rule %s, %q, want %s, %q", w, d.Rule.ID, d.Mechanism, id, want)
			}
			if d.Rule.When == "" || d.Rule.Then == "" {
				t.Errorf("rule %s has no words", d.Rule.ID)
			}
		}
	}
	all := func(checks ...func(*testing.T)) func(*testing.T) {
		return func(t *testing.T) {
			t.Helper()
			for _, c := range checks {
				c(t)
			}
		}
	}
	notes := func(id string, w Workload, f Fleet, want bool) func(*testing.T) {
		return func(t *testing.T) {
			t.Helper()
			d := Decide(w, f)
			if got := slices.ContainsFunc(d.Notes, func(r Rule) bool { return r.ID == id }); got != want {
				t.Errorf("%+v: notes %v, want %s: %v", w, d.Notes, id, want)
			}
		}
	}
	service := Workload{Kind: Inference, Trust: SameTeam, Traffic: Steady, Memory: 16 * gib, Count: 1}
	with := func(w Workload, change func(*Workload)) Workload { change(&w); return w }
	old := noMIG()
	old.PreVolta = true
	delete(old.Offered, MPS)
	limited := noMIG()
	limited.Offered[SoftwareLimits] = true
	crowded := everything()
	crowded.Room = 4
	mixed := everything()
	mixed.Models = 2
	full := everything()
	full.Fills = true
	wholeOnly := Fleet{Offered: map[Mechanism]bool{Whole: true}, MIG: true, Models: 1}

	cases := map[string]func(t *testing.T){
		"D1": all(
			decides("D1", with(service, func(w *Workload) { w.Trust = OtherTenants }), everything(), Partition),
			decides("D1", with(service, func(w *Workload) { w.Trust = Regulated; w.Latency = P99 }), everything(), Partition),
			decides("D1", with(service, func(w *Workload) { w.Trust = OtherTenants; w.Kind = Notebook }), everything(), Partition),
			decides("D1", with(service, func(w *Workload) { w.Trust = Regulated }), noMIG(), Whole),
			decides("D1", service, everything(), Partition),
		),
		"D2": all(
			decides("D2", with(service, func(w *Workload) { w.Memory = ModelMemory(1.5, false) }), everything(), MPS),
			decides("D2", with(service, func(w *Workload) { w.Kind = MPI }), everything(), MPS),
		),
		"D3": all(
			decides("D3", Workload{Kind: Notebook, Trust: SameTeam}, everything(), TimeSlice),
			decides("D3", Workload{Kind: CI, Trust: SameTeam}, noMIG(), TimeSlice),
			decides("D3", with(service, func(w *Workload) { w.Traffic = Bursty }), everything(), TimeSlice),
			decides("D3", with(service, func(w *Workload) { w.Traffic = Batch }), everything(), TimeSlice),
			decides("D3", with(service, func(w *Workload) { w.Latency = Relaxed }), everything(), TimeSlice),
		),
		"D4": all(
			decides("D4", with(service, func(w *Workload) { w.Latency = P99 }), everything(), MPS),
			decides("D4", with(service, func(w *Workload) { w.Latency = P99; w.Traffic = Bursty }), noMIG(), MPS),
			decides("D4", with(service, func(w *Workload) { w.Latency = P99 }), old, Whole),
			func(t *testing.T) {
				t.Helper()
				for _, r := range Rules {
					if r.ID == "D4" && slices.Contains(r.Prefer, TimeSlice) {
						t.Error("D4 prefers time slices to something")
					}
				}
			},
		),
		"D5": all(
			decides("D5", Workload{Kind: Training, Trust: SameTeam}, everything(), Whole),
			decides("D5", Workload{Kind: Training, Trust: Regulated, Memory: 60 * gib}, full, Whole),
			decides("D5", with(service, func(w *Workload) { w.Memory = ModelMemory(70, true) }), wholeOnly, Whole),
		),
		"D6": decides("D6", Workload{Kind: Notebook, Trust: SameTeam, Memory: 4 * gib}, limited, SoftwareLimits),
		"D7": decides("D7", service, old, TimeSlice),
		"D8": decides("D8", Workload{Kind: Notebook, Trust: SameTeam, Memory: gib, Count: 28}, crowded, PartitionTimeSlice),
		"D9": all(
			notes("D9", service, mixed, true),
			notes("D9", service, everything(), false),
		),
		"D10": all(
			notes("D10", with(service, func(w *Workload) { w.Count = 3 }), everything(), true),
			notes("D10", service, everything(), false),
		),
	}
	runAll(t, cases, "D", 10)
}

// TestEveryDecision goes through all workloads on several fleets: untrusted neighbours share
// nothing but hardware, a p99 never waits for time slices, and there always is an answer.
func TestEveryDecision(t *testing.T) {
	limited := noMIG()
	limited.Offered[SoftwareLimits] = true
	n := 0
	for _, f := range []Fleet{everything(), noMIG(), limited} {
		for _, kind := range Kinds {
			for _, latency := range append([]string{""}, Latencies...) {
				for _, trust := range Trusts {
					for _, traffic := range Traffics {
						for _, memory := range []int64{0, gib, 16 * gib} {
							n++
							w := Workload{Kind: kind, Latency: latency, Trust: trust, Traffic: traffic, Memory: memory, Count: 1}
							d := Decide(w, f)
							if d.Mechanism == "" {
								t.Errorf("%+v: no answer", w)
							}
							hardware := Guarantees[d.Mechanism].Memory == "hardware"
							if trust != SameTeam && !hardware {
								t.Errorf("%+v: %s", w, d.Mechanism)
							}
							if latency == P99 && strings.Contains(string(d.Mechanism), "time-slice") {
								t.Errorf("%+v: %s", w, d.Mechanism)
							}
						}
					}
				}
			}
		}
	}
	if want := 3 * 5 * 3 * 3 * 3 * 3; n != want {
		t.Errorf("%d workloads, want %d", n, want)
	}
}

// TestIsolation compares the matrix with the published one: Partage promises what articles
// promise, or less, except where MPS has more on the axes of Volta and later.
func TestIsolation(t *testing.T) {
	want := map[Mechanism]Isolation{
		TimeSlice:      {"none", "none", "partial", "high"},
		MPS:            {"partial", "none", "none", "low to medium"},
		Partition:      {"hardware", "hardware", "hardware", "negligible"},
		SoftwareLimits: {"software", "software", "partial", "low to medium"},
	}
	if got := Guarantees[TimeSlice]; got.Fault != "none" || !strings.Contains(got.Note, "partial") {
		t.Errorf("time-slicing: Partage is stricter about faults and says so, but has %q and %q", got.Fault, got.Note)
	}
	if len(Guarantees) != len(Mechanisms) {
		t.Errorf("%d guarantees for %d mechanisms", len(Guarantees), len(Mechanisms))
	}
	for _, m := range []Mechanism{Whole, Partition} {
		if Guarantees[m].Isolation != want[Partition] {
			t.Errorf("%s: %v", m, Guarantees[m].Isolation)
		}
	}
}

// TestAttribute compares the matrix with what the driver publishes for each kind of device.
func TestAttribute(t *testing.T) {
	mechanisms := map[string]Mechanism{
		"gpu": Whole, "mig": Partition, "mps": MPS, "timeslice": TimeSlice,
		"gpu of partition": Whole, "mps of partition": PartitionMPS, "timeslice of partition": PartitionTimeSlice,
	}
	checked := map[Mechanism]int{}
	for _, file := range []string{"h100-80-sxm", "a100-80-mig-policy", "t4"} {
		for _, slice := range goldenSlices(t, file) {
			for _, d := range slice.Spec.Devices {
				kind := *d.Attributes["type"].StringValue
				if kind == "observer" {
					continue
				}
				if kind != "mig" && *d.Attributes["profile"].StringValue != "" {
					kind += " of partition"
				}
				m := mechanisms[kind]
				checked[m]++
				if got := *d.Attributes["isolation"].StringValue; got != Guarantees[m].Memory {
					t.Errorf("%s: isolation of device %s is %q, the matrix has %q for a %s", file, d.Name, got, Guarantees[m].Memory, m)
				}
			}
		}
	}
	for _, m := range []Mechanism{Whole, Partition, MPS, TimeSlice, PartitionTimeSlice} {
		if checked[m] == 0 {
			t.Errorf("no device is a %s", m)
		}
	}
}

func goldenSlices(t *testing.T, name string) []resourceapi.ResourceSlice {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../device/testdata/slices", name+".yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var all []resourceapi.ResourceSlice
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		var slice resourceapi.ResourceSlice
		if err := yaml.Unmarshal([]byte(document), &slice); err != nil {
			t.Fatal(err)
		}
		all = append(all, slice)
	}
	return all
}

// TestModelSizes has the published rules of thumb for a GPU with 80 GB. 34 billion parameters
// are in 3g.40gb only if they are quantized: at 16 bits their weights alone have 63 GiB.
func TestModelSizes(t *testing.T) {
	f := dgx(t)
	f.AddPartitionedNode("n2", "a100-80", 1)
	offers, err := offersOf(fleet.New(f.Snapshot, fleettest.Driver))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		billions  float64
		quantized bool
		profile   string // "" is whole GPUs
	}{
		{7, true, "1g.10gb"}, {8, true, "1g.10gb"}, {7, false, "2g.20gb"}, {13, false, "3g.40gb"}, {13, true, "2g.20gb"},
		{34, true, "3g.40gb"}, {34, false, ""}, {70, true, ""}, {70, false, ""}, {180, true, ""},
	} {
		for _, g := range offers {
			// Those that are less than the GPU, also where it is in MIG mode.
			g.Whole = true
			got := ""
			if p := g.partition(ModelMemory(c.billions, c.quantized)); p != nil {
				got = p.Profile
			}
			if got != c.profile {
				t.Errorf("%s, %gB, quantized %v: %q, want %q", g.ProductName, c.billions, c.quantized, got, c.profile)
			}
		}
	}
	if got := float64(ModelMemory(7, false)) / 1e9; got < 16 || got > 17 {
		t.Errorf("7B at 16 bits needs %.1f GB, want about 16", got)
	}
	// The example of the paper, and a fifth: 7.5 billion parameters take 120 GB.
	if got := float64(TrainingMemory(7.5)) / 1e9; got != 144 {
		t.Errorf("training 7.5B needs %.1f GB, want 144", got)
	}
	// Below three billion parameters is small.
	for billions, want := range map[float64]bool{0.35: true, 1.5: true, 2.9: true, 3: false, 7: false} {
		if got := Small(ModelMemory(billions, false)); got != want {
			t.Errorf("%gB is small: %v, want %v", billions, got, want)
		}
	}
	if Small(0) {
		t.Error("an unknown amount is small")
	}
}

// TestPage: docs/concepts/choosing.md has the matrix, the rules, the sizes and the figures as they are here.
func TestPage(t *testing.T) {
	data, err := os.ReadFile("../../../docs/concepts/choosing.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	wanted := map[string]string{}
	for _, m := range []Mechanism{Whole, Partition, MPS, TimeSlice, SoftwareLimits} {
		g := Guarantees[m]
		memory := g.Memory
		if m == MPS {
			memory = "process: an address space and a limit for each process"
		}
		wanted[string(m)] = fmt.Sprintf("| %s | %s | %s | %s | %s |", m, memory, g.Compute, g.Fault, g.Jitter)
	}
	for _, r := range Rules {
		wanted["rule "+r.ID] = fmt.Sprintf("| %s | ", r.ID)
	}
	for _, c := range []struct {
		name      string
		billions  float64
		quantized bool
	}{{"13B", 13, false}, {"34B, quantized", 34, true}, {"34B", 34, false}, {"70B, quantized", 70, true}, {"70B", 70, false}} {
		wanted["size "+c.name] = fmt.Sprintf("| %s | %.0f GiB |", c.name, float64(ModelMemory(c.billions, c.quantized))/gib)
	}
	if want := 5 + 10 + 5; len(wanted) != want {
		t.Errorf("%d things are looked for, want %d", len(wanted), want)
	}
	for what, text := range wanted {
		if !strings.Contains(page, text) {
			t.Errorf("docs/concepts/choosing.md lacks %q for %s", text, what)
		}
	}
	for _, banned := range doNotRepeat {
		if strings.Contains(strings.ToLower(page), banned) {
			t.Errorf("docs/concepts/choosing.md repeats %q", banned)
		}
	}
}

// doNotRepeat are sentences that are said of GPU sharing and do not hold for Partage.
var doNotRepeat = []string{
	"cannot be mixed", "needs a gpu reset", "maintenance window", "one mechanism per node pool",
}

// TestTexts looks for claims of others that do not hold for Partage.
func TestTexts(t *testing.T) {
	var texts []string
	for _, r := range Rules {
		texts = append(texts, r.When, r.Then)
	}
	for _, g := range Guarantees {
		texts = append(texts, g.Note)
	}
	for _, m := range Mechanisms {
		for _, trust := range Trusts {
			for _, latency := range Latencies {
				why := WhyNot(m, Workload{Trust: trust, Latency: latency})
				if why == "" {
					t.Errorf("nothing is said of a %s", m)
				}
				texts = append(texts, why)
			}
		}
	}
	for _, text := range texts {
		for _, banned := range doNotRepeat {
			if strings.Contains(strings.ToLower(text), banned) {
				t.Errorf("%q repeats %q", text, banned)
			}
		}
	}
}
