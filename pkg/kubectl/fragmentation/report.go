// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// Report is what is lost by fragmentation.
type Report struct {
	metav1.TypeMeta `json:",inline"`

	// Profile is the one that was asked for, "" for all.
	Profile string `json:"profile,omitempty"`
	// Profiles are what fits now in all nodes together, in published order.
	Profiles []Total `json:"profiles"`
	// Lost are the places where more would fit.
	Lost []Lost `json:"lost,omitempty"`
	// Drains are what would have to end so that a profile fits, those of one profile by cost.
	Drains []Drain `json:"drains,omitempty"`
	// Unconfirmed is how many suggestions the scheduler's allocator did not confirm. They are
	// left out.
	Unconfirmed int `json:"unconfirmed,omitempty"`
}

// Total is how many partitions of a profile fit in all nodes together.
type Total struct {
	Profile string `json:"profile"`
	// Now is as it is, Packed if the partitions of each GPU lay as close together as they can.
	Now    int `json:"now"`
	Packed int `json:"packed"`
}

// Lost is a GPU, or a node, on which more partitions of a profile would fit.
type Lost struct {
	Node string `json:"node"`
	// GPU is its PCI address, "" for all GPUs of the node together: partitions may move from
	// one to the other.
	GPU     string `json:"gpu,omitempty"`
	Profile string `json:"profile"`
	// Held is what claims have there, such as 1g.10gb@0: a profile and its first memory slice.
	Held   []string `json:"held,omitempty"`
	Now    int      `json:"now"`
	Packed int      `json:"packed"`
}

// Drain are claims of one GPU that would have to end so that a profile fits.
type Drain struct {
	Profile string  `json:"profile"`
	Node    string  `json:"node"`
	GPU     string  `json:"gpu"`
	Claims  []Claim `json:"claims"`
	// Drainable says that all of the claims' pods have a controller, which makes others.
	Drainable bool `json:"drainable"`
}

// Claim is one that would have to end.
type Claim struct {
	Namespace string   `json:"namespace"`
	Name      string   `json:"name"`
	Devices   []string `json:"devices"`
	Pods      []string `json:"pods,omitempty"`
	// Drainable says that its pods have a controller; Why says why not.
	Drainable bool   `json:"drainable"`
	Why       string `json:"why,omitempty"`
}

// Options choose what is looked for.
type Options struct {
	// Profile is "" for all.
	Profile string
	// Nodes are the names of those to look at, all if there are none.
	Nodes []string
	// Limit is how many drains are shown of a profile, 0 for all.
	Limit int
}

// Find finds what is lost, and what would help.
func Find(ctx context.Context, m *fleet.Model, o Options) (*Report, error) {
	f := &finder{model: m, options: o, judge: newJudge(m), packed: map[packKey]int{}}
	r := &Report{TypeMeta: printer.TypeMeta("FragmentationReport"), Profile: o.Profile, Profiles: []Total{}}
	f.report = r
	for _, name := range o.Nodes {
		if !slices.ContainsFunc(m.Nodes, func(n *fleet.Node) bool { return n.Name == name }) {
			return nil, fmt.Errorf("node %s has no devices of the driver %s", name, m.Driver)
		}
	}
	for _, n := range m.Nodes {
		if !n.Incomplete && (len(o.Nodes) == 0 || slices.Contains(o.Nodes, n.Name)) {
			f.addNode(ctx, n)
		}
	}
	if o.Profile != "" && len(r.Profiles) == 0 {
		return nil, fmt.Errorf("no GPU offers partitions of the profile %s; there are %s", o.Profile, f.offered())
	}
	f.addDrains(ctx)
	return r, ctx.Err()
}

type packKey struct{ state, profile string }

type finder struct {
	model   *fleet.Model
	options Options
	report  *Report
	judge   *judge
	boards  []*board
	// packed are the counts of boards whose state was packed and confirmed before.
	packed map[packKey]int
}

// offered lists all profiles.
func (f *finder) offered() string {
	all := map[string]bool{}
	for _, n := range f.model.Nodes {
		for _, g := range n.GPUs {
			for _, d := range g.Devices {
				if d.Type == fleet.TypeMIG {
					all[d.Profile] = true
				}
			}
		}
	}
	return fmt.Sprint(slices.Sorted(maps.Keys(all)))
}

func (f *finder) wanted(b *board) []string {
	if f.options.Profile == "" {
		return b.profiles
	}
	if len(b.partitions[f.options.Profile]) > 0 {
		return []string{f.options.Profile}
	}
	return nil
}

// addNode adds what is lost on a node.
func (f *finder) addNode(ctx context.Context, n *fleet.Node) {
	type sum struct{ now, packed int }
	sums := map[string]*sum{}
	var order []string
	var own []*board
	for _, g := range n.GPUs {
		b := newBoard(g)
		own = append(own, b)
		for _, profile := range f.wanted(b) {
			now := b.count(profile, b.held)
			packed := max(now, f.pack(ctx, b, profile))
			if sums[profile] == nil {
				sums[profile] = &sum{}
				order = append(order, profile)
			}
			sums[profile].now += now
			sums[profile].packed += packed
			if packed > now {
				f.report.Lost = append(f.report.Lost, Lost{Node: n.Name, GPU: address(g), Profile: profile, Held: held(b.held), Now: now, Packed: packed})
			}
		}
	}
	f.boards = append(f.boards, own...)
	gathered := gatherAll(own)
	for _, profile := range order {
		s := sums[profile]
		f.total(profile, s.now, s.packed)
		if together := f.packNode(ctx, gathered, profile, s.packed); together > s.packed {
			f.report.Lost = append(f.report.Lost, Lost{Node: n.Name, Profile: profile, Now: s.now, Packed: together})
		}
	}
}

func (f *finder) total(profile string, now, packed int) {
	at := slices.IndexFunc(f.report.Profiles, func(t Total) bool { return t.Profile == profile })
	if at < 0 {
		f.report.Profiles = append(f.report.Profiles, Total{Profile: profile})
		at = len(f.report.Profiles) - 1
	}
	f.report.Profiles[at].Now += now
	f.report.Profiles[at].Packed += packed
}

// pack returns how many partitions of a profile fit on a packed GPU, as the allocator confirms.
// GPUs that are in the same state are packed once.
func (f *finder) pack(ctx context.Context, b *board, profile string) int {
	key := packKey{b.state(), profile}
	if known, has := f.packed[key]; has {
		return known
	}
	now := b.count(profile, b.held)
	devices := sorted(b.held)
	places, count, ok := b.pack(profile, devices)
	if !ok {
		count = now
	}
	if count > now && !f.judge.packed(ctx, profile, []layout{{b, places, count}}) {
		f.report.Unconfirmed++
		count = now
	}
	f.packed[key] = count
	return count
}

// address is that by which people know a GPU.
func address(g *fleet.GPU) string { return cmp.Or(g.PCIBusID, g.Name) }

// held describes devices: profile and first memory slice.
func held(devices []*fleet.Device) []string {
	var out []string
	for _, d := range devices {
		text := cmp.Or(d.Profile, d.Type)
		if len(d.Placement) > 0 {
			text += fmt.Sprintf("@%d", d.Placement[0])
		}
		if d.Shared() && d.Profile != "" {
			text += " (" + d.Type + ")"
		}
		out = append(out, text)
	}
	return out
}
