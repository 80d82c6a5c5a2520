// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// command is one call.
type command struct {
	*options.Options
	file      string
	timeLimit time.Duration
}

// NewCommand returns the command explain.
func NewCommand(o *options.Options) *cobra.Command {
	c := &command{Options: o, timeLimit: allocation.DefaultTimeLimit}
	cmd := &cobra.Command{
		Use:   "explain POD | pod/NAME | claim/NAME | -f FILE",
		Short: "Say why a pod or a claim waits, why it is stuck, or what it got",
		Long: `Say why a pod or a claim waits, why it is stuck, or what it got.

The verdict is that of the scheduler's own allocator, over the slices and claims of the cluster. Then it says who is in the
way, and the smallest changes that would help: each was tried with the allocator. A name without a kind is a pod's or, if
there is none, a claim's. With -f it says what would happen to the pods, claims and templates of a file that is not applied
yet; deployments, jobs and other workloads stand for their pods.

The exit code is 2 if something waits or is stuck.`,
		Example: `  kubectl gpu explain llm-0
  kubectl gpu explain claim/training -n team-a
  kubectl gpu explain -f job.yaml`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return c.run(cmd.Context(), args) },
	}
	o.AddOutputFlag(cmd)
	cmd.Flags().StringVarP(&c.file, "filename", "f", "", "File with objects that are not applied yet, - for the standard input")
	cmd.Flags().DurationVar(&c.timeLimit, "search-limit", c.timeLimit, "How long the scheduler searches on one node (filterTimeout of its plugin DynamicResources)")
	return cmd
}

func (c *command) run(ctx context.Context, args []string) error {
	if (len(args) == 1) == (c.file != "") {
		return errors.New("name a pod or a claim, or a file with -f")
	}
	if c.timeLimit <= 0 {
		return fmt.Errorf("--search-limit is %s: it has to be more than 0, such as 10s", c.timeLimit)
	}
	namespace, err := c.Namespace()
	if err != nil {
		return err
	}
	manifest, err := c.manifest(namespace)
	if err != nil {
		return err
	}
	client, err := c.Client()
	if err != nil {
		return err
	}
	snapshot, err := fleet.Read(ctx, client, namespace)
	if err != nil {
		return err
	}
	if manifest != nil {
		snapshot = manifest.Over(snapshot)
		if len(manifest.Ignored) > 0 {
			// Nobody reads what cannot be written.
			_, _ = fmt.Fprintln(c.ErrOut, "not looked at, because they ask for no devices:", strings.Join(manifest.Ignored, ", "))
		}
	}
	x := New(ctx, snapshot, c.Driver, time.Now(), allocation.WithTimeLimit(c.timeLimit))
	x.ReadFrom(ctx, client)
	if manifest != nil {
		all := x.Manifest(ctx, manifest)
		if len(all) == 0 {
			return fmt.Errorf("%s has no pod, claim or claim template, and no workload with pods", c.file)
		}
		return c.print(all)
	}
	e, err := x.Named(ctx, namespace, args[0])
	if err != nil {
		return err
	}
	return c.print([]*Explanation{e})
}

func (c *command) manifest(namespace string) (*Manifest, error) {
	if c.file == "" {
		return nil, nil
	}
	in := c.In
	if c.file != "-" {
		f, err := os.Open(c.file)
		if err != nil {
			return nil, err
		}
		// It was only read.
		defer f.Close()
		in = f
	}
	m, err := Parse(in, namespace)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.file, err)
	}
	return m, nil
}

func (c *command) print(all []*Explanation) error {
	var object any = all[0]
	if len(all) > 1 {
		object = &List{TypeMeta: printer.TypeMeta(Kind + "List"), Items: all}
	}
	if err := printer.Print(c.Options, object, View(all...)); err != nil {
		return err
	}
	if slices.ContainsFunc(all, (*Explanation).Waiting) {
		return options.ErrFound
	}
	return nil
}

// kinds are what the argument may begin with.
var kinds = map[string]string{
	"pod": "pod", "pods": "pod", "po": "pod",
	"claim": "claim", "claims": "claim", "resourceclaim": "claim", "resourceclaims": "claim", "resourceclaim.resource.k8s.io": "claim", "resourceclaims.resource.k8s.io": "claim",
}

// Named explains pod/NAME, claim/NAME, or a NAME that is a pod's or a claim's.
func (x *Explainer) Named(ctx context.Context, namespace, argument string) (*Explanation, error) {
	kind, name, qualified := strings.Cut(argument, "/")
	if !qualified {
		kind, name = "", argument
	} else if kinds[kind] == "" {
		return nil, fmt.Errorf("%s: the kind must be pod or claim, not %s", argument, kind)
	}
	if kinds[kind] != "claim" {
		for _, p := range x.model.Pods {
			if p.Name == name && p.Namespace == namespace {
				return x.Pod(ctx, p), nil
			}
		}
	}
	if kinds[kind] != "pod" {
		for _, c := range x.model.Claims {
			if c.Name == name && c.Namespace == namespace {
				return x.Claim(ctx, c), nil
			}
		}
	}
	what := map[string]string{"": "pod or claim", "pod": "pod", "claim": "claim"}[kinds[kind]]
	return nil, fmt.Errorf("there is no %s %s in namespace %s, or it may not be read", what, name, namespace)
}
