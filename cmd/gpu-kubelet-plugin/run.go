// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/urfave/cli/v3"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/plugin"
	"github.com/partage-dev/partage/pkg/version"
)

// driverName is the name that claims and device classes know this driver by. It
// is also the domain of the attributes.
const driverName = "gpu.nvidia.com"

// serve runs the driver until ctx ends.
func serve(ctx context.Context, c *config, cmd *cli.Command) error {
	if err := c.validate(); err != nil {
		return err
	}
	if err := c.setUpLogging(); err != nil {
		return err
	}
	client, err := c.kubeClient()
	if err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	logger.Info("Starting", append([]any{"version", version.Get()}, flagsInEffect(cmd)...)...)
	for {
		err := c.serveOnce(ctx, client)
		if !errors.Is(err, errRootsMoved) {
			return err
		}
		logger.Info("Starting anew", "reason", err)
	}
}

// flagsInEffect lists names and values for the log.
func flagsInEffect(cmd *cli.Command) []any {
	var pairs []any
	for _, flag := range cmd.Flags {
		name := flag.Names()[0]
		if name != "help" {
			pairs = append(pairs, name, cmd.Value(name))
		}
	}
	return pairs
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

// serveOnce wires everything for the roots as they are now.
func (c *config) serveOnce(ctx context.Context, client kubernetes.Interface) error {
	roots := c.roots()
	dataDir := filepath.Join(c.pluginsDir, driverName)
	if err := os.MkdirAll(dataDir, 0o750); err != nil {
		return fmt.Errorf("make the plugin's data directory: %w", err)
	}
	hook := filepath.Join(dataDir, filepath.Base(c.cdiHook))
	if err := installHook(c.cdiHook, hook); err != nil {
		return err
	}
	gpus := nvml.New(nvml.Options{Roots: roots})
	defer gpus.Close()
	specs, err := cdi.New(cdi.Options{Root: c.cdiRoot, Roots: roots, HookPath: hook})
	if err != nil {
		return fmt.Errorf("set up CDI specs in %s: %w", c.cdiRoot, err)
	}
	claims, err := claim.NewManager(claim.Options{
		DriverName: driverName,
		PoolName:   c.nodeName,
		DataDir:    dataDir,
		Roots:      roots,
		Partitions: partition.New(gpus),
		CDI:        specs,
	})
	if err != nil {
		return fmt.Errorf("set up claims in %s: %w", dataDir, err)
	}
	listener, err := c.healthListener(ctx)
	if err != nil {
		return err
	}
	p, err := plugin.New(plugin.Options{
		DriverName:     driverName,
		NodeName:       c.nodeName,
		KubeClient:     client,
		Claims:         claims,
		Hardware:       &hardware{Client: gpus, specs: specs, config: c, roots: roots},
		DataDir:        dataDir,
		RegistrarDir:   c.registrarDir,
		PodUID:         types.UID(c.podUID),
		HealthListener: listener,
	})
	if err != nil {
		return err
	}
	return p.Run(ctx)
}

func (c *config) healthListener(ctx context.Context) (net.Listener, error) {
	if c.healthPort == 0 {
		return nil, nil //nolint:nilnil // off
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", ":"+strconv.Itoa(c.healthPort))
	if err != nil {
		return nil, fmt.Errorf("listen on --health-port (HEALTH_PORT): %w", err)
	}
	return listener, nil
}

// errRootsMoved: everything has to be wired anew for other roots.
var errRootsMoved = fmt.Errorf("the driver's files are elsewhere now (%w)", plugin.ErrStop)

// hardware is the NVML session, and notices when a driver that came later
// changed what the roots are, or needs another process.
type hardware struct {
	*nvml.Client
	specs  *cdi.Specs
	config *config
	roots  host.Roots
}

func (h *hardware) Open(ctx context.Context) error {
	err := h.Client.Open(ctx)
	if now := h.config.roots(); now != h.roots {
		return fmt.Errorf("%w: device root %s", errRootsMoved, now.Dev)
	}
	if errors.Is(err, nvml.ErrRestartRequired) {
		return fmt.Errorf("%w: %w", plugin.ErrStop, err)
	}
	return err
}

// Discover also tells package cdi which libraries belong to the driver.
func (h *hardware) Discover(ctx context.Context) (*gpu.Node, error) {
	node, err := h.Client.Discover(ctx)
	if err == nil {
		h.specs.SetDriverVersion(node.DriverVersion)
	}
	return node, err
}
