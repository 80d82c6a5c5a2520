// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cordon keeps new pods away from a GPU, by an annotation of its Node that the driver follows. It is the only one of kubectl gpu
// that writes.
package cordon

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// Values of --dry-run, as those of kubectl.
const (
	dryRunNone   = "none"
	dryRunClient = "client"
	dryRunServer = "server"
)

// change is what is to be written.
type change struct {
	cordon bool
	dryRun string
}

// NewCommand returns kubectl gpu cordon.
func NewCommand(o *options.Options) *cobra.Command {
	return command(o, true, &cobra.Command{
		Use:   "cordon GPU...",
		Short: "Keep new pods away from a GPU, and say who must end before it can be reset",
		Long: `Write the address of a GPU into the annotation ` + api.CordonAnnotation + ` of its Node. The driver
follows it: no new pods get devices of the GPU, and pods that run stay. Besides uncordon
this is the only command that writes; it takes the right to get and patch nodes.

It lists the pods that must end before the GPU can be reset, with the commands, and runs none.
GPU is NODE/ and what kubectl gpu tree calls it: its place on the node, or its PCI address.`,
		Example: `  kubectl gpu cordon node-1/0
  kubectl gpu cordon node-1/1b:00 node-1/28:00 --dry-run=client`,
	})
}

// NewUncordonCommand returns kubectl gpu uncordon.
func NewUncordonCommand(o *options.Options) *cobra.Command {
	return command(o, false, &cobra.Command{
		Use:   "uncordon GPU...",
		Short: "Let new pods have a GPU again",
		Long: `Take the address of a GPU out of the annotation ` + api.CordonAnnotation + ` of its Node. Besides
cordon this is the only command that writes; it takes the right to get and patch nodes.`,
		Example: `  kubectl gpu uncordon node-1/0`,
	})
}

func command(o *options.Options, set bool, c *cobra.Command) *cobra.Command {
	ch := change{cordon: set, dryRun: dryRunNone}
	c.Args = cobra.MinimumNArgs(1)
	c.RunE = o.Run(func(ctx context.Context, client kubernetes.Interface, args []string) error {
		return Run(ctx, o, client, ch, args)
	})
	options.AddChoice(c, &ch.dryRun, "dry-run", "", "Print only what would be done (client), or have the API server check it, too (server): ",
		dryRunNone, dryRunClient, dryRunServer)
	c.Flags().Lookup("dry-run").NoOptDefVal = dryRunClient
	return c
}

// Run writes the change for GPUs that people name.
func Run(ctx context.Context, o *options.Options, client kubernetes.Interface, ch change, names []string) error {
	m, _, err := fleet.Look(ctx, o, client, fleet.ResourceSlices, fleet.ResourceNodes, fleet.ResourceTaintRules, fleet.ResourceClasses, fleet.ResourceTemplates, fleet.ResourceClaims, fleet.ResourcePods)
	if err != nil {
		return err
	}
	for _, name := range names {
		g, node, address, err := find(m, name)
		if err != nil && ch.cordon {
			return err
		}
		changed, listed, writeErr := ch.write(ctx, client, node, address)
		if writeErr != nil {
			return fmt.Errorf("%s: %w", name, writeErr)
		}
		if g == nil && !listed {
			return err // it is none, and nobody has written it either
		}
		fmt.Fprintln(o.Out, ch.said(node+"/"+fleet.ShortAddress(address), changed))
		if ch.cordon {
			if !changed && !isTainted(m, g) {
				fmt.Fprintln(o.Out, "Its devices have no taint yet: kubectl gpu doctor says whether the driver runs.")
			}
			fmt.Fprint(o.Out, who(m, g))
		}
	}
	return nil
}

// find returns a GPU and what the annotation calls it, or an error and what it would be called if there was one.
func find(m *fleet.Model, name string) (g *fleet.GPU, node, address string, err error) {
	node, address, _ = strings.Cut(name, "/")
	switch g, err = m.GPU(name); {
	case err != nil:
		return nil, node, address, err
	case g.PCIBusID == "":
		return nil, node, address, fmt.Errorf("%s: it has no PCI address, by which the driver would know it", name)
	}
	return g, node, g.PCIBusID, nil
}

// isTainted reports whether the driver follows what keeps pods away from a GPU.
func isTainted(m *fleet.Model, g *fleet.GPU) bool {
	return slices.ContainsFunc(g.Devices, func(d *fleet.Device) bool {
		return slices.ContainsFunc(d.Published.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == m.Driver+"/"+string(device.Cordoned) })
	})
}

// write changes the annotation of a Node, and reports whether it had to, and whether the annotation had the address. What others write
// meanwhile makes it start anew.
func (ch change) write(ctx context.Context, client kubernetes.Interface, name, address string) (changed, listed bool, err error) {
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var value *string
		if value, listed = ch.annotation(node, address); listed == ch.cordon {
			return nil
		}
		changed = true
		if ch.dryRun == dryRunClient {
			return nil
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
			"resourceVersion": node.ResourceVersion, "annotations": map[string]*string{api.CordonAnnotation: value},
		}})
		if err != nil {
			return fmt.Errorf("encode a patch: %w", err)
		}
		o := metav1.PatchOptions{FieldManager: "kubectl-gpu"}
		if ch.dryRun == dryRunServer {
			o.DryRun = []string{metav1.DryRunAll}
		}
		_, err = client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, o)
		return err
	})
	if apierrors.IsForbidden(err) {
		return false, false, fmt.Errorf("it takes the right to get and patch nodes: %w", err)
	}
	return changed, listed, err
}

// annotation returns the annotation that a Node is to have, nil for none, and whether that which it has names the GPU.
func (ch change) annotation(node *corev1.Node, address string) (value *string, listed bool) {
	all := api.CordonedGPUs(node.Annotations)
	// nvidia-smi prints a domain of eight digits, and the driver takes it.
	rest := slices.DeleteFunc(slices.Clone(all), func(name string) bool {
		// It takes no short address, but cordon prints one.
		isShort := strings.EqualFold(fleet.ShortAddress(name), fleet.ShortAddress(address))
		return strings.EqualFold(name, address) || strings.EqualFold(name, "0000"+address) || isShort && !ch.cordon
	})
	listed = len(rest) < len(all)
	if ch.cordon {
		rest = append(rest, address)
	}
	if len(rest) == 0 {
		return nil, listed
	}
	return new(strings.Join(rest, ",")), listed
}

func (ch change) said(name string, changed bool) string {
	text := name + " "
	if !changed {
		text += "already "
	}
	if !ch.cordon {
		text += "un"
	}
	text += "cordoned"
	switch {
	case ch.dryRun != dryRunNone && changed:
		text += map[string]string{dryRunClient: " (dry run)", dryRunServer: " (server dry run)"}[ch.dryRun]
	case ch.cordon && changed:
		text += ": once the driver has seen it, no new pods get it unless they tolerate the taint. Those that run stay."
	}
	return text
}

// who says who has a part of a GPU and must end before it can be reset, observers included.
func who(m *fleet.Model, g *fleet.GPU) string {
	const others = "Programs without a claim, such as monitoring, are not seen here. How to reset it: docs/how-to/troubleshoot.md#how-to-reset-a-gpu\n"
	users, unknown := usersOf(m, g), ""
	if m.Hides(fleet.ResourceClaims) {
		unknown = fmt.Sprintf("Who uses %s is unknown, as far as claims may not be read.\n", g.Label())
	}
	if len(users) == 0 {
		if unknown == "" {
			unknown = fmt.Sprintf("No claim has a device of %s. ", g.Label())
		}
		return unknown + others
	}
	var text strings.Builder
	fmt.Fprintf(&text, "These use %s. They, and all other pods with GPUs of the node, must end before it can be reset:\n", g.Label())
	for _, u := range users {
		line := "    " + fleet.DeleteCommand(u.Resource, u.Namespace, u.Name)
		if owner := u.Owner(); owner != "" {
			line = fmt.Sprintf("%-44s # %s creates it again", line, owner)
		}
		text.WriteString(line + "\n")
	}
	return text.String() + unknown + others
}

// usersOf returns who uses a GPU: what claims are for, and claims that are for nothing.
func usersOf(m *fleet.Model, g *fleet.GPU) []fleet.User {
	var users []fleet.User
	for _, h := range m.Holdings {
		// A device that no slice has any more says by its name of which GPU it was.
		was := h.Device == nil && h.Result.Pool == g.Devices[0].Pool && device.AddressIn(h.Result.Device) == g.PCIBusID
		if !was && (h.Device == nil || h.Device.GPU != g) {
			continue
		}
		if users = append(users, h.Users()...); len(h.Claim.Status.ReservedFor) == 0 {
			users = append(users, fleet.User{Resource: "resourceclaim", Namespace: h.Claim.Namespace, Name: h.Claim.Name})
		}
	}
	slices.SortFunc(users, func(a, b fleet.User) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return slices.Compact(users)
}
