// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"context"
	"fmt"
	"net"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// NewCommand returns the command ui.
func NewCommand(o *options.Options) *cobra.Command {
	port := 0
	drivers := scrape.Options{Timeout: scrape.DefaultTimeout}
	c := &cobra.Command{
		Use:   "ui",
		Short: "Show the GPUs and who has them in the browser, live",
		Long: `Serve a page on this machine that shows every node's GPUs, what claims and pods have and use of them, what
still fits, and why pods wait, and follows what happens. It changes nothing, sees what the kubeconfig may see, and ends
with the command. The printed address has a token, without which the page is not served.`,
		Example: `  kubectl gpu ui
  kubectl gpu ui --port 8080      # then, from another machine: ssh -L 8080:127.0.0.1:8080 HOST`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return run(c.Context(), o, drivers, port) },
	}
	drivers.AddFlags(c.Flags())
	c.Flags().IntVar(&port, "port", port, "Port on 127.0.0.1; 0 is any free one")
	return c
}

func run(ctx context.Context, o *options.Options, drivers scrape.Options, port int) error {
	client, err := o.Client()
	if err != nil {
		return err
	}
	namespace, err := o.Namespace()
	if err != nil {
		return err
	}
	server, err := New(client, Config{
		Driver: o.Driver, Namespace: namespace, Context: o.ContextName(), Explain: ByAllocator(client),
		Measure: func(ctx context.Context) (*scrape.Result, error) { return scrape.Pods(ctx, client, drivers) },
	})
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return fmt.Errorf("listen for the browser: %w", err)
	}
	fmt.Fprintf(o.Out, "http://%s%s\n", listener.Addr(), server.Path())
	fmt.Fprintln(o.ErrOut, "The page is served until you press Ctrl-C.")
	return server.Serve(ctx, listener)
}
