// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package idle

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
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
	Query
}

// NewCommand returns kubectl gpu idle.
func NewCommand(o *options.Options) *cobra.Command {
	f := Flags{Query: Query{For: 30 * time.Minute}, Scrape: scrape.Options{Timeout: scrape.DefaultTimeout}}
	c := &cobra.Command{
		Use:   "idle",
		Short: "List claims that hold devices and do not use them, with the commands that free these",
		Long: `List claims on whose devices nothing has run for a while, whose pods have all ended, or which nobody uses.
The commands that would free the devices are printed, one for each owner, and never run. There is none
where it would stop a pod that is not idle, such as the fifth replica of which four are. Pods
that wait for a node are stopped as well: they have nothing to lose.

Idle is what the driver calls so: where the GPU reports utilization, that was zero in every sample;
elsewhere, no process had the device open. What was before the driver's pod started is not known.

The exit code is 2 if there are such claims, or if of some it is unknown.`,
		Example: `  kubectl gpu idle -A --for 2h
  kubectl gpu idle -o json | jq -r '.items[].commands[]'`,
		Args: cobra.NoArgs,
		RunE: o.Run(func(ctx context.Context, client kubernetes.Interface, _ []string) error {
			return Run(ctx, o, client, f, time.Now())
		}),
	}
	o.AddTableFlags(c)
	o.AddSelectionFlags(c, options.OfClaims)
	o.AddWatchFlags(c)
	f.Scrape.AddFlags(c.Flags())
	c.Flags().DurationVar(&f.For, "for", f.For, "How long a claim must have been idle")
	return c
}

// Run reads the cluster and prints what is idle. It returns options.ErrFound if something is.
func Run(ctx context.Context, o *options.Options, client kubernetes.Interface, f Flags, now time.Time) error {
	if f.For <= 0 {
		return fmt.Errorf("--for %s: it must be more than 0, such as 30m", f.For)
	}
	m, scope, err := fleet.Look(ctx, o, client, fleet.ResourceClaims, fleet.ResourceClasses, fleet.ResourceTemplates, fleet.ResourceTaintRules, fleet.ResourceNodes)
	if err != nil {
		return err
	}
	result, silence := scrape.Pods(ctx, client, f.Scrape)
	if silence != nil {
		result = &scrape.Result{}
	} else {
		result.Warn(o.ErrOut)
		silence = result.Silence()
	}
	f.Now, f.Scope = now, scope
	list := Find(m, result, f.Query)
	if silence != nil {
		if len(list.Items) == 0 {
			return fmt.Errorf("what is idle is unknown: %w", silence)
		}
		// What is done or unused is known without the driver. Nobody reads warnings that cannot be written.
		_, _ = fmt.Fprintf(o.ErrOut, "warning: %v; what is idle is unknown\n", silence)
	}
	for _, y := range list.Young {
		_, _ = fmt.Fprintf(o.ErrOut, "warning: node %s: the driver's pod has been running for %s only: what was idle there before is unknown\n",
			y.Node, printer.Seconds(y.Seconds))
	}
	if err := printer.Print(o, list, list.View(scope.Namespace == "")); err != nil {
		return err
	}
	if len(list.Items) > 0 || list.Unknown > 0 {
		return options.ErrFound
	}
	return nil
}

// writeCommands writes what would free devices, and why some stay.
func (l *ClaimList) writeCommands(w *bytes.Buffer, f printer.Format) {
	freed, kept := 0.0, 0.0
	var commands, notes strings.Builder
	for _, c := range l.Items {
		if c.Freed {
			freed += c.GPUs
		} else {
			kept += c.GPUs
		}
		for _, command := range c.Commands {
			commands.WriteString("  " + command + "\n")
		}
		for _, note := range c.Notes {
			notes.WriteString("  # " + note + "\n")
		}
	}
	if commands.Len() > 0 {
		fmt.Fprintf(w, "\n%s\n%s", f.Paint(printer.Bold, fmt.Sprintf("These would free %.2f GPUs. Look at what the pods do before you run them:", freed)), commands.String())
	}
	if notes.Len() > 0 {
		fmt.Fprintf(w, "\n%.2f GPUs cannot be freed without stopping pods that are not idle:\n%s", kept, notes.String())
	}
}

// View shows claims to people, with their namespaces if these are several.
func (l *ClaimList) View(namespaces bool) printer.View {
	enough, others := printer.Seconds(l.ForSeconds), ""
	if l.Less > 0 {
		others = fmt.Sprintf("\nOther claims that are idle, for less than %s: %d.", enough, l.Less)
	}
	if l.Unknown > 0 {
		others += fmt.Sprintf("\nOther claims that may be idle, which is unknown: %d.", l.Unknown)
	}
	t := &printer.Table{Empty: "No claim is known to have held devices for " + enough + " without using them." + others}
	t.Columns = printer.Columns("namespace", "claim", "reason", "idle", "gpus", "holds", "node", "pods", "owner", "+devices")
	t.Columns[0].Hidden = !namespaces
	for _, c := range l.Items {
		var holds, nodes, devices, pods []string
		for _, d := range c.Devices {
			holds, nodes, devices = append(holds, cmp.Or(fleet.KindText(d.Type, d.Profile), printer.Unknown)), append(nodes, d.Node), append(devices, d.Name)
		}
		for _, p := range c.Pods {
			pods = append(pods, p.Name)
		}
		t.Rows = append(t.Rows, printer.Row{Name: "resourceclaim.resource.k8s.io/" + c.Name, Cells: []string{
			c.Namespace, c.Name, c.Reason, printer.AtLeast(c.IdleSeconds, c.IdleForLonger), fmt.Sprintf("%.2f", c.GPUs),
			strings.Join(holds, ","), nodes[0], cmp.Or(strings.Join(pods, ","), printer.Unknown), cmp.Or(strings.Join(c.Owners, ","), printer.Unknown), strings.Join(devices, ","),
		}})
	}
	return &printer.Text{Named: t.Names(), Render: func(w *bytes.Buffer, f printer.Format) error {
		if err := t.Render(w, f); err != nil || len(l.Items) == 0 {
			return err
		}
		l.writeCommands(w, f)
		if slices.ContainsFunc(l.Items, func(c Claim) bool { return c.IdleForLonger }) {
			fmt.Fprintln(w, "\n"+printer.IdleForLonger)
		}
		if others != "" {
			fmt.Fprintln(w, others)
		}
		return nil
	}}
}
