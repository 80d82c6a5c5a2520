// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command nic-driver runs package nicdriver as a pod of a node.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/test/nicdriver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := app().Run(ctx, os.Args)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "nic-driver:", err)
		os.Exit(1)
	}
}

func app() *cli.Command {
	return &cli.Command{
		Name:  "nic-driver",
		Usage: "a DRA driver for the network cards on the PCI bus, for demos",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "node-name", Sources: cli.EnvVars("NODE_NAME"), Required: true},
			&cli.StringFlag{Name: "sys-root", Value: "/sys", Usage: "`FOLDER` where sysfs is"},
			&cli.StringFlag{Name: "cdi-dir", Value: "/var/run/cdi"},
			&cli.StringFlag{Name: "kubelet-dir", Value: "/var/lib/kubelet"},
		},
		Action: run,
	}
}

func run(ctx context.Context, c *cli.Command) error {
	devices, err := nicdriver.Discover(c.String("sys-root"))
	if err != nil {
		return err
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return fmt.Errorf("find the API server: %w", err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("make a client for %s: %w", config.Host, err)
	}
	dataDir := filepath.Join(c.String("kubelet-dir"), "plugins", nicdriver.Name)
	if err := os.MkdirAll(dataDir, 0o750); err != nil {
		return fmt.Errorf("make the driver's folder: %w", err)
	}
	driver := &nicdriver.Driver{CDIDir: c.String("cdi-dir")}
	serving := context.WithoutCancel(ctx)
	helper, err := kubeletplugin.Start(serving, driver,
		kubeletplugin.DriverName(nicdriver.Name),
		kubeletplugin.NodeName(c.String("node-name")),
		kubeletplugin.KubeClient(client),
		kubeletplugin.PluginDataDirectoryPath(dataDir),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(c.String("kubelet-dir"), "plugins_registry")),
		kubeletplugin.HealthService(false),
	)
	if err != nil {
		return fmt.Errorf("serve the kubelet: %w", err)
	}
	defer helper.Stop()
	if err := helper.PublishResources(ctx, resources(c.String("node-name"), devices)); err != nil {
		return fmt.Errorf("publish %d network cards: %w", len(devices), err)
	}
	klog.FromContext(ctx).Info("Serving", "networkCards", len(devices))
	<-ctx.Done()
	return unused(serving, driver)
}

func resources(node string, devices []resourceapi.Device) resourceslice.DriverResources {
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
		node: {Slices: []resourceslice.Slice{{Devices: devices}}},
	}}
}

// unused waits until no claim is prepared. The kubelet kills the pod if that takes longer than its grace
// period.
func unused(ctx context.Context, driver *nicdriver.Driver) error {
	const interval = 100 * time.Millisecond
	return wait.PollUntilContextCancel(ctx, interval, true, func(context.Context) (bool, error) {
		prepared, err := driver.Prepared()
		return !prepared, err
	})
}
