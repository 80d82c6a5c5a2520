// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command fleet measures what the driver costs the control plane of a large cluster. It is run
// by test/scale/fleet/run, beside the control plane.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/test/scale/fleet"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() (err error) {
	o := fleet.Options{Kubeconfig: os.Getenv("KUBECONFIG"), Progress: os.Stderr}
	flag.IntVar(&o.Nodes, "nodes", 200, "how many nodes there are")
	flag.IntVar(&o.GPUs, "gpus", 8, "how many GPUs a node has")
	flag.StringVar(&o.Model, "model", "h100-80-sxm", "the model of the GPUs")
	flag.DurationVar(&o.Spread, "spread", 40*time.Second, "as kubeletPlugin.policySpread of the chart")
	log := flag.String("log", os.DevNull, "file for what the plugins log")
	flag.Parse()

	file, err := os.Create(*log)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	klog.LogToStderr(false)
	klog.SetOutput(file)
	defer klog.Flush()

	if o.Dir, err = os.MkdirTemp("", "fleet"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(o.Dir) }()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	report, err := fleet.Run(ctx, o)
	if err != nil {
		return err
	}
	return report.Write(os.Stdout)
}
