// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

const adviseLong = `Say which way to share a GPU suits a workload, why, what it costs, and what speaks
against the others. The answer ends with a manifest; -o yaml prints the manifest alone.

The fleet is that of the cluster, or with --gpu one of the given models, for which no
cluster is needed.`

const adviseExample = `  # A service with a model of 7 billion parameters, on what the cluster has
  kubectl gpu advise --model-size 7B --trust other-tenants

  # The same, applied
  kubectl gpu advise --model-size 7B --image registry.example.com/llm:1 -o yaml | kubectl apply -f -

  # Twenty notebooks on four T4, without a cluster
  kubectl gpu advise --workload notebook --count 20 --gpu t4=4`

// adviseFlags are those of the command, as they were given.
type adviseFlags struct {
	workload, latency, trust, traffic string
	modelSize, memory, image          string
	quantized                         bool
	count                             int
	price                             float64
	gpus                              []string
}

// NewAdvise returns the command.
func NewAdvise(o *options.Options) *cobra.Command {
	f := &adviseFlags{}
	c := &cobra.Command{
		Use:               "advise",
		Short:             "Say which way to share a GPU suits a workload, with the manifest",
		Long:              adviseLong,
		Example:           adviseExample,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(c *cobra.Command, _ []string) error { return runAdvise(c.Context(), o, f) },
	}
	s := c.Flags()
	s.StringVar(&f.workload, "workload", "", "What it is: "+list(Kinds)+" (default inference)")
	s.StringVar(&f.modelSize, "model-size", "", "Parameters of the model, such as 13B or 350M")
	s.BoolVar(&f.quantized, "quantized", false, "The model's weights have 8 bits")
	s.StringVar(&f.memory, "memory", "", "Memory that one replica needs, such as 20Gi, instead of --model-size")
	s.StringVar(&f.latency, "latency", "", "How late answers may be: p99-ms (tens of milliseconds) or relaxed")
	s.StringVar(&f.trust, "trust", "", "Who may be the neighbours: "+list(Trusts)+" (default same-team)")
	s.StringVar(&f.traffic, "traffic", "", "When it has work: "+list(Traffics)+" (default steady)")
	s.IntVar(&f.count, "count", 0, "Number of replicas (default 1)")
	s.Float64Var(&f.price, "price", 0, "What a GPU costs for an hour, in dollars")
	s.StringVar(&f.image, "image", "", "Image of the container in the manifest")
	s.StringSliceVar(&f.gpus, "gpu", nil, "Ask for these models instead of a cluster, such as h100,t4=8: "+strings.Join(boards.Names(), ", "))
	o.AddOutputFlag(c)
	for name, values := range map[string][]string{
		"workload": texts(Kinds), "latency": texts(Latencies), "trust": texts(Trusts),
		"traffic": texts(Traffics), "gpu": boards.Names(),
	} {
		// The error is that of a flag that does not exist.
		_ = c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	return c
}

func runAdvise(ctx context.Context, o *options.Options, f *adviseFlags) error {
	q, err := f.query(o.Driver)
	if err != nil {
		return err
	}
	supply, err := supplyFor(ctx, o, f.gpus)
	if err != nil {
		return err
	}
	a, err := Advise(q, supply)
	if err != nil {
		return err
	}
	// The manifest is what one wants to apply; the whole answer is there as JSON.
	if o.Output == options.OutputYAML {
		_, err := io.WriteString(o.Out, a.Manifest)
		return err
	}
	return printer.Print(o, a, adviceView(a))
}

// supplyFor asks the cluster, or takes the given models.
func supplyFor(ctx context.Context, o *options.Options, gpus []string) (*Supply, error) {
	if len(gpus) > 0 {
		return SupplyOfNames(gpus)
	}
	client, err := o.Client()
	if err != nil {
		return nil, fmt.Errorf("%w (without a cluster use --gpu, as in --gpu h100)", err)
	}
	m, _, err := fleet.Look(ctx, o, client, "", fleet.ResourceSlices, fleet.ResourceNodes, fleet.ResourceTaintRules,
		fleet.ResourceClaims, fleet.ResourceTemplates, fleet.ResourcePods)
	if err != nil {
		return nil, err
	}
	return SupplyOf(m), nil
}

// maxCount is more than a cluster has pods.
const maxCount = 1_000_000

var modelSizeForm = regexp.MustCompile(`^([0-9]{1,6}(?:\.[0-9]{1,3})?)([BbMm])$`)

// query checks the adviseFlags and fills in what was not given.
func (f *adviseFlags) query(driver string) (Query, error) {
	q := Query{Quantized: f.quantized, Price: f.price, Image: f.image, Driver: driver}
	var errs [4]error
	q.Kind, errs[0] = choice(&q, "workload", f.workload, Inference, Kinds)
	q.Trust, errs[1] = choice(&q, "trust", f.trust, SameTeam, Trusts)
	q.Traffic, errs[2] = choice(&q, "traffic", f.traffic, Steady, Traffics)
	q.Latency, errs[3] = choice(&q, "latency", f.latency, "", Latencies)
	if err := errors.Join(errs[:]...); err != nil {
		return q, err
	}
	if q.Count = f.count; f.count == 0 {
		q.Count = 1
	}
	switch {
	case q.Count < 0 || q.Count > maxCount:
		return q, fmt.Errorf("--count %d: it must be 1 or more, and %d at most", f.count, maxCount)
	case math.IsNaN(f.price) || f.price < 0 || f.price > maxPrice:
		return q, fmt.Errorf("--price %g: it must be dollars for an hour, from 0 to %g", f.price, float64(maxPrice))
	case f.modelSize != "" && f.memory != "":
		return q, errors.New("--model-size and --memory both say how much memory is needed: give one of them")
	case f.quantized && f.modelSize == "":
		return q, errors.New("--quantized says something about --model-size, which is missing")
	case q.Kind == Inference && f.modelSize == "" && f.memory == "":
		return q, errors.New("for inference --model-size or --memory is needed, as in --model-size 7B: without it nobody can say which part of a GPU is enough")
	}
	return q, f.size(&q)
}

// size reads how much memory is needed.
func (f *adviseFlags) size(q *Query) error {
	if f.memory != "" {
		quantity, err := resource.ParseQuantity(f.memory)
		if err != nil || quantity.Sign() <= 0 || quantity.Value() < mib {
			return fmt.Errorf("--memory %s: it must be an amount of at least 1Mi, such as 20Gi", f.memory)
		}
		q.Memory = quantity.Value()
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
	q.Billions = n
	return nil
}

// choice reads a flag with fixed values. What is not given is assumed, and said.
func choice[T ~string](q *Query, name, given string, otherwise T, known []T) (T, error) {
	if given == "" {
		if otherwise != "" {
			q.Assumed = append(q.Assumed, fmt.Sprintf("--%s %s", name, otherwise))
		}
		return otherwise, nil
	}
	if !slices.Contains(known, T(given)) {
		return "", fmt.Errorf("--%s %s: it must be one of %s", name, given, list(known))
	}
	return T(given), nil
}

func list[T ~string](values []T) string { return strings.Join(texts(values), ", ") }

func texts[T ~string](values []T) []string {
	var out []string
	for _, v := range values {
		out = append(out, string(v))
	}
	return out
}
