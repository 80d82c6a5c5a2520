// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v3"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/memorylimit"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/claim/spec"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/plugin"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/nodelabels"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/driver/usage"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/util/version"
)

// driverName is how claims and device classes refer to this driver. It is also the
// domain of the attributes.
const driverName = "gpu.nvidia.com"

// serve runs the driver until ctx ends.
func serve(ctx context.Context, c *config, cmd *cli.Command) error {
	if err := c.validate(); err != nil {
		return err
	}
	if err := c.process.SetUpLogging(); err != nil {
		return err
	}
	clients, err := c.kubeClients()
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting", append([]any{"version", version.Get()}, command.InEffect(cmd)...)...)
	hooks, err := c.installHooks()
	if err != nil {
		return err
	}
	defer hooks.Close()
	return c.run(ctx, clients, hooks)
}

// kubeClients are for what pods wait for, for what can wait, for events, for the status of claims, and for the metadata of objects.
// Each has a budget of its own.
type kubeClients struct {
	main, background, nodeEvents, userEvents, status kubernetes.Interface
	metadata                                         metadata.Interface
}

func (c *config) kubeClients() (*kubeClients, error) {
	config, err := c.restConfig()
	if err != nil {
		return nil, fmt.Errorf("find the API server: give --kubeconfig (KUBECONFIG), or run as a pod: %w", err)
	}
	config.QPS, config.Burst = float32(c.qps), c.burst
	config.UserAgent = name + "/" + version.Get().Version
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	k := &kubeClients{}
	for _, one := range []struct {
		client *kubernetes.Interface
		config *rest.Config
		what   string
	}{
		{&k.main, config, "what pods wait for"},
		{&k.background, plugin.BackgroundConfig(config), "what can wait"},
		{&k.nodeEvents, plugin.BackgroundConfig(config), "events of the node"}, // which do not wait for what pods cause
		{&k.userEvents, plugin.BackgroundConfig(config), "events of claims and pods"},
		{&k.status, plugin.StatusConfig(config), "the status of claims"},
	} {
		if *one.client, err = kubernetes.NewForConfig(one.config); err != nil {
			return nil, fmt.Errorf("make a client of %s for %s: %w", one.what, config.Host, err)
		}
	}
	if !c.claimStatus {
		k.status = nil // it is not to be written
	}
	if k.metadata, err = metadata.NewForConfig(config); err != nil {
		return nil, fmt.Errorf("make a client of metadata for %s: %w", config.Host, err)
	}
	return k, nil
}

// restConfig is that of the kubeconfig, or of the pod's service account.
func (c *config) restConfig() (*rest.Config, error) {
	if c.kubeconfig == "" {
		return rest.InClusterConfig()
	}
	return clientcmd.BuildConfigFromFlags("", c.kubeconfig)
}

// run wires everything and runs until ctx ends.
func (c *config) run(ctx context.Context, clients *kubeClients, hooks *hookPrograms) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Everything that may never return is in these queues.
	calls := call.New(c.callLimit)
	roots, dataDir := c.roots(), c.dataDir()
	roots.Calls = calls
	// It is not closed, which would wait for the calls that wait for events: the session ends
	// with the process.
	gpus := nvml.New(nvml.Options{Roots: roots, Calls: calls, Observe: timeNVML})
	specs, err := cdi.New(cdi.Options{Root: c.cdiRoot, Roots: roots, HookPath: hooks.nvidia, Calls: calls})
	if err != nil {
		return fmt.Errorf("set up CDI specs in %s: %w", c.cdiRoot, err)
	}
	hooks.RemoveUnused(ctx, specs.HookPrograms)
	supervisor, err := mps.NewClient(filepath.Join(c.mpsDir, mps.SocketName))
	if err != nil {
		return err
	}
	cluster := plugin.NewCluster(clients.background)
	facts := usage.NewFacts(driverName, cluster)
	holders := &holder.Finder{Roots: roots}
	recorder := events.New(ctx, driverName, c.nodeName, clients.nodeEvents, clients.userEvents)
	names := &holder.PodNames{Roots: roots}
	foreign := &unclaimed.Finder{Driver: driverName, Pool: c.nodeName, Socket: c.podResources, PodName: c.podName, Named: cluster.Named}
	memoryLimits, err := c.limitMemory(ctx, roots, gpus)
	if err != nil {
		return err
	}
	claims, err := c.newClaims(claim.Options{
		Specs:      spec.Specs{CDI: specs, Hook: hooks.limits, Sockets: memoryLimits, Interposer: c.interposer},
		Roots:      roots,
		Pods:       c.pods(names),
		Partitions: partition.New(gpus, holders),
		Sharing:    sharing.New(sharing.Options{Roots: roots, Modes: gpus, Supervisor: supervisor, Calls: calls}),
		Calls:      calls,
		Cluster:    facts,
		Users:      c.users(ctx, holders, gpus.Processes, supervisor.List),
		Events:     recorder,
	})
	if err != nil {
		return err
	}
	holders.PodName = names.Name
	observed, ended := c.serveMetrics(ctx, usage.Options{Claims: claims, GPUs: gpus, Sessions: supervisor, Facts: facts, Warn: recorder.Warn}, recorder.Failures)
	defer ended()
	defer cancel()
	listener, err := c.process.ListenHealth(ctx)
	if err != nil {
		return err
	}
	boot, err := roots.BootID()
	fileContext, contextErr := roots.FileContext(c.seLinux)
	if err = errors.Join(err, contextErr); err != nil {
		return err
	}
	return plugin.New(plugin.Options{
		DriverName:     driverName,
		NodeName:       c.nodeName,
		KubeClient:     clients.main,
		MetadataClient: clients.metadata,
		Claims:         rememberingClaims{claims, facts},
		Hardware:       &hardware{Client: gpus, specs: specs, roots: roots, memoryLimits: c.memoryLimits},
		Policy:         plugin.NewPolicyFile(c.policyFile, c.policySpread),
		Limited:        c.interposer != "",
		DataDir:        dataDir,
		RegistrarDir:   c.registrarDir,
		BootID:         boot,
		PollInterval:   c.pollInterval,
		PodUID:         types.UID(c.podUID),
		StatusClient:   clients.status,
		DeviceMetadata: c.deviceMetadata,
		NodeLabels:     nodelabels.Mode(c.nodeLabels),
		LabelClient:    clients.background,
		CDIDir:         c.cdiRoot,
		FileContext:    fileContext,
		Events:         recorder.Tell,
		Health:         gpus,
		Metrics:        observed,
		Runtime:        c.runtimeCheck(roots, "/proc", os.Getppid()),
		ForeignClaims:  foreign.Find,
		HealthListener: listener,
	}).Run(ctx)
}

// limitMemory has the driver limit containers for the hook, which finds it in a folder.
func (c *config) limitMemory(ctx context.Context, roots host.Roots, gpus *nvml.Client) (folder string, err error) {
	server := memorylimit.Server{Folder: filepath.Join(c.dataDir(), "memory-limits"), Cgroup: roots.Cgroup, Limit: gpus.LimitMemory}
	if err := server.Start(ctx); err != nil {
		return "", fmt.Errorf("wait for containers whose memory the driver limits: %w", err)
	}
	return server.Folder, nil
}

// pods finds those that may have what a claim had.
func (c *config) pods(names *holder.PodNames) func(context.Context, claim.Ref) (string, error) {
	pods := unclaimed.Pods{Socket: c.podResources, PodName: c.podName, Proc: "/proc", Named: names.Name}
	return func(ctx context.Context, of claim.Ref) (string, error) { return pods.With(ctx, of.Namespace, of.Name) }
}

// newClaims adds to the options what flags say.
func (c *config) newClaims(o claim.Options) (*claim.Manager, error) {
	o.DriverName, o.PoolName, o.DataDir = driverName, c.nodeName, c.dataDir()
	o.SELinuxContext = c.seLinux
	o.OrphanGrace, o.CheckInterval = c.orphanGrace, c.claimCheckInterval
	claims, err := claim.NewManager(o)
	if err != nil {
		return nil, fmt.Errorf("set up claims in %s: %w", o.DataDir, err)
	}
	return claims, nil
}

// dataDir is the plugin's folder among those of the kubelet's plugins.
func (c *config) dataDir() string { return filepath.Join(c.pluginsDir, driverName) }
