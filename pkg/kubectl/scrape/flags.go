// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scrape

import "github.com/spf13/pflag"

// AddFlags adds the flags of commands that ask the driver's pods.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.Namespace, "driver-namespace", o.Namespace, "Namespace of the driver; by default the one that the chart has written down")
	flags.DurationVar(&o.Timeout, "node-timeout", o.Timeout, "How long the driver's pod on a node may take to answer")
}
