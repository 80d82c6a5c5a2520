// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package completion proposes arguments and values of flags to a shell, by asking the API
// server what there is.
package completion

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// patience is how long a shell waits for an API server that does not answer.
const patience = 3 * time.Second

// most is how many objects are looked at: nobody reads a longer list.
const most = 500

// lister returns names of objects.
type lister func(ctx context.Context, client kubernetes.Interface, namespace string) ([]string, error)

// Nodes completes names of nodes.
func Nodes(o *options.Options) cobra.CompletionFunc { return complete(o, nodes) }

// GPUs completes names of GPUs, such as node-1/1b:00.
func GPUs(o *options.Options) cobra.CompletionFunc {
	return complete(o, func(ctx context.Context, client kubernetes.Interface, _ string) ([]string, error) {
		list, err := client.ResourceV1().ResourceSlices().List(ctx, some)
		if err != nil {
			return nil, fmt.Errorf("list resourceslices: %w", err)
		}
		snapshot := &fleet.Snapshot{}
		for i := range list.Items {
			snapshot.Slices = append(snapshot.Slices, &list.Items[i])
		}
		var names []string
		for _, n := range fleet.New(snapshot, o.Driver).Nodes {
			for _, g := range n.GPUs {
				names = append(names, g.Path())
			}
		}
		return names, nil
	})
}

// Claims completes names of ResourceClaims.
func Claims(o *options.Options) cobra.CompletionFunc { return complete(o, claims) }

// PodsAndClaims completes names of pods and, after "claim/", of ResourceClaims.
func PodsAndClaims(o *options.Options) cobra.CompletionFunc {
	return complete(o, func(ctx context.Context, client kubernetes.Interface, namespace string) ([]string, error) {
		names, err := pods(ctx, client, namespace)
		if err != nil {
			return nil, err
		}
		of, err := claims(ctx, client, namespace)
		if err != nil {
			return nil, err
		}
		for _, name := range of {
			names = append(names, "claim/"+name)
		}
		return names, nil
	})
}

// AddFlags completes the values of flags that name objects, of all commands.
func AddFlags(root *cobra.Command, o *options.Options) {
	register(root, "namespace", complete(o, namespaces))
	register(root, "context", contexts(o))
	for _, c := range root.Commands() {
		if c.Flags().Lookup("node") != nil {
			register(c, "node", complete(o, nodes))
		}
	}
}

// register is for flags that exist and are registered once.
func register(c *cobra.Command, flag string, f cobra.CompletionFunc) {
	if _, has := c.GetFlagCompletionFunc(flag); has {
		return
	}
	if err := c.RegisterFlagCompletionFunc(flag, f); err != nil {
		cobra.CompErrorln(fmt.Sprintf("complete --%s: %v", flag, err))
	}
}

// complete proposes the names that begin with what was typed and were not given yet.
func complete(o *options.Options, list lister) cobra.CompletionFunc {
	return func(c *cobra.Command, given []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(c.Context(), patience)
		defer cancel()
		names, err := listed(ctx, o, list)
		if err != nil {
			cobra.CompErrorln(err.Error())
			return nil, cobra.ShellCompDirectiveError
		}
		return slices.DeleteFunc(names, func(name string) bool {
			return !strings.HasPrefix(name, typed) || slices.Contains(given, name)
		}), cobra.ShellCompDirectiveNoFileComp
	}
}

func listed(ctx context.Context, o *options.Options, list lister) ([]string, error) {
	client, err := o.Client()
	if err != nil {
		return nil, err
	}
	namespace, err := o.Namespace()
	if err != nil {
		return nil, err
	}
	return list(ctx, client, namespace)
}

// contexts completes the names of the kubeconfig's contexts.
func contexts(o *options.Options) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		config, err := o.Config.ToRawKubeConfigLoader().RawConfig()
		if err != nil {
			cobra.CompErrorln(err.Error())
			return nil, cobra.ShellCompDirectiveError
		}
		var names []string
		for name := range config.Contexts {
			if strings.HasPrefix(name, typed) {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// some asks for no more than anybody reads, from the API server's cache.
var some = metav1.ListOptions{ResourceVersion: "0", Limit: most}

func nodes(ctx context.Context, client kubernetes.Interface, _ string) ([]string, error) {
	list, err := client.CoreV1().Nodes().List(ctx, some)
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return namesOf(list.Items, func(i int) string { return list.Items[i].Name }), nil
}

func namespaces(ctx context.Context, client kubernetes.Interface, _ string) ([]string, error) {
	list, err := client.CoreV1().Namespaces().List(ctx, some)
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	return namesOf(list.Items, func(i int) string { return list.Items[i].Name }), nil
}

func pods(ctx context.Context, client kubernetes.Interface, namespace string) ([]string, error) {
	list, err := client.CoreV1().Pods(namespace).List(ctx, some)
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	return namesOf(list.Items, func(i int) string { return list.Items[i].Name }), nil
}

func claims(ctx context.Context, client kubernetes.Interface, namespace string) ([]string, error) {
	list, err := client.ResourceV1().ResourceClaims(namespace).List(ctx, some)
	if err != nil {
		return nil, fmt.Errorf("list resourceclaims: %w", err)
	}
	return namesOf(list.Items, func(i int) string { return list.Items[i].Name }), nil
}

func namesOf[T any](items []T, name func(int) string) []string {
	names := make([]string, len(items))
	for i := range items {
		names[i] = name(i)
	}
	return names
}
