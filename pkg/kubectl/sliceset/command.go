// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package sliceset is the command slices: it writes ResourceSlices of nodes that do not exist
// yet, which package template makes.
package sliceset

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/sliceset/template"
	"github.com/partage-dev/partage/pkg/policy"
)

// flags of the command.
type flags struct {
	machine    template.Machine
	cuda       string
	node       string
	fromNode   string
	policyFile string
	output     string
}

// NewCommand returns the command slices.
func NewCommand(o *options.Options) *cobra.Command {
	f := &flags{output: options.OutputYAML}
	c := &cobra.Command{
		Use:   "slices (--model MODEL [--count N] | --from-node NODE)",
		Short: "Make ResourceSlices of nodes that do not exist yet, for autoscalers",
		Long: "Write the ResourceSlices that a node would have, for autoscalers that scale a group of nodes up from zero. They are made by the driver's own code " +
			"from a model of GPU, or from a node that is like the new ones. UUIDs are placeholders, and so are the PCI addresses of a model; " +
			"without a node, PCIe roots and NUMA nodes are not known and left out.",
		Example: "  kubectl gpu slices --model h100 --count 8 --policy policy.yaml\n  kubectl gpu slices --from-node gpu-1 --node-name-template new-node",
		Args:    cobra.NoArgs,
		RunE:    func(c *cobra.Command, _ []string) error { return f.run(c.Context(), o) },
	}
	c.Flags().StringVar(&f.machine.Model, "model", "", "Model of the GPUs: "+strings.Join(boards.Names(), ", ")+"; short for the usual ones: "+strings.Join(slices.Sorted(maps.Keys(boards.Short)), ", "))
	c.Flags().IntVar(&f.machine.Count, "count", 1, "How many GPUs a node has")
	c.Flags().StringVar(&f.fromNode, "from-node", "", "Name of a node whose slices are taken")
	c.Flags().StringVar(&f.node, "node-name-template", "gpu-node", "Name of the node and of its pool, or what an autoscaler replaces by it")
	c.Flags().StringVar(&f.policyFile, "policy", "", "File with the SharingPolicy of the nodes; the default is that of the driver")
	c.Flags().BoolVar(&f.machine.MIG, "mig", false, "MIG mode is on, for GPUs on which an administrator sets it, such as A100")
	c.Flags().StringVar(&f.machine.DriverVersion, "driver-version", "", "Version of the NVIDIA driver, such as 580.95.05")
	c.Flags().StringVar(&f.cuda, "cuda-version", "", "Version of CUDA that the NVIDIA driver supports, such as 13.0")
	options.AddChoice(c, &f.output, "output", "o", "Output format: ", options.OutputYAML, options.OutputJSON)
	c.MarkFlagsMutuallyExclusive("model", "from-node")
	c.MarkFlagsOneRequired("model", "from-node")
	for _, flag := range []string{"count", "policy", "mig", "driver-version", "cuda-version"} {
		// A live node has all that already.
		c.MarkFlagsMutuallyExclusive("from-node", flag)
	}
	return c
}

func (f *flags) run(ctx context.Context, o *options.Options) error {
	if f.node == "" {
		return errors.New("--node-name-template: it must not be empty")
	}
	how := template.Options{Driver: o.Driver, Node: f.node}
	made, err := f.slices(ctx, o, how)
	if err != nil {
		return err
	}
	return write(o.Out, made, f.output)
}

func (f *flags) slices(ctx context.Context, o *options.Options, how template.Options) ([]resourceapi.ResourceSlice, error) {
	if f.fromNode != "" {
		return live(ctx, o, f.fromNode, how)
	}
	var err error
	if f.machine.CUDAVersion, err = cudaVersion(f.cuda); err != nil {
		return nil, err
	}
	if f.policyFile != "" {
		data, err := os.ReadFile(f.policyFile)
		if err != nil {
			return nil, fmt.Errorf("read the policy: %w", err)
		}
		if how.Policy, err = policy.Decode(data); err != nil {
			return nil, fmt.Errorf("policy %s: %w", f.policyFile, err)
		}
	}
	made, problems, err := f.machine.Slices(how)
	for _, problem := range problems {
		if _, err := fmt.Fprintln(o.ErrOut, "warning:", problem); err != nil {
			return nil, err
		}
	}
	return made, err
}

// live reads the slices of a node and strips them.
func live(ctx context.Context, o *options.Options, node string, how template.Options) ([]resourceapi.ResourceSlice, error) {
	client, err := o.Client()
	if err != nil {
		return nil, err
	}
	list, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + node})
	if err != nil {
		return nil, fmt.Errorf("list the ResourceSlices of node %s: %w", node, err)
	}
	var published []*resourceapi.ResourceSlice
	for i := range list.Items {
		published = append(published, &list.Items[i])
	}
	return template.Strip(published, node, how)
}

func cudaVersion(text string) (gpu.Version, error) {
	var v gpu.Version
	if text == "" {
		return v, nil
	}
	if n, err := fmt.Sscanf(text, "%d.%d", &v.Major, &v.Minor); err != nil || n != 2 || fmt.Sprintf("%d.%d", v.Major, v.Minor) != text || v.Major < 1 {
		return v, fmt.Errorf("--cuda-version %s: it must be two numbers, such as 13.0", text)
	}
	return v, nil
}

func write(w io.Writer, made []resourceapi.ResourceSlice, format string) error {
	if format == options.OutputJSON {
		list := resourceapi.ResourceSliceList{TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSliceList"}, Items: made}
		return (&printers.JSONPrinter{}).PrintObj(&list, w)
	}
	p := &printers.YAMLPrinter{}
	for i := range made {
		if err := p.PrintObj(&made[i], w); err != nil {
			return fmt.Errorf("write ResourceSlice %s: %w", made[i].Name, err)
		}
	}
	return nil
}
