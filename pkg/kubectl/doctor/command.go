// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// NewCommand returns the command doctor.
func NewCommand(o *options.Options) *cobra.Command {
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Find what keeps claims for GPUs from working, with remedies",
		Long: "Examine the driver's pods, what it publishes, the device classes, the sharing policy, what else hands out GPUs, versions, and claims " +
			"that are stuck. It changes nothing. The exit code is 2 if a finding is an error.\n\n" +
			"It looks at all namespaces; with fewer rights, at that of -n, which is best the driver's.",
		Example: "  kubectl gpu doctor\n  kubectl gpu doctor -n partage -o yaml",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := o.Client()
			if err != nil {
				return err
			}
			namespace, err := o.Namespace()
			if err != nil {
				return err
			}
			facts, err := Read(c.Context(), client, o.Driver, namespace, time.Now())
			if err != nil {
				return err
			}
			report := Examine(facts)
			if err := printer.Print(o, report, view(report)); err != nil {
				return err
			}
			if report.Count(Error) > 0 {
				return options.ErrFound
			}
			return nil
		},
	}
	o.AddOutputFlag(c)
	return c
}
