// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package migrate has the commands that translate what other programs for sharing GPUs are
// configured with, and pods that were written for them.
package migrate

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/config"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/pods"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// NewCommand returns the command migrate.
func NewCommand(o *options.Options) *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate",
		Short: "Translate configurations of other programs, and pods, to this driver",
		Long: `Translate configurations of NVIDIA's device plugin, of mig-parted and of Cast AI, and pods
that were written for them. Nothing is sent to a cluster.

Every field that is not translated is listed with its value and the reason, as a comment at the
head of the output and, unless that goes to a terminal, on stderr. With --strict such a field
makes the command fail.`,
		Example: `  kubectl gpu migrate device-plugin config.yaml > values.yaml
  kubectl gpu migrate mig-parted config.yaml > values.yaml
  kubectl gpu migrate pods deployment.yaml`,
	}
	f := &flags{part: parts[0].name, shared: string(policy.TimeSlice)}
	castAI := f.config(o, "castai FILE", "Translate a node template of Cast AI, in the JSON of its API or of terraform show -json", config.CastAI)
	plugin := f.config(o, "device-plugin FILE", "Translate a configuration of NVIDIA's device plugin, or a ConfigMap with some", config.DevicePlugin)
	plugin.Flags().StringArrayVar(&f.matches, "match", nil, "GPUs that one of several configurations is for, as CONFIG=FIELD=VALUE, such as t4=productName=Tesla T4")
	plugin.Flags().StringVar(&f.options.SingleProfile, "single-profile", "", "MIG profile that nvidia.com/gpu is with migStrategy single, such as 1g.10gb")
	migParted := f.config(o, "mig-parted FILE", "Translate a configuration of NVIDIA's mig-parted or MIG manager, or a ConfigMap with some", config.MIGParted)
	c.AddCommand(castAI, plugin, migParted, f.pods(o))
	return c
}

// part is one of what a configuration becomes.
type part struct {
	name, what string
	text       func(*config.Result) ([]byte, error)
}

var parts = []part{
	{"values", "values of the chart: helm upgrade --values FILE", (*config.Result).Values},
	{"policy", "the sharing policy as the driver reads it: it is sharingPolicy in the values of the chart", (*config.Result).PolicyFile},
	{"classes", "device classes that the chart does not make: kubectl apply --filename FILE", (*config.Result).Classes},
}

// flags are those of all commands.
type flags struct {
	strict  bool
	part    string
	options config.Options
	matches []string
	// gpu and shared say what extended resources are.
	gpu, shared string
}

// translate translates files. It returns what a command prints below the title, and what it says about their fields.
type translate func(data []byte) (title string, text []byte, findings finding.List, err error)

// command completes one that translates files, once its flags are checked.
func (f *flags) command(o *options.Options, c *cobra.Command, check func() (translate, error)) *cobra.Command {
	c.Flags().BoolVar(&f.strict, "strict", false, "Fail if a field is not translated, or was ignored before, too")
	c.RunE = func(c *cobra.Command, files []string) error {
		// It becomes a part of expressions.
		if wrong := validation.IsDNS1123Subdomain(o.Driver); len(wrong) > 0 {
			return fmt.Errorf("--driver: Invalid value: %s: %s", quote.Text(o.Driver), wrong[0])
		}
		translate, err := check()
		if err != nil {
			return err
		}
		data, err := read(o, files)
		if err != nil {
			return err
		}
		title, text, findings, err := translate(data)
		if err != nil {
			return fmt.Errorf("%s: %w", strings.Join(files, ", "), err)
		}
		return f.print(o, c.CommandPath()+": "+title, text, findings)
	}
	return c
}

// read returns one file as it is, also the end of its last line, or several as one stream.
func read(o *options.Options, files []string) (data []byte, err error) {
	for _, file := range files {
		own, err := document.ReadFile(o.In, file)
		if err != nil {
			return nil, err
		}
		if len(files) > 1 {
			own = slices.Concat([]byte("---\n"), own, []byte("\n"))
		}
		data = append(data, own...)
	}
	return data, nil
}

// print prints a translation. What is not translated goes to stderr, too, unless a terminal shows the comments that say so.
func (f *flags) print(o *options.Options, title string, text []byte, findings finding.List) error {
	if _, err := fmt.Fprintf(o.Out, "%s%s", findings.Comment(title), text); err != nil {
		return err
	}
	if !o.Terminal() {
		for _, line := range findings.Lines() {
			// Nobody reads what cannot be written.
			_, _ = fmt.Fprintln(o.ErrOut, line)
		}
	}
	if ignored := findings.Ignored(); f.strict && ignored > 0 {
		return fmt.Errorf("fields that are not translated, of which --strict takes none: %d", ignored)
	}
	return nil
}

// config returns a command that translates a configuration.
func (f *flags) config(o *options.Options, use, short string, resultOf func([]byte, config.Options) (*config.Result, error)) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(1),
		Long: short + `.

- is standard input. Printed are the values of the chart, or with --print the sharing policy as the
file that the driver reads, or the device classes that the chart does not make.`,
	}
	c.Flags().StringSliceVar(&f.options.Configs, "config", nil, "Name of the configuration to translate, where there are several")
	options.AddChoice(c, &f.part, "print", "", "What to print: ", parts[0].name, parts[1].name, parts[2].name)
	return f.command(o, c, func() (translate, error) {
		f.options.Driver = o.Driver
		return func(data []byte) (string, []byte, finding.List, error) {
			result, err := resultOf(data, f.options)
			if err != nil {
				return "", nil, nil, err
			}
			result.TellClasses()
			part := parts[slices.IndexFunc(parts, func(p part) bool { return p.name == f.part })]
			text, err := part.text(result)
			if len(text) == 0 {
				text = []byte("# None are needed.\n")
			}
			return part.what, text, result.Findings, err
		}, f.options.AddMatches(f.matches)
	})
}

// pods returns the command that translates pods.
func (f *flags) pods(o *options.Options) *cobra.Command {
	c := &cobra.Command{
		Use: "pods FILE...", Short: "Translate pods and what makes pods to claims", Args: cobra.MinimumNArgs(1),
		Long: `Translate Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs and CronJobs. Requests for
nvidia.com/gpu, nvidia.com/gpu.shared and nvidia.com/mig-PROFILE become claims, and labels of GPU feature
discovery in node selectors become selectors of these. All other objects are passed on as they are.

What nvidia.com/gpu is depends on how the device plugin was configured: say it with --gpu.`,
	}
	c.Flags().StringVar(&f.gpu, "gpu", string(policy.Whole), "What nvidia.com/gpu is: gpu, mps, timeslice, or a MIG profile such as 1g.10gb")
	options.AddChoice(c, &f.shared, "gpu-shared", "", "What nvidia.com/gpu.shared is: ", string(policy.TimeSlice), string(policy.MPS))
	return f.command(o, c, func() (translate, error) {
		wanted, err := f.meanings(o.Driver)
		return func(data []byte) (string, []byte, finding.List, error) {
			result, err := pods.Translate(data, wanted)
			if err != nil {
				return "", nil, nil, err
			}
			return fmt.Sprintf("objects changed: %d", result.Changed), result.Text, result.Findings, nil
		}, err
	})
}

// meanings checks what extended resources are said to be.
func (f *flags) meanings(driver string) (pods.Options, error) {
	result := pods.Options{Driver: driver, GPU: policy.Kind(f.gpu), Shared: policy.Kind(f.shared)}
	switch {
	case config.IsProfile(f.gpu):
		result.GPU, result.GPUProfile = policy.Partition, f.gpu
	case !slices.Contains([]policy.Kind{policy.Whole, policy.MPS, policy.TimeSlice}, result.GPU):
		return result, fmt.Errorf("--gpu: Unsupported value: %s: want gpu, mps, timeslice, or a MIG profile such as 1g.10gb", quote.Text(f.gpu))
	}
	return result, nil
}
