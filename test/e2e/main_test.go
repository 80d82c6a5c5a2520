//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package e2e runs real pods on a real Kubernetes with simulated GPUs, the
// driver having been installed by helm. It runs on the node itself (inside
// the local cluster's namespaces), because it also looks at what the driver
// leaves on the host.
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
	demoImage       = "partage.dev/demo:dev"
	machineRoot     = "/run/gpusim"
	cdiDir          = "/var/run/cdi"
	journalDir      = "/var/lib/kubelet/plugins/gpu.nvidia.com/claims"
	mpsDir          = "/run/partage/mps"

	// Values of the label app.kubernetes.io/component.
	pluginComponent     = "gpu-kubelet-plugin"
	supervisorComponent = "mps-supervisor"

	// podTimeout bounds one wait. The kubelet retries a failed Prepare only
	// after 60 to 90 s, so anything that needs a retry fails here.
	podTimeout = 50 * time.Second
)

// Set once by TestMain, read only afterwards.
var (
	restConfig *rest.Config
	client     kubernetes.Interface
	repoRoot   string
	// migAtStart are the GPUs, by PCI address, that were in MIG mode before.
	migAtStart = map[string]bool{}
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
	machine, err := readMachine(context.Background())
	if err != nil {
		return 0, err
	}
	for _, g := range machine.GPUs {
		migAtStart[g.PCIAddress] = g.MIG != nil && g.MIG.Enabled
	}
	return m.Run(), nil
}

// findRepo walks up to go.mod, so that the compiled test binary works from
// any folder of the repository.
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
