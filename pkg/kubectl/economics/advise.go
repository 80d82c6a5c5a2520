// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// adviseFlags are those of the command.
type adviseFlags struct {
	Query
	modelSize string
}

// NewAdvise returns the command.
func NewAdvise(o *options.Options) *cobra.Command {
	f := &adviseFlags{}
	c := &cobra.Command{
		Use:   "advise",
		Short: "Say which way to share a GPU suits a workload, with the manifest",
		Long: `Say which way to share a GPU suits a workload, why, what it costs, and what speaks
against the others. The answer ends with a manifest; -o yaml prints the manifest alone.

It goes by what the GPUs of the cluster are offered as, not by what is free.`,
		Example: `  # A service with a model of 7 billion parameters
  kubectl gpu advise --model-size 7B --trust other-tenants

  # The same, applied
  kubectl gpu advise --model-size 7B --image registry.example.com/llm:1 -o yaml | kubectl apply -f -`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		// What is wrong with the flags is said without a cluster, too.
		PreRunE: func(c *cobra.Command, _ []string) error { return f.check(c.Flags()) },
		RunE:    o.Run(func(ctx context.Context, client kubernetes.Interface, _ []string) error { return f.run(ctx, o, client) }),
	}
	f.add(c)
	o.AddOutputFlag(c)
	return c
}

// add adds the flags that describe the workload.
func (f *adviseFlags) add(c *cobra.Command) {
	s := c.Flags()
	f.Kind, f.Trust, f.Traffic = Inference, SameTeam, Steady
	options.AddChoice(c, &f.Kind, "workload", "", "What it is: ", Kinds...)
	options.AddChoice(c, &f.Trust, "trust", "", "Who may be the neighbours: ", Trusts...)
	options.AddChoice(c, &f.Traffic, "traffic", "", "When it has work: ", Traffics...)
	options.AddChoice(c, &f.Latency, "latency", "", "How late answers may be (p99-ms is tens of milliseconds): ", Latencies...)
	s.StringVar(&f.modelSize, "model-size", "", "Parameters of the model, such as 13B or 350M")
	s.BoolVar(&f.Quantized, "quantized", false, "The model's weights have 8 bits")
	s.StringVar(&f.Asked, "memory", "", "Memory that one replica needs, such as 20Gi, instead of --model-size")
	s.IntVar(&f.Count, "count", 1, "Number of replicas")
	s.Float64Var(&f.Price, "price", 0, "What a GPU costs for an hour, in dollars")
	s.StringVar(&f.Image, "image", "", "Image of the container in the manifest")
}

func (f *adviseFlags) run(ctx context.Context, o *options.Options, client kubernetes.Interface) error {
	m, _, err := fleet.Look(ctx, o, client, fleet.ResourceSlices, fleet.ResourceNodes, fleet.ResourceTaintRules,
		fleet.ResourceClaims, fleet.ResourceTemplates, fleet.ResourcePods)
	if err != nil {
		return err
	}
	a, err := Advise(f.Query, m)
	if err != nil {
		return err
	}
	// The manifest is what one wants to apply; the whole answer is there as JSON.
	if o.Output == options.OutputYAML {
		_, err := io.WriteString(o.Out, a.Manifest)
		return err
	}
	return printer.Print(o, a, &printer.Text{Named: []string{a.Template}, Render: a.write})
}

// maxCount is more than a cluster has pods.
const maxCount = 1_000_000

var modelSizeForm = regexp.MustCompile(`^([0-9]{1,6}(?:\.[0-9]{1,3})?)([BbMm])$`)

// check checks the flags, and notes which were not given.
func (f *adviseFlags) check(flags *pflag.FlagSet) error {
	for _, name := range []string{"workload", "trust", "traffic"} {
		if !flags.Changed(name) {
			f.Assumed = append(f.Assumed, "--"+name+" "+flags.Lookup(name).DefValue)
		}
	}
	switch {
	case f.Count < 1 || f.Count > maxCount:
		return fmt.Errorf("--count %d: it must be 1 or more, and %d at most", f.Count, maxCount)
	case f.modelSize != "" && f.Asked != "":
		return errors.New("--model-size and --memory both say how much memory is needed: give one of them")
	case f.Quantized && f.modelSize == "":
		return errors.New("--quantized says something about --model-size, which is missing")
	case f.Quantized && f.Kind == Training:
		return errors.New("--quantized is about inference: for training on quantized weights give --memory")
	case f.Kind == Inference && f.modelSize == "" && f.Asked == "":
		return errors.New("for inference --model-size or --memory is needed, as in --model-size 7B: without it nobody can say which part of a GPU is enough")
	}
	return errors.Join(checkPrice(f.Price), f.size())
}

// size reads how much memory is needed.
func (f *adviseFlags) size() error {
	if f.Asked != "" {
		quantity, err := resource.ParseQuantity(f.Asked)
		if err != nil || quantity.Sign() <= 0 || quantity.Value() < mib {
			return fmt.Errorf("--memory %s: it must be an amount of at least 1Mi, such as 20Gi", f.Asked)
		}
		f.Memory = quantity.Value()
	}
	if f.modelSize == "" {
		return nil
	}
	parts := modelSizeForm.FindStringSubmatch(f.modelSize)
	if parts == nil {
		return fmt.Errorf("--model-size %s: it must be a number of parameters, such as 13B or 350M", f.modelSize)
	}
	n, err := strconv.ParseFloat(parts[1], 64)
	if err != nil || n == 0 {
		return fmt.Errorf("--model-size %s: it must be more than 0", f.modelSize)
	}
	if strings.EqualFold(parts[2], "M") {
		n /= 1000
	}
	f.Billions = n
	return nil
}
