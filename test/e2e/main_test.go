//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package e2e runs real pods on a real Kubernetes with simulated GPUs and the driver installed by helm. It runs on the node itself,
// inside the namespaces of the local cluster, because it also checks what the driver leaves on the host.
//
// Most tests reserve GPUs of their own and run in parallel. Tests that disturb the whole node, such as a reboot, are named TestNode…
// and run one after the other, by `make test-cluster` on a cluster of their own. Those of several nodes are named TestFleet… and run
// beside the nodes: on the machine, in the nodes' network.
package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Where the chart's defaults and the local cluster put things.
const (
	driverName      = "gpu.nvidia.com"
	driverNamespace = "partage"
	demoImage       = "partage.invalid/demo:dev"
	machineRoot     = "/run/gpusim"
	cdiDir          = "/var/run/cdi"
	pluginDir       = "/var/lib/kubelet/plugins/gpu.nvidia.com"
	recordsDir      = pluginDir + "/records"
	limitsDir       = pluginDir + "/limits"
	mpsDir          = "/run/partage/mps"

	// Values of the label app.kubernetes.io/component.
	pluginComponent     = "gpu-kubelet-plugin"
	supervisorComponent = "mps-supervisor"

	// waitLimit bounds one wait. Only a wait that would never end reaches it.
	waitLimit = 5 * time.Minute
)

// suite is the one that test/e2e/run runs.
var suite = os.Getenv("PARTAGE_E2E_SUITE")

// fleetSuite is the suite on a cluster of several nodes.
const fleetSuite = "fleet"

// Set once by TestMain, read only afterwards.
var (
	restConfig *rest.Config
	client     kubernetes.Interface
	repoRoot   string
	// migAtStart holds the MIG mode that the GPUs, by PCI address, had before the tests.
	migAtStart = map[string]bool{}
	pool       *gpuPool
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (int, error) {
	var err error
	if repoRoot, err = findRepo(); err != nil {
		return 0, err
	}
	restConfig, err = clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return 0, fmt.Errorf("KUBECONFIG=%q: %w", os.Getenv("KUBECONFIG"), err)
	}
	restConfig.QPS, restConfig.Burst = 200, 400
	if client, err = kubernetes.NewForConfig(restConfig); err != nil {
		return 0, fmt.Errorf("making a client for %s: %w", restConfig.Host, err)
	}
	if suite == fleetSuite || suite == kubectlSuite || suite == migrationSuite {
		return m.Run(), nil
	}
	machine, err := readMachine(context.Background())
	if err != nil {
		return 0, err
	}
	for _, g := range machine.GPUs {
		migAtStart[g.PCIAddress] = g.MIG != nil && g.MIG.Enabled
	}
	pool = newGPUPool(machine.GPUs)
	return m.Run(), nil
}

// findRepo walks up to the root of the repository, so that the compiled test binary works from any folder of it.
func findRepo() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "demo", "run")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("not inside the repository: no demo/run above the working folder")
}
