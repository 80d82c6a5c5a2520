// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// NewCommand returns the command doctor.
func NewCommand(o *options.Options) *cobra.Command {
	history := false
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Find what keeps claims for GPUs from working, with remedies",
		Long: "Examine the driver's pods, what it publishes, the device classes, the sharing policy, what else hands out GPUs, versions, and claims " +
			"that are stuck: one entry for each GPU and cause, with its time, the pods that it affects and the commands that help. It changes nothing. " +
			"What the driver warned of within an hour and is over is counted; --history shows it. The exit code is 2 if a finding is an error, and 1 if there is none but a check is unknown.\n\n" +
			"It looks at all namespaces; with fewer rights, at that of -n, which is best the driver's.",
		Example: "  kubectl gpu doctor\n  kubectl gpu doctor -n partage -o yaml",
		Args:    cobra.NoArgs,
		RunE: o.Run(func(ctx context.Context, client kubernetes.Interface, _ []string) error {
			namespace, err := o.Namespace()
			if err != nil {
				return err
			}
			facts, err := Read(ctx, client, o.Driver, namespace, time.Now())
			if err != nil {
				return err
			}
			report := Examine(facts)
			if err := printer.Print(o, report, view(report, history)); err != nil {
				return err
			}
			return report.verdict()
		}),
	}
	o.AddOutputFlag(c)
	c.Flags().BoolVar(&history, "history", false, "Show what the driver warned of within an hour and is over, too")
	return c
}

// verdict returns what the command ends with. A script must not take a cluster for healthy that
// could not be examined.
func (r *Report) verdict() error {
	if r.Count(Error) > 0 {
		return options.ErrFound
	}
	unknown := map[string]bool{}
	r.each(Unknown, func(c Result, _ Finding) { unknown[c.ID] = true })
	if len(unknown) > 0 {
		return fmt.Errorf("%d of %d checks could not be made, or only in part: whether all is well is unknown", len(unknown), len(r.Checks))
	}
	return nil
}
