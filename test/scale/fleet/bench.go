// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/partage-dev/partage/pkg/kubectl/sliceset/template"
)

// Options say what is measured.
type Options struct {
	Kubeconfig string
	// Nodes is how many there are, each with so many GPUs of a model.
	Nodes, GPUs int
	Model       string
	// Spread is over how long nodes spread a change of the policy.
	Spread time.Duration
	// Storm is how long all GPUs are at their thermal limit.
	Storm time.Duration
	// Dir is for files of the plugins. Its path must be short.
	Dir string
	// Progress is told how far it is.
	Progress io.Writer
}

// The policies that follow one another. They differ in an attribute of two devices of each GPU,
// and neither takes devices away, so that a change makes each slice with devices be written once.
const policyText = `apiVersion: policy.partage.dev/v1alpha1
kind: SharingPolicy
default:
  kinds: [gpu, mig, mps, timeslice]
  timeslice: {clients: %d}
`

// Versions of the NVIDIA driver, before and after the upgrade. Both are also valid as those of
// Kubernetes, so that they are published as they are.
const (
	driverBefore = "580.82.7"
	driverAfter  = "580.95.5"
)

// questions is how many slices a plugin that starts has the API server check, without storing them.
const questions = 1

// bench is what runs.
type bench struct {
	Options
	admin   *rest.Config
	client  kubernetes.Interface
	traffic *Traffic
	control processes
	driver  NVIDIADriver
	nodes   []*Node
	began   time.Time
}

// Report is the outcome.
type Report struct {
	Options
	// Stages are moments at which the memory was read.
	Stages []Stage
	Phases []Result
}

// Stage is a moment.
type Stage struct {
	Name   string
	Memory map[string]memory
}

// Run measures all phases. It needs a cluster with kwok, and leaves its objects there. With an error
// the report has what was measured before.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	b := &bench{Options: o, traffic: NewTraffic(), began: time.Now()}
	report = &Report{Options: o}
	if err := b.connect(ctx); err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, b.stopAll(ctx)) }()
	if err := b.stage(ctx, report, "nodes without slices"); err != nil {
		return report, err
	}
	if err := b.run(ctx, report); err != nil {
		return report, errors.Join(err, b.stage(context.WithoutCancel(ctx), report, "when it ended"))
	}
	return report, b.stage(ctx, report, "at the end")
}

// stage reads the memory.
func (b *bench) stage(ctx context.Context, report *Report, name string) error {
	m, err := b.control.memory(ctx, b.admin)
	report.Stages = append(report.Stages, Stage{name, m})
	return err
}

// run goes through all phases.
func (b *bench) run(ctx context.Context, report *Report) error {
	for i, p := range b.phases(ctx) {
		b.say("%s", p.Name)
		result, err := p.run(ctx, b.traffic, b.control)
		if err != nil {
			return err
		}
		b.say("  %.1f s, %d requests", result.Took.Seconds(), result.Counts.Requests())
		report.Phases = append(report.Phases, result)
		if i > 0 {
			continue
		}
		if err := b.stage(ctx, report, "slices published"); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) say(format string, args ...any) {
	_, _ = fmt.Fprintf(b.Progress, "%6.1fs  %s\n", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...))
}

// connect finds the control plane and makes nodes, and plugins that do not run yet.
func (b *bench) connect(ctx context.Context) error {
	var err error
	if b.admin, err = clientcmd.BuildConfigFromFlags("", b.Kubeconfig); err != nil {
		return fmt.Errorf("read the kubeconfig: %w", err)
	}
	b.admin.QPS, b.admin.Burst = -1, 0
	if b.client, err = kubernetes.NewForConfig(b.admin); err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	if b.control, err = findProcesses(); err != nil {
		return err
	}
	b.say("%d nodes with %d GPUs %s", b.Nodes, b.GPUs, b.Model)
	if err := makeNodes(ctx, b.client, b.Nodes); err != nil {
		return err
	}
	if err := b.awaitNodes(ctx); err != nil {
		return err
	}
	config, err := pluginConfig(ctx, b.admin, b.client)
	if err != nil {
		return err
	}
	config.WrapTransport, config.Dial = b.traffic.Transport, b.traffic.Dial
	return b.makePlugins(config)
}

func (b *bench) awaitNodes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, phaseLimit)
	defer cancel()
	for {
		ready, err := readyNodes(ctx, b.client)
		if err != nil {
			return err
		}
		if ready == b.Nodes {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d nodes are ready: %w", ready, b.Nodes, ctx.Err())
		case <-time.After(time.Second):
		}
	}
}

func (b *bench) makePlugins(config *rest.Config) error {
	facts, err := template.Machine{Model: b.Model, Count: b.GPUs}.Facts()
	if err != nil {
		return err
	}
	b.driver.Load(driverBefore)
	for i := range b.Nodes {
		b.nodes = append(b.nodes, &Node{
			Name: nodeName(i), Facts: factsOf(facts, i), Driver: &b.driver, Dir: filepath.Join(b.Dir, strconv.Itoa(i)),
			Config: config, PolicyFile: filepath.Join(b.Dir, "policy"),
		})
	}
	return b.setPolicy(10)
}

// setPolicy replaces the policy that all plugins read.
func (b *bench) setPolicy(clients int) error {
	next := filepath.Join(b.Dir, "policy.new")
	if err := os.WriteFile(next, fmt.Appendf(nil, policyText, clients), 0o600); err != nil {
		return err
	}
	return os.Rename(next, filepath.Join(b.Dir, "policy"))
}

// roll starts all plugins, which run for as long as the whole bench, or starts them again. It goes
// on with another when one has asked so many questions of a kind, so that no more than a tenth are
// at it, as in a rollout of the chart's DaemonSets (maxSurge: 10%).
func (b *bench) roll(whole context.Context, spread time.Duration, kind string, each int) error {
	before, surge := b.traffic.Counts().asked(kind), max(1, len(b.nodes)/10)
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for i, n := range b.nodes {
		for i-(b.traffic.Counts().asked(kind)-before)/each >= surge {
			select {
			case <-whole.Done():
				return fmt.Errorf("start plugin %d of %d: %w", i, len(b.nodes), whole.Err())
			case <-ticker.C:
			}
		}
		if err := n.Stop(); err != nil {
			return err
		}
		n.Spread = spread
		if err := n.Start(whole); err != nil {
			return err
		}
	}
	return nil
}

// stopAll stops those that run, also once ctx has ended.
func (b *bench) stopAll(ctx context.Context) error {
	return forEach(context.WithoutCancel(ctx), len(b.nodes), func(_ context.Context, i int) error { return b.nodes[i].Stop() })
}

// phases are what happens. whole is the context of the bench.
func (b *bench) phases(whole context.Context) []Phase {
	published, tainted, upgraded := b.version(driverBefore, false), b.version(driverBefore, true), b.version(driverAfter, false)
	checked := func(right func(*resourceapi.Device) error) func(context.Context) error {
		return func(ctx context.Context) error { return check(ctx, b.client, b.Nodes, b.GPUs, right) }
	}
	gpus := b.Nodes * b.GPUs
	const create, try, update = "create resourceslices", "try to create resourceslices", "update resourceslices"
	return []Phase{
		{"all plugins start, no slices yet", func(context.Context) error { return b.roll(whole, b.Spread, create, b.GPUs+1) },
			create, gpus + b.Nodes, checked(published)},
		{fmt.Sprintf("the policy changes, policySpread: %s", b.Spread), func(context.Context) error { return b.setPolicy(11) },
			update, gpus, checked(published)},
		{"the NVIDIA driver is unloaded on all nodes", func(context.Context) error { b.driver.Unload(); return nil },
			update, gpus, checked(tainted)},
		{"another NVIDIA driver is loaded", func(context.Context) error { b.driver.Load(driverAfter); return nil },
			update, gpus, checked(upgraded)},
		{fmt.Sprintf("a thermal storm: for %s all GPUs throttle, 70 s and 70 s not", b.Storm), b.storm, update, 0, checked(upgraded)},
		{"all plugins restart", func(context.Context) error { return b.roll(whole, 0, try, questions) },
			try, questions * b.Nodes, checked(upgraded)},
		{"the policy changes, policySpread: 0s", func(context.Context) error { return b.setPolicy(12) },
			update, gpus, checked(upgraded)},
	}
}

// storm keeps all GPUs at their thermal limit for some time.
func (b *bench) storm(ctx context.Context) error {
	b.driver.SetStorm(true)
	defer b.driver.SetStorm(false)
	select {
	case <-time.After(b.Storm):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// version is how a device should be.
func (b *bench) version(of string, tainted bool) func(d *resourceapi.Device) error {
	const attribute = "driverVersion"
	return func(d *resourceapi.Device) error {
		v, has := d.Attributes[attribute]
		if has && (v.VersionValue == nil || *v.VersionValue != of) {
			return fmt.Errorf("%s is %v, want %s", attribute, v, of)
		}
		unresponsive := false
		for _, t := range d.Taints {
			unresponsive = unresponsive || t.Key == driverName+"/unresponsive"
		}
		if kind := d.Attributes["type"].StringValue; unresponsive != tainted && (kind == nil || *kind != "observer") {
			return fmt.Errorf("its taints are %v", d.Taints)
		}
		return nil
	}
}
