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
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/command"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/plugin"
	"github.com/partage-dev/partage/pkg/sharing"
	"github.com/partage-dev/partage/pkg/version"
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
	client, err := c.kubeClient()
	if err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	logger.Info("Starting", append([]any{"version", version.Get()}, command.InEffect(cmd)...)...)
	for {
		err := c.serveOnce(ctx, client)
		if !errors.Is(err, errRootsMoved) {
			return err
		}
		logger.Info("Starting anew", "reason", err)
	}
}

func (c *config) kubeClient() (kubernetes.Interface, error) {
	// An empty path means the pod's service account.
	rest, err := clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("find the API server: give --kubeconfig (KUBECONFIG), or run as a pod: %w", err)
	}
	rest.QPS, rest.Burst = float32(c.qps), c.burst
	rest.UserAgent = name + "/" + version.Get().Version
	rest.ContentType = runtime.ContentTypeProtobuf
	rest.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(rest)
	if err != nil {
		return nil, fmt.Errorf("make a client for %s: %w", rest.Host, err)
	}
	return client, nil
}

// serveOnce wires everything for the present roots and runs until ctx ends or the
// roots move.
func (c *config) serveOnce(ctx context.Context, client kubernetes.Interface) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	roots := c.roots()
	dataDir := filepath.Join(c.pluginsDir, driverName)
	if err := os.MkdirAll(dataDir, 0o750); err != nil {
		return fmt.Errorf("make the plugin's data directory: %w", err)
	}
	hook := filepath.Join(dataDir, filepath.Base(c.cdiHook))
	mpsHook := filepath.Join(dataDir, "mps-hook")
	if err := errors.Join(installHook(c.cdiHook, hook), installHook(c.supervisor, mpsHook)); err != nil {
		return err
	}
	gpus := nvml.New(nvml.Options{Roots: roots, CallLimit: c.callLimit})
	defer gpus.Close() //nolint:contextcheck // ctx may have ended by then
	specs, err := cdi.New(cdi.Options{Root: c.cdiRoot, Roots: roots, HookPath: hook})
	if err != nil {
		return fmt.Errorf("set up CDI specs in %s: %w", c.cdiRoot, err)
	}
	supervisor, err := mps.NewClient(filepath.Join(c.mpsDir, mps.SocketName))
	if err != nil {
		return err
	}
	defer func() { _ = supervisor.Close() }()
	events := plugin.NewEvents(ctx, client, driverName, c.nodeName)
	claims, err := claim.NewManager(ctx, claim.Options{
		DriverName:  driverName,
		PoolName:    c.nodeName,
		DataDir:     dataDir,
		Roots:       roots,
		Partitions:  partition.New(gpus),
		Sharing:     sharing.New(sharing.Options{Roots: roots, Modes: gpus, Supervisor: supervisor}),
		CDI:         specs,
		Hook:        mpsHook,
		Interposer:  c.interposer,
		Cluster:     plugin.NewCluster(client),
		Events:      events,
		OrphanGrace: c.orphanGrace,
	})
	if err != nil {
		return fmt.Errorf("set up claims in %s: %w", dataDir, err)
	}
	listener, err := c.process.ListenHealth(ctx)
	if err != nil {
		return err
	}
	p, err := plugin.New(plugin.Options{
		DriverName:        driverName,
		NodeName:          c.nodeName,
		KubeClient:        client,
		Claims:            claims,
		Hardware:          &hardware{Client: gpus, specs: specs, config: c, roots: roots},
		Policy:            plugin.NewPolicyFile(c.policyFile),
		Limited:           c.interposer != "",
		DataDir:           dataDir,
		RegistrarDir:      c.registrarDir,
		PollInterval:      c.pollInterval,
		ReconcileInterval: c.reconcileInterval,
		PodUID:            types.UID(c.podUID),
		Events:            events,
		HealthListener:    listener,
	})
	if err != nil {
		return err
	}
	return p.Run(ctx)
}
