// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package flow tests the driver as one process against a simulated machine: the
// real binary, the real NVML bindings, real gRPC sockets, real files. Only the
// kubelet and the API server are played by the test.
package flow

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// update rewrites golden files.
var update = flag.Bool("update", false, "rewrite files of expected values")

// built is what TestMain makes once for all tests.
var built struct {
	plugin     string
	supervisor string
	// client is the stand-in of a program that uses CUDA.
	client string
	hook   string
	assets sysroot.Assets
}

func TestMain(m *testing.M) {
	killpoint.LaunchIfAsked()
	enterContainerIfAsked()
	if root := os.Getenv(factsRootVariable); root != "" {
		os.Exit(printFacts(root))
	}
	flag.Parse()
	code, err := runTests(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "flow:", err)
		code = 1
	}
	os.Exit(code)
}

func runTests(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "partage-flow")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := build(dir); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// build compiles the driver and the simulator from the sources that are tested.
// With Go's build cache that takes a second when nothing has changed.
func build(dir string) error {
	built.plugin = filepath.Join(dir, "gpu-kubelet-plugin")
	built.supervisor = filepath.Join(dir, "mps-supervisor")
	built.client = filepath.Join(dir, "cuda-client")
	built.hook = filepath.Join(dir, "nvidia-cdi-hook")
	built.assets = sysroot.Assets{
		NVML:       filepath.Join(dir, "libnvidia-ml.so"),
		CUDA:       filepath.Join(dir, "libcuda.so"),
		NVIDIASMI:  filepath.Join(dir, "nvidia-smi"),
		MPSControl: filepath.Join(dir, "nvidia-cuda-mps-control"),
		MPSServer:  filepath.Join(dir, "nvidia-cuda-mps-server"),
	}
	// What it does in a container is not for these tests.
	if err := os.WriteFile(built.hook, []byte("#!/bin/sh\n"), 0o755); err != nil {
		return err
	}
	const simulator = "./test/gpusim/cmd/"
	for _, command := range [][]string{
		{"make", "-s", "-C", "test/gpusim/lib", "OUT=" + dir},
		{
			"go", "build", "-o", dir, simulator + "nvidia-smi", simulator + "nvidia-cuda-mps-control",
			simulator + "nvidia-cuda-mps-server", simulator + "cuda-client", "./cmd/gpu-kubelet-plugin",
		},
		// It is a hook in containers as well, which have other C libraries.
		{"env", "CGO_ENABLED=0", "go", "build", "-o", dir, "./cmd/mps-supervisor"},
	} {
		cmd := exec.CommandContext(context.Background(), command[0], command[1:]...)
		cmd.Dir = "../.."
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", command, err, out)
		}
	}
	return nil
}
