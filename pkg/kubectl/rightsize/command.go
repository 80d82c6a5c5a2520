// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rightsize

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// Flags are those of the command, beside Options.
type Flags struct {
	Scrape scrape.Options
	// Watch is for how long to look, 0 for once.
	Watch time.Duration
	Query
}

// NewCommand returns kubectl gpu rightsize.
func NewCommand(o *options.Options) *cobra.Command {
	f := Flags{Query: Query{Headroom: 0.1, Least: 30 * time.Minute}, Scrape: scrape.Options{Timeout: scrape.DefaultTimeout}}
	c := &cobra.Command{
		Use:   "rightsize",
		Short: "Find the smallest partition or share that would have been enough for each claim",
		Long: `Compare what each claim has used with what it holds, and find the smallest partition or share of the
same GPU model that the fleet offers and that would have been enough, with the change of the manifest.

The memory is the most of any sample since the driver's pod began to look; OBSERVED says how long that
is. How busy the multiprocessors were is what the command sees itself, for as long as --watch says: one
moment says nothing of a claim that has worked before, so that without --watch nothing is advised for
it. Where GPUs do not report it, only the memory counts, and BUSY is "-": a smaller partition has fewer
multiprocessors, too. A claim that was quiet while it was observed needs more than this says, so
that nothing is advised before --min-observation. A template gets one edit, and none if one of its claims
needs what it holds; what the scheduler makes for extended resources cannot be edited.

A claim that has its device alone is not told to share, except with --sharing.`,
		Example: `  kubectl gpu rightsize -A --price 3.25
  kubectl gpu rightsize -n team --watch 10m --sharing`,
		Args: cobra.NoArgs,
		RunE: o.Run(func(ctx context.Context, client kubernetes.Interface, _ []string) error {
			return Run(ctx, o, client, f, time.Now)
		}),
	}
	o.AddTableFlags(c)
	o.AddSelectionFlags(c, options.OfClaims)
	f.Scrape.AddFlags(c.Flags())
	c.Flags().DurationVar(&f.Watch, "watch", f.Watch, "How long to look at how busy claims are; by default once")
	c.Flags().DurationVar(&f.Least, "min-observation", f.Least, "How long the driver must have looked at a claim before anything is advised")
	c.Flags().Float64Var(&f.Headroom, "headroom", f.Headroom, "By which part a device must exceed what was used: 0.1 for a tenth")
	c.Flags().Float64Var(&f.Price, "price", f.Price, "What a GPU costs for an hour")
	c.Flags().BoolVar(&f.Sharing, "sharing", f.Sharing, "Consider MPS shares for claims that have their devices alone; shares isolate less")
	return c
}

// Run looks at the driver's pods for a while, and prints what it makes of that.
func Run(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags, now func() time.Time) error {
	if f.Headroom < 0 || f.Price < 0 || f.Watch < 0 || f.Least < 0 {
		return errors.New("--headroom, --price, --watch and --min-observation must not be negative")
	}
	observation, err := observe(ctx, o, client, f)
	if err != nil {
		return err
	}
	m, scope, err := fleet.Look(ctx, o, client, fleet.ResourceClaims, fleet.ResourceTemplates, fleet.ResourceTaintRules, fleet.ResourceNodes)
	if err != nil {
		return err
	}
	f.Scope, f.Now = scope, now()
	list := Compare(m, observation, f.Query)
	return printer.Print(o, list, list.View(scope.Namespace == ""))
}

// observe looks once, and again until the time is over. Warnings are those of the last look.
func observe(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags) (*Observation, error) {
	observation := NewObservation()
	end := time.After(f.Watch)
	for {
		r, err := scrape.Pods(ctx, client, f.Scrape)
		if err != nil {
			return nil, err
		}
		observation.Add(r)
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("watch what claims use: %w", ctx.Err())
		case <-end:
			r.Warn(o.ErrOut)
			return observation, nil
		case <-time.After(o.Interval):
		}
	}
}

// View shows sizes to people, with namespaces if these are several.
func (l *SizeList) View(namespaces bool) printer.View {
	t := &printer.Table{
		Columns: printer.Columns("namespace", "claim", "holds", "peak", "busy", "observed", "enough", "saves", "per hour",
			"+node", "+device", "+samples", "+why"),
		Empty: fleet.NoClaims(namespaces),
	}
	t.Columns[0].Hidden, t.Columns[8].Hidden = !namespaces, l.PricePerGPUHour == 0
	for _, s := range l.Items {
		t.Rows = append(t.Rows, s.row())
	}
	return &printer.Text{Named: t.Names(), Render: func(w *bytes.Buffer, f printer.Format) error {
		err := t.Render(w, f)
		l.unknowns(w)
		l.changes(w, f)
		return err
	}}
}

func (s *Size) row() printer.Row {
	row := printer.Row{Name: "resourceclaim.resource.k8s.io/" + s.Name, Style: printer.Faint}
	enough, saves, perHour, observed := "unknown", printer.Unknown, printer.Unknown, printer.Unknown
	switch s.Verdict {
	case Right:
		row.Style, enough = printer.Plain, "as it is"
	case Smaller:
		row.Style, enough, saves, perHour = printer.Warn, s.Enough.String(), fmt.Sprintf("%.2f GPUs", s.SavedGPUs), fmt.Sprintf("%.2f", s.SavedPerHour)
	}
	if s.ObservedSeconds > 0 {
		observed = printer.Seconds(s.ObservedSeconds)
	}
	row.Cells = []string{
		s.Namespace, s.Name, s.Holds.String(), printer.BytesOrUnknown(s.PeakBytes), printer.PercentOrUnknown(s.Busy), observed, enough, saves, perHour,
		s.Node, s.Device, fmt.Sprint(s.Samples), s.Reason,
	}
	return row
}

// String names a part for people.
func (p Part) String() string {
	switch p.Type {
	case "":
		return printer.Unknown
	case fleet.TypeGPU:
		return "whole GPU"
	case fleet.TypeMIG:
		return p.Profile
	}
	parts := []string{fleet.KindText(p.Type, p.Profile)}
	if p.MemoryBytes > 0 {
		parts = append(parts, printer.Bytes(p.MemoryBytes))
	}
	if p.SMPercent > 0 {
		parts = append(parts, fmt.Sprintf("%d%%", p.SMPercent))
	}
	return strings.Join(parts, " ")
}

// unknowns says why nothing is advised, for all claims with the same reason at once.
func (l *SizeList) unknowns(out *bytes.Buffer) {
	claims := map[string][]string{}
	for _, s := range l.Items {
		if s.Verdict == Unknown && s.Reason != "" {
			claims[s.Reason] = append(claims[s.Reason], s.Namespace+"/"+s.Name)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(claims)) {
		fmt.Fprintf(out, "\nUnknown for %s: %s.\n", printer.Some(claims[reason], mostClaims), reason)
	}
}

// mostClaims is how many are named for one reason.
const mostClaims = 5

// changes writes those of manifests.
func (l *SizeList) changes(out *bytes.Buffer, f printer.Format) {
	for _, s := range l.Items {
		if s.Change == nil {
			continue
		}
		where := fmt.Sprintf("# %s %s/%s, in %s:", s.Source.Kind, s.Source.Namespace, s.Source.Name, s.Change.Path)
		fmt.Fprintf(out, "\n%s\n", f.Paint(printer.Bold, where))
		for line := range strings.Lines(s.Change.Diff) {
			style := map[byte]printer.Style{'-': printer.Bad, '+': printer.Good}[line[0]]
			out.WriteString(f.Paint(style, strings.TrimSuffix(line, "\n")) + "\n")
		}
		for _, n := range s.Change.Notes {
			out.WriteString("# " + n + "\n")
		}
	}
}
