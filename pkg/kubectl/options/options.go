// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package options holds what all commands of kubectl gpu have in common: flags, clients,
// streams and exit codes.
package options

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
)

// DefaultDriver is the name under which the chart installs the driver.
const DefaultDriver = "gpu.nvidia.com"

// Requests of a command: one that looks at a fleet makes many at once.
const (
	queriesPerSecond = 200
	burst            = 400
)

// watchInterval is how often the driver measures.
const watchInterval = 15 * time.Second

// ErrFound says that a command worked and found something that is wrong. It is printed
// nowhere: the command's output says what it is. The exit code is 2.
var ErrFound = errors.New("something was found")

// Options are those of one call.
type Options struct {
	genericiooptions.IOStreams
	// Config selects cluster, user and namespace, as kubectl's flags do.
	Config *genericclioptions.ConfigFlags
	// Driver is the driver's name in ResourceSlices.
	Driver string
	// Output is the value of -o, "" for people.
	Output string
	// NoHeaders is --no-headers.
	NoHeaders bool
	// AllNamespaces is -A.
	AllNamespaces bool
	// Selector is -l.
	Selector string
	// Watch shows the output again after each Interval.
	Watch    bool
	Interval time.Duration
}

// New returns options with the defaults of kubectl.
func New(streams genericiooptions.IOStreams) *Options {
	streams.Out, streams.ErrOut = Safe(streams.Out), Safe(streams.ErrOut)
	o := &Options{IOStreams: streams, Config: genericclioptions.NewConfigFlags(true), Driver: DefaultDriver, Interval: watchInterval}
	o.Config.WrapConfigFn = func(c *rest.Config) *rest.Config {
		c.QPS, c.Burst = queriesPerSecond, burst
		c.UserAgent = "kubectl-gpu"
		return c
	}
	return o
}

// AddFlags adds the flags that all commands have.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	o.Config.AddFlags(flags)
	flags.StringVar(&o.Driver, "driver", o.Driver, "Name of the DRA driver whose devices are looked at")
}

// AddOutputFlag adds -o to a command.
func (o *Options) AddOutputFlag(c *cobra.Command) {
	AddChoice(c, &o.Output, "output", "o", "Output `format`: ", Outputs()...)
}

// AddTableFlags adds -o and --no-headers to a command that prints a table.
func (o *Options) AddTableFlags(c *cobra.Command) {
	o.AddOutputFlag(c)
	c.Flags().BoolVar(&o.NoHeaders, "no-headers", false, "Print no headers")
}

// AddAllNamespacesFlag adds -A to a command.
func (o *Options) AddAllNamespacesFlag(c *cobra.Command, usage string) {
	c.Flags().BoolVarP(&o.AllNamespaces, "all-namespaces", "A", false, usage)
}

// What -l selects.
const (
	OfClaims = "claims or of the pods that use them, such as app=llm"
	OfNodes  = "nodes, such as pool=big"
)

// AddSelectionFlags adds -A and -l to a command.
func (o *Options) AddSelectionFlags(c *cobra.Command, of string) {
	o.AddAllNamespacesFlag(c, "Look at the objects of all namespaces")
	o.AddSelector(c, of)
}

// AddSelector adds -l to a command.
func (o *Options) AddSelector(c *cobra.Command, of string) {
	c.Flags().StringVarP(&o.Selector, "selector", "l", "", "Label selector of "+of)
}

// AddWatchFlags adds -w to a command.
func (o *Options) AddWatchFlags(c *cobra.Command) {
	c.Flags().BoolVarP(&o.Watch, "watch", "w", false, "Show it again and again")
	c.Flags().DurationVar(&o.Interval, "interval", o.Interval, "Time between two looks with --watch")
}

// Repeat calls show once or, with -w, until the context ends.
func (o *Options) Repeat(ctx context.Context, show func() error) error {
	if !o.Watch {
		return show()
	}
	if o.Interval <= 0 {
		return fmt.Errorf("--interval %s: it must be more than 0, such as 15s", o.Interval)
	}
	err := wait.PollUntilContextCancel(ctx, o.Interval, true, func(context.Context) (done bool, err error) {
		if o.Terminal() && o.Output == "" {
			err = o.ClearScreen()
		}
		if err == nil {
			err = show()
		}
		if errors.Is(err, ErrFound) {
			return false, nil
		}
		return false, err
	})
	if ctx.Err() != nil {
		return nil //nolint:nilerr // completion has no errors to tell
	}
	return err
}

// Run is what a command runs: f with a client, once or, with -w, again and again.
func (o *Options) Run(f func(ctx context.Context, client kubernetes.Interface, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		client, err := o.Client()
		if err != nil {
			return err
		}
		return o.Repeat(c.Context(), func() error { return f(c.Context(), client, args) })
	}
}

// Client returns a client with the rights of the kubeconfig.
func (o *Options) Client() (kubernetes.Interface, error) {
	return clientOf(o, func(c *rest.Config) (kubernetes.Interface, error) {
		// A fleet's slices are many megabytes of JSON.
		c.ContentType, c.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
		return kubernetes.NewForConfig(c)
	})
}

// Dynamic returns a client for objects of any kind.
func (o *Options) Dynamic() (dynamic.Interface, error) {
	return clientOf(o, func(c *rest.Config) (dynamic.Interface, error) { return dynamic.NewForConfig(c) })
}

func clientOf[C any](o *Options, client func(*rest.Config) (C, error)) (c C, err error) {
	config, err := o.Config.ToRESTConfig()
	if err != nil {
		return c, fmt.Errorf("read the kubeconfig: %w", err)
	}
	config = rest.CopyConfig(config)
	// Webhooks write warnings.
	config.WarningHandler = rest.NewWarningWriter(o.ErrOut, rest.WarningWriterOptions{Deduplicate: true})
	if c, err = client(config); err != nil {
		return c, fmt.Errorf("make a client for %s: %w", config.Host, err)
	}
	return c, nil
}

// Namespace returns the namespace to look at: "" with -A.
func (o *Options) Namespace() (string, error) {
	if o.AllNamespaces {
		return "", nil
	}
	namespace, _, err := o.Config.ToRawKubeConfigLoader().Namespace()
	if err != nil && !clientcmd.IsEmptyConfig(err) {
		return "", fmt.Errorf("read the kubeconfig: %w", err)
	}
	return namespace, nil
}

// Labels returns what -l selects.
func (o *Options) Labels() (labels.Selector, error) {
	selector, err := labels.Parse(o.Selector)
	if err != nil {
		return nil, fmt.Errorf("-l %s: it must be a label selector, such as app=llm: %w", o.Selector, err)
	}
	return selector, nil
}

// Terminal reports whether the output goes to a terminal that can be cleared.
func (o *Options) Terminal() bool {
	file := file(o.Out)
	return file != nil && os.Getenv("TERM") != "dumb" && term.IsTerminal(int(file.Fd()))
}

// Color reports whether the output may be coloured: it goes to a terminal, and the user has
// not forbidden it (no-color.org).
func (o *Options) Color() bool { return os.Getenv("NO_COLOR") == "" && o.Terminal() }

// ContextName returns the name of the kubeconfig's context in use, "" if there is none.
func (o *Options) ContextName() string {
	// Without a kubeconfig it is only a name that is missing.
	config, _ := o.Config.ToRawKubeConfigLoader().RawConfig()
	return cmp.Or(ptr.Deref(o.Config.Context, ""), config.CurrentContext)
}

// Values of -o. Without one the output is for people.
const (
	OutputJSON = "json"
	OutputYAML = "yaml"
	OutputWide = "wide"
	OutputName = "name"
)

// CustomColumns begins a value of -o, which goes on as that of kubectl.
const CustomColumns = "custom-columns="

// Outputs returns all values of -o, those that end with = without what follows.
func Outputs() []string {
	return []string{OutputJSON, OutputYAML, OutputWide, OutputName, "jsonpath=", "jsonpath-file=", "go-template=", CustomColumns}
}

// choice is a flag that takes one of some values, and refuses others before anything is read.
type choice struct {
	value *string
	known []string
}

// String returns the value.
func (c choice) String() string { return *c.value }

// Type names the value in the help.
func (c choice) Type() string { return "string" }

// Set takes the default and what is known. A value that is known to end with = goes on.
func (c choice) Set(value string) error {
	known, _, goesOn := strings.Cut(value, "=")
	if goesOn {
		known += "="
	}
	if value != *c.value && !slices.Contains(c.known, known) {
		return fmt.Errorf("it must be one of %s", strings.Join(c.known, ", "))
	}
	*c.value = value
	return nil
}

// AddChoice adds a flag that takes one of some values. What is there is the default.
func AddChoice(c *cobra.Command, value *string, name, shorthand, usage string, known ...string) {
	c.Flags().VarP(choice{value, known}, name, shorthand, usage+strings.Join(known, ", "))
	// The error is that of a flag that does not exist.
	_ = c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp))
}
