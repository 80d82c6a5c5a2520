// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"
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
	f := &finder{model: m, options: o, judge: newJudge(m)}
	r := &Report{TypeMeta: printer.TypeMeta("FragmentationReport"), Profile: o.Profile, Profiles: []Total{}}
	f.report = r
	for _, name := range o.Nodes {
		if !slices.ContainsFunc(m.Nodes, func(n *fleet.Node) bool { return n.Name == name }) {
			return nil, fmt.Errorf("node %s has no devices of the driver %s", name, m.Driver)
		}
	}
	var nodes []*fleet.Node
	for _, n := range m.Nodes {
		if !n.Incomplete && (len(o.Nodes) == 0 || slices.Contains(o.Nodes, n.Name)) {
			nodes = append(nodes, n)
		}
	}
	found := make([]nodeReport, len(nodes))
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, n := range nodes {
		group.Go(func() error {
			found[i] = f.examine(ctx, n)
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for _, n := range found {
		f.add(n)
	}
	if o.Profile != "" && len(r.Profiles) == 0 {
		return nil, fmt.Errorf("no GPU offers partitions of the profile %s; there are %s", o.Profile, f.offered())
	}
	f.addDrains(ctx)
	return r, ctx.Err()
}

type finder struct {
	model   *fleet.Model
	options Options
	report  *Report
	judge   *judge
	boards  []*board
	// packed are the counts of boards whose state was packed and confirmed before.
	packed answers[packKey, packing]
}

type packKey struct{ state, profile string }

// packing is what came of packing a GPU. The allocator may have left it unconfirmed.
type packing struct {
	count       int
	unconfirmed bool
}

// nodeReport is what is lost on a node.
type nodeReport struct {
	boards []*board
	// totals are what fits, in published order; lost are the node's GPUs, and the node itself.
	totals      []Total
	lost        []Lost
	unconfirmed int
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

// examine finds what is lost on a node.
func (f *finder) examine(ctx context.Context, n *fleet.Node) nodeReport {
	var r nodeReport
	for _, g := range n.GPUs {
		b := newBoard(g)
		r.boards = append(r.boards, b)
		for _, profile := range f.wanted(b) {
			now := b.count(profile, b.held)
			pack, first := f.pack(ctx, b, profile)
			if first && pack.unconfirmed {
				r.unconfirmed++
			}
			packed := max(now, pack.count)
			r.totals = addTotal(r.totals, Total{Profile: profile, Now: now, Packed: packed})
			if packed > now {
				r.lost = append(r.lost, Lost{Node: n.Name, GPU: address(g), Profile: profile, Held: held(b.held), Now: now, Packed: packed})
			}
		}
	}
	gathered := gatherAll(r.boards)
	for _, t := range r.totals {
		together, confirmed := f.packNode(ctx, gathered, t.Profile, t.Packed)
		if !confirmed {
			r.unconfirmed++
		}
		if together > t.Packed {
			r.lost = append(r.lost, Lost{Node: n.Name, Profile: t.Profile, Now: t.Now, Packed: together})
		}
	}
	return r
}

// add adds what was found on a node.
func (f *finder) add(n nodeReport) {
	f.boards = append(f.boards, n.boards...)
	for _, t := range n.totals {
		f.report.Profiles = addTotal(f.report.Profiles, t)
	}
	f.report.Lost = append(f.report.Lost, n.lost...)
	f.report.Unconfirmed += n.unconfirmed
}

func addTotal(totals []Total, t Total) []Total {
	at := slices.IndexFunc(totals, func(other Total) bool { return other.Profile == t.Profile })
	if at < 0 {
		return append(totals, t)
	}
	totals[at].Now += t.Now
	totals[at].Packed += t.Packed
	return totals
}

// pack returns how many partitions of a profile fit on a packed GPU, as the allocator confirms.
// GPUs that are in the same state are packed once; first says that this one was.
func (f *finder) pack(ctx context.Context, b *board, profile string) (p packing, first bool) {
	return f.packed.of(packKey{b.state(), profile}, func() packing {
		now := b.count(profile, b.held)
		places, count, ok := b.pack(profile, sorted(b.held))
		switch {
		case !ok || count <= now:
			return packing{count: now}
		case !f.judge.packed(ctx, profile, []layout{{b, places, count}}):
			return packing{count: now, unconfirmed: true}
		}
		return packing{count: count}
	})
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
