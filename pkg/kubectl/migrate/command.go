// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package migrate has the commands that translate what other programs for sharing GPUs are
// configured with, and pods that were written for them.
package migrate

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
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
	c.AddCommand(
		newConfigCommand(o, "castai FILE", "Translate a node template of Cast AI, in the JSON of its API or of terraform show -json", config.CastAI, nil),
		newConfigCommand(o, "device-plugin FILE", "Translate a configuration of NVIDIA's device plugin, or a ConfigMap with some", config.DevicePlugin, addDevicePluginFlags),
		newConfigCommand(o, "mig-parted FILE", "Translate a configuration of NVIDIA's mig-parted or MIG manager, or a ConfigMap with some", config.MIGParted, nil),
		newPodsCommand(o),
	)
	return c
}

// checkDriver refuses what cannot be the name of a driver: it becomes a part of expressions.
func checkDriver(name string) error {
	if wrong := validation.IsDNS1123Subdomain(name); len(wrong) > 0 {
		return fmt.Errorf("--driver: Invalid value: %s: %s", quote.Text(name), wrong[0])
	}
	return nil
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
	{"templates", "a claim template for each kind of device: kubectl apply --filename FILE", (*config.Result).Templates},
}

// render returns the part with the findings at its head.
func (p part) render(result *config.Result, command string) ([]byte, error) {
	text, err := p.text(result)
	if err != nil {
		return nil, err
	}
	if len(text) == 0 {
		text = []byte("# None are needed.\n")
	}
	return append([]byte(result.Findings.Comment(command+": "+p.what)), text...), nil
}

// configFlags are those of a command that translates a configuration.
type configFlags struct {
	config.Options
	matches   []string
	part      string
	directory string
	strict    bool
}

type translateConfig func(data []byte, o config.Options) (*config.Result, error)

func newConfigCommand(o *options.Options, use, short string, translate translateConfig, more func(*cobra.Command, *configFlags)) *cobra.Command {
	f := &configFlags{}
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(1),
		Long: short + `.

- is standard input. Printed are the values of the chart, or
with --print the sharing policy as the file that the driver reads, the device classes that the
chart does not make, or a claim template for each kind of device. --directory writes all of them.`,
		RunE: func(c *cobra.Command, args []string) error { return f.run(o, c.CommandPath(), args[0], translate) },
	}
	c.Flags().StringSliceVar(&f.Configs, "config", nil, "Name of the configuration to translate, where there are several")
	c.Flags().StringVar(&f.part, "print", parts[0].name, "What to print: "+partNames())
	c.Flags().StringVar(&f.directory, "directory", "", "Write all parts into this folder instead, as values.yaml, policy.yaml, classes.yaml and templates.yaml")
	addStrictFlag(c, &f.strict)
	if more != nil {
		more(c, f)
	}
	return c
}

func partNames() string {
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}

func addStrictFlag(c *cobra.Command, strict *bool) {
	c.Flags().BoolVar(strict, "strict", false, "Fail if a field is not translated")
}

func addDevicePluginFlags(c *cobra.Command, f *configFlags) {
	c.Flags().StringArrayVar(&f.matches, "match", nil, "GPUs that one of several configurations is for, as CONFIG=FIELD=VALUE, such as t4=productName=Tesla T4")
	c.Flags().StringVar(&f.SingleProfile, "single-profile", "", "MIG profile that nvidia.com/gpu is with migStrategy single, such as 1g.10gb")
}

func (f *configFlags) run(o *options.Options, command, file string, translate translateConfig) error {
	if err := checkDriver(o.Driver); err != nil {
		return err
	}
	printed := slices.IndexFunc(parts, func(p part) bool { return p.name == f.part })
	if printed < 0 {
		return fmt.Errorf("--print: Unsupported value: %s: want %s", quote.Text(f.part), partNames())
	}
	f.Driver = o.Driver
	if err := f.AddMatches(f.matches); err != nil {
		return err
	}
	data, err := document.ReadFile(o.In, file)
	if err != nil {
		return err
	}
	result, err := translate(data, f.Options)
	if err == nil {
		err = f.write(o.Out, result, command, parts[printed])
	}
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return report(o, result.Findings, f.directory == "", f.strict)
}

// write prints one part, or writes all of them into files.
func (f *configFlags) write(out io.Writer, result *config.Result, command string, printed part) error {
	if f.directory == "" {
		text, err := printed.render(result, command)
		if err == nil {
			_, err = out.Write(text)
		}
		return err
	}
	if err := os.MkdirAll(f.directory, 0o755); err != nil {
		return err
	}
	for _, p := range parts {
		path := filepath.Join(f.directory, p.name+".yaml")
		text, err := p.render(result, command)
		if err == nil {
			err = writeNew(path, text)
		}
		if err == nil {
			_, err = fmt.Fprintln(out, path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// writeNew writes a file that must not exist.
func writeNew(path string, text []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	if _, err := file.Write(text); err != nil {
		return errors.Join(err, file.Close())
	}
	return file.Close()
}

// podFlags are those of the command that translates pods.
type podFlags struct {
	gpu, shared string
	strict      bool
}

func newPodsCommand(o *options.Options) *cobra.Command {
	f := &podFlags{}
	c := &cobra.Command{
		Use: "pods FILE...", Short: "Translate pods and what makes pods to claims", Args: cobra.MinimumNArgs(1),
		Long: `Translate Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, Jobs and CronJobs. Requests for
nvidia.com/gpu, nvidia.com/gpu.shared and nvidia.com/mig-PROFILE become claims, and labels of GPU feature
discovery in node selectors become selectors of these. All other objects are passed on as they are.

What nvidia.com/gpu is depends on how the device plugin was configured: say it with --gpu.`,
		RunE: func(c *cobra.Command, files []string) error { return f.run(o, c.CommandPath(), files) },
	}
	c.Flags().StringVar(&f.gpu, "gpu", string(policy.Whole), "What nvidia.com/gpu is: gpu, mps, timeslice, or a MIG profile such as 1g.10gb")
	c.Flags().StringVar(&f.shared, "gpu-shared", string(policy.TimeSlice), "What nvidia.com/gpu.shared is: timeslice or mps")
	addStrictFlag(c, &f.strict)
	return c
}

var profileName = regexp.MustCompile(`^[0-9]{1,2}g\.[0-9]{1,4}gb([+-][a-z]{1,8}(\.[a-z]{1,8})?){0,2}$`)

// options checks the flags.
func (f *podFlags) options(driver string) (pods.Options, error) {
	result := pods.Options{Driver: driver, GPU: policy.Kind(f.gpu), Shared: policy.Kind(f.shared)}
	switch {
	case profileName.MatchString(f.gpu):
		result.GPU, result.GPUProfile = policy.Partition, f.gpu
	case !slices.Contains([]policy.Kind{policy.Whole, policy.MPS, policy.TimeSlice}, result.GPU):
		return result, fmt.Errorf("--gpu: Unsupported value: %s: want gpu, mps, timeslice, or a MIG profile such as 1g.10gb", quote.Text(f.gpu))
	}
	if result.Shared != policy.MPS && result.Shared != policy.TimeSlice {
		return result, fmt.Errorf("--gpu-shared: Unsupported value: %s: want timeslice or mps", quote.Text(f.shared))
	}
	return result, nil
}

func (f *podFlags) run(o *options.Options, command string, files []string) error {
	if err := checkDriver(o.Driver); err != nil {
		return err
	}
	translation, err := f.options(o.Driver)
	if err != nil {
		return err
	}
	// One file is passed on as it is, also the end of its last line.
	var data []byte
	for _, file := range files {
		own, err := document.ReadFile(o.In, file)
		if err != nil {
			return err
		}
		if len(files) > 1 {
			own = slices.Concat([]byte("---\n"), own, []byte("\n"))
		}
		data = append(data, own...)
	}
	result, err := pods.Translate(data, translation)
	if err != nil {
		return fmt.Errorf("%s: %w", strings.Join(files, ", "), err)
	}
	title := fmt.Sprintf("%s: objects changed: %d", command, result.Changed)
	if _, err := fmt.Fprintf(o.Out, "%s%s", result.Findings.Comment(title), result.Text); err != nil {
		return err
	}
	return report(o, result.Findings, true, f.strict)
}

// report tells what is not translated, unless a terminal shows the comments that say so, and fails for it if that is wanted.
func report(o *options.Options, findings finding.List, commented, strict bool) error {
	if !commented || !o.Terminal() {
		for _, line := range findings.Lines() {
			if _, err := fmt.Fprintln(o.ErrOut, line); err != nil {
				return err
			}
		}
	}
	if ignored := findings.Ignored(); strict && ignored > 0 {
		return fmt.Errorf("fields that are not translated, of which --strict takes none: %d", ignored)
	}
	return nil
}
