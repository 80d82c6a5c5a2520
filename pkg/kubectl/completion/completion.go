// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package completion proposes arguments and values of flags to a shell, by asking the API
// server what there is.
package completion

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
func Nodes(o *options.Options) cobra.CompletionFunc {
	return complete(o, func(ctx context.Context, client kubernetes.Interface, _ string) ([]string, error) {
		return names(ctx, "nodes", client.CoreV1().Nodes().List)
	})
}

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
		for g := range fleet.New(snapshot, o.Driver).GPUs() {
			names = append(names, g.Path())
		}
		return names, nil
	})
}

// PodsAndClaims completes names of pods and, after "claim/", of ResourceClaims.
func PodsAndClaims(o *options.Options) cobra.CompletionFunc {
	return complete(o, func(ctx context.Context, client kubernetes.Interface, namespace string) ([]string, error) {
		all, err := names(ctx, "pods", client.CoreV1().Pods(namespace).List)
		if err != nil {
			return nil, err
		}
		claims, err := names(ctx, "resourceclaims", client.ResourceV1().ResourceClaims(namespace).List)
		for _, name := range claims {
			all = append(all, "claim/"+name)
		}
		return all, err
	})
}

// AddFlags completes the values of flags that name objects, of all commands.
func AddFlags(root *cobra.Command, o *options.Options) {
	// The errors are those of flags that do not exist, or are completed already.
	namespaces := func(ctx context.Context, client kubernetes.Interface, _ string) ([]string, error) {
		return names(ctx, "namespaces", client.CoreV1().Namespaces().List)
	}
	_ = root.RegisterFlagCompletionFunc("namespace", complete(o, namespaces))
	_ = root.RegisterFlagCompletionFunc("context", contexts(o))
}

// complete proposes the names that begin with what was typed and were not given yet.
func complete(o *options.Options, list lister) cobra.CompletionFunc {
	return func(c *cobra.Command, given []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		ctx, cancel := context.WithTimeout(c.Context(), patience)
		defer cancel()
		var names []string
		client, err := o.Client()
		namespace, unknown := o.Namespace()
		if err = errors.Join(err, unknown); err == nil {
			names, err = list(ctx, client, namespace)
		}
		return matching(names, given, typed, err)
	}
}

func matching(names, given []string, typed string, err error) ([]cobra.Completion, cobra.ShellCompDirective) {
	if err != nil {
		cobra.CompErrorln(err.Error())
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.DeleteFunc(names, func(name string) bool {
		return !strings.HasPrefix(name, typed) || slices.Contains(given, name)
	}), cobra.ShellCompDirectiveNoFileComp
}

// contexts completes the names of the kubeconfig's contexts.
func contexts(o *options.Options) cobra.CompletionFunc {
	return func(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		config, err := o.Config.ToRawKubeConfigLoader().RawConfig()
		return matching(slices.Sorted(maps.Keys(config.Contexts)), nil, typed, err)
	}
}

// some asks for no more than anybody reads, from the API server's cache.
var some = metav1.ListOptions{ResourceVersion: "0", Limit: most}

// names lists those of objects.
func names[L runtime.Object](ctx context.Context, resource string, list fleet.Lister[L]) ([]string, error) {
	all, err := list(ctx, some)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", resource, err)
	}
	var names []string
	err = meta.EachListItem(all, func(o runtime.Object) error {
		of, err := meta.Accessor(o)
		if err == nil {
			names = append(names, of.GetName())
		}
		return err
	})
	return names, err
}
