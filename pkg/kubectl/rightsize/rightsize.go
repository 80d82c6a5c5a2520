// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package rightsize compares what claims have used with what they hold, and finds the smallest
// partition or share of the fleet that would have done.
package rightsize

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// Verdicts.
const (
	// Smaller: something smaller would have done.
	Smaller = "Smaller"
	// Right: nothing that the fleet offers is smaller and would have done.
	Right = "Right"
	// Unknown: too little was measured.
	Unknown = "Unknown"
)

// SizeList is what the command prints.
type SizeList struct {
	metav1.TypeMeta `json:",inline"`

	// Headroom is the part by which a device must exceed what was used.
	Headroom float64 `json:"headroom"`
	// PricePerGPUHour is what was given, 0 if nothing was.
	PricePerGPUHour float64 `json:"pricePerGPUHour,omitempty"`
	Items           []Size  `json:"items"`
}

// Size is about a device of a claim.
type Size struct {
	scrape.ID `json:",inline"`

	Request string `json:"request"`
	// Source is the manifest that would change.
	Source  Source `json:"source"`
	Verdict string `json:"verdict"`
	// Reason says why the verdict is Unknown, or why there is no Change.
	Reason string `json:"reason,omitempty"`
	// ObservedSeconds is how long the driver has looked.
	ObservedSeconds float64 `json:"observedSeconds,omitempty"`
	// PeakBytes is the most memory of any sample.
	PeakBytes *int64 `json:"peakBytes,omitempty"`
	// Busy is the highest part of the time in which kernels ran, of the samples that the
	// command has seen. It is missing where GPUs do not report it.
	Busy *float64 `json:"busy,omitempty"`
	// Samples is how many these are.
	Samples int   `json:"samples,omitempty"`
	Holds   Part  `json:"holds"`
	Enough  *Part `json:"enough,omitempty"`
	// SavedGPUs is the difference, SavedPerHour what it costs.
	SavedGPUs    float64 `json:"savedGPUs,omitempty"`
	SavedPerHour float64 `json:"savedPerHour,omitempty"`
	// Change is what would change in the claim or its template. Of several devices that come from one request, the one that needs the most has it.
	Change *Change `json:"change,omitempty"`

	holding *fleet.Holding
}

// Part is a GPU or a part of one.
type Part struct {
	Type    string `json:"type"`
	Profile string `json:"profile,omitempty"`
	// MemoryBytes is what the claim can use; 0 is not known, or not limited.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// SMPercent is that of a share.
	SMPercent int64 `json:"smPercent,omitempty"`
	// GPUs is the part that others cannot have.
	GPUs float64 `json:"gpus"`
}

// Query says what is asked for.
type Query struct {
	fleet.Scope
	// Headroom is the part by which a device must exceed what was used: 0.1 for a tenth.
	Headroom float64
	// Least is how long must have been looked before anything is advised.
	Least time.Duration
	// Sharing allows MPS shares for claims that have a device alone. They have less isolation.
	Sharing bool
	// Price is that of a GPU for an hour, 0 if it does not matter.
	Price float64
	Now   time.Time
}

// Compare says for each device of each claim whether something smaller would have done.
func Compare(m *fleet.Model, o *Observation, q Query) *SizeList {
	list := &SizeList{TypeMeta: printer.TypeMeta("SizeList"), Headroom: q.Headroom, PricePerGPUHour: q.Price, Items: []Size{}}
	offers := offersOf(m)
	for _, h := range m.Holdings {
		if !h.Admin() && q.Has(h) {
			list.Items = append(list.Items, sizeOf(h, o, q, offers))
		}
	}
	list.change(m)
	slices.SortStableFunc(list.Items, func(a, b Size) int { return cmp.Compare(b.SavedGPUs, a.SavedGPUs) })
	return list
}

// change says what would change in manifests. There is one edit for all claims of a template, and none if some need what they hold, or if that
// is not known of them.
func (l *SizeList) change(m *fleet.Model) {
	type request struct {
		of   Source
		name string
	}
	edits := map[request][]*Size{}
	for i := range l.Items {
		s := &l.Items[i]
		edits[request{s.Source, s.Request}] = append(edits[request{s.Source, s.Request}], s)
	}
	for _, all := range edits {
		other := slices.IndexFunc(all, func(s *Size) bool { return s.Verdict != Smaller })
		for _, s := range all {
			if other >= 0 && s.Verdict == Smaller && s.Reason == "" {
				s.Reason = fmt.Sprintf("not all claims of %s %s would have done with less, as far as is known: see %s", s.Source.Kind, s.Source.Name, all[other].Name)
			}
		}
		if other >= 0 {
			continue
		}
		most := slices.MaxFunc(all, func(a, b *Size) int { return cmp.Compare(a.Enough.GPUs, b.Enough.GPUs) })
		if most.Reason == "" {
			most.Change = changeOf(m, most)
		}
	}
}

func sizeOf(h *fleet.Holding, o *Observation, q Query, offers map[string][]*fleet.Device) Size {
	source, unchangeable := sourceOf(h)
	s := Size{ID: scrape.IDOf(h), Request: h.Result.Request, Source: source, Verdict: Unknown, holding: h}
	if h.Device == nil {
		s.Reason = "no ResourceSlice has the device any more"
		return s
	}
	s.Holds = holds(h)
	seen := o.claims[s.ID]
	if seen == nil {
		_, s.Reason = o.last.Of(h)
		return s
	}
	s.PeakBytes, s.Busy, s.Samples = seen.peak, seen.busy, seen.samples
	// The driver forgets what it has measured when it is restarted.
	since := slices.MaxFunc([]time.Time{seen.since, fleet.AllocatedAt(h.Claim).Time}, time.Time.Compare)
	observed := max(0, q.Now.Sub(since))
	s.ObservedSeconds = observed.Seconds()
	switch {
	case seen.peak == nil:
		s.Reason = "the driver does not report the claim's memory"
		return s
	case observed < q.Least:
		s.Reason = fmt.Sprintf("it was observed for %s, and nothing is advised before %s", duration.HumanDuration(observed), duration.HumanDuration(q.Least))
		return s
	case seen.samples == 1 && seen.busy != nil && (seen.idle == nil || *seen.idle < observed):
		s.Reason = "how busy it was is known of this moment only: --watch 10m looks for longer"
		return s
	}
	s.Verdict = Right
	need := needOf(h, seen, q)
	for _, d := range offers[h.Device.GPU.ProductName] {
		p, fits := need.on(d)
		if fits && p.GPUs < s.Holds.GPUs-leastSaving && (s.Enough == nil || p.GPUs < s.Enough.GPUs) {
			s.Enough = &p
		}
	}
	if s.Enough == nil {
		return s
	}
	s.Verdict, s.Reason = Smaller, unchangeable
	s.SavedGPUs = s.Holds.GPUs - s.Enough.GPUs
	s.SavedPerHour = s.SavedGPUs * q.Price
	return s
}

// leastSaving is the part of a GPU that is worth a line: less is shown as 0.00.
const leastSaving = 0.005

func holds(h *fleet.Holding) Part {
	p := Part{Type: h.Device.Type, Profile: h.Device.Profile, GPUs: h.Part()}
	if !h.Device.Shared() {
		p.MemoryBytes = h.Device.Capacity(fleet.CapacityMemory)
		return p
	}
	memory, percent := h.Result.ConsumedCapacity[fleet.CapacityMemory], h.Result.ConsumedCapacity[fleet.CapacitySMPercent]
	p.MemoryBytes, p.SMPercent = memory.Value(), percent.Value()
	return p
}

// offersOf returns devices by the product of their GPU, one of each type and profile.
func offersOf(m *fleet.Model) map[string][]*fleet.Device {
	offers := map[string][]*fleet.Device{}
	for d := range m.Devices() {
		of := d.GPU.ProductName
		known := slices.ContainsFunc(offers[of], func(other *fleet.Device) bool { return other.Type == d.Type && other.Profile == d.Profile })
		if d.Type != fleet.TypeObserver && !known {
			offers[of] = append(offers[of], d)
		}
	}
	return offers
}

// need is what would have been enough.
type need struct {
	memory int64
	// device is what the claim has, and busy which part of its multiprocessors would be enough: 0 if that is not known.
	device *fleet.Device
	busy   float64
	// kinds are those of devices that isolate as well as the one that the claim has.
	kinds []string
	// percent is what a share has now; 0 if the claim has its device alone.
	percent int64
}

func needOf(h *fleet.Holding, seen *observed, q Query) need {
	percent := h.Result.ConsumedCapacity[fleet.CapacitySMPercent]
	n := need{
		device: h.Device, memory: int64(math.Ceil(float64(*seen.peak) * (1 + q.Headroom))), percent: percent.Value(), kinds: []string{fleet.TypeMIG},
	}
	share := 1.0
	if n.percent > 0 {
		share = float64(min(100, n.percent)) / 100
		// Somebody asked for that much, which stays if it is not known how busy it was.
		n.busy = share
	}
	if seen.busy != nil {
		n.busy = *seen.busy * share * (1 + q.Headroom)
	}
	if h.Device.Shared() {
		n.kinds = append(n.kinds, h.Device.Type)
	} else if q.Sharing {
		n.kinds = append(n.kinds, fleet.TypeMPS)
	}
	return n
}

// multiprocessors returns how many of them are needed, 0 if that is not known.
func (n need) multiprocessors() float64 {
	return n.busy * float64(n.device.Capacity("multiprocessors"))
}

// on returns the part of a device that would be enough, if the device has that much.
func (n need) on(d *fleet.Device) (Part, bool) {
	if !slices.Contains(n.kinds, d.Type) {
		return Part{}, false
	}
	p := Part{Type: d.Type, Profile: d.Profile, GPUs: d.Part()}
	if !d.Shared() {
		p.MemoryBytes = d.Capacity(fleet.CapacityMemory)
		return p, p.MemoryBytes >= n.memory && float64(d.Capacity("multiprocessors")) >= n.multiprocessors()
	}
	memory, fits := granted(d.Published.Capacity[fleet.CapacityMemory], n.memory)
	if !fits {
		return Part{}, false
	}
	percent := int64(0)
	// Time slices have no limit of multiprocessors.
	if sm := d.Published.Capacity[fleet.CapacitySMPercent]; sm.Value.Value() > 0 {
		if percent, fits = granted(sm, n.percentOf(d, sm)); !fits {
			return Part{}, false
		}
	}
	p.MemoryBytes, p.SMPercent = memory, percent
	p.GPUs = d.Part() * min(1, max(
		fleet.Ratio(1, d.Capacity(fleet.CapacityShares)), fleet.Ratio(memory, d.Capacity(fleet.CapacityMemory)), fleet.Ratio(percent, d.Capacity(fleet.CapacitySMPercent)),
	))
	return p, true
}

// percentOf returns which part of a shared device's multiprocessors would be enough. Where that is
// not known it is what the claim has, or what the scheduler gives without a request.
func (n need) percentOf(d *fleet.Device, sm resourceapi.DeviceCapacity) int64 {
	all := float64(d.Capacity("multiprocessors"))
	switch {
	case n.multiprocessors() > 0 && all > 0:
		return wholePercent(n.multiprocessors() / all)
	case n.busy > 0 && d.Profile == n.device.Profile:
		return wholePercent(n.busy)
	case n.percent > 0:
		return n.percent
	}
	byDefault, _ := fleet.Granted(nil, &sm)
	return max(1, byDefault.Value())
}

// wholePercent rounds a part up to whole percent. Hundredths are not exact: 0.07 is not more than 7 percent.
func wholePercent(part float64) int64 {
	const hair = 1e-9
	return max(1, int64(math.Ceil(part*100-hair)))
}

// granted returns what the scheduler makes of a request, and whether there is as much.
func granted(c resourceapi.DeviceCapacity, want int64) (int64, bool) {
	amount, beyond := fleet.Granted(resource.NewQuantity(want, c.Value.Format), &c)
	return amount.Value(), beyond == "" && amount.Cmp(c.Value) <= 0
}

// Observation is what several looks at the driver's pods have shown.
type Observation struct {
	claims map[scrape.ID]*observed
	last   *scrape.Result
}

// observed is what is known of a device of a claim.
type observed struct {
	peak    *int64
	busy    *float64
	samples int
	since   time.Time
	// idle is for how long it did not work before the last sample.
	idle *time.Duration
}

// NewObservation returns one that has seen nothing.
func NewObservation() *Observation {
	return &Observation{claims: map[scrape.ID]*observed{}, last: &scrape.Result{}}
}

// Add adds a look.
func (o *Observation) Add(r *scrape.Result) {
	o.last = r
	for _, c := range r.Claims {
		seen := o.claims[c.ID]
		if seen == nil {
			seen = &observed{since: c.Since}
			o.claims[c.ID] = seen
		}
		seen.samples++
		seen.peak = larger(seen.peak, larger(c.PeakBytes, c.UsedBytes))
		seen.busy, seen.idle = larger(seen.busy, c.Utilization), c.Idle
	}
}

func larger[T int64 | float64](a, b *T) *T {
	if a == nil || b != nil && *b > *a {
		return b
	}
	return a
}
