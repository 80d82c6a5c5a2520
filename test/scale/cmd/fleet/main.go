// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command fleet measures what the driver costs the control plane of a large cluster. It is run
// by test/scale/fleet/run, beside the control plane.
package main

import (
	"context"
	"errors"
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

// logTo has everything logged to a file, errors too.
func logTo(file *os.File) error {
	var flags flag.FlagSet
	klog.InitFlags(&flags)
	if err := flags.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"}); err != nil {
		return err
	}
	klog.SetOutput(file)
	return nil
}

func run() (err error) {
	o := fleet.Options{Kubeconfig: os.Getenv("KUBECONFIG"), Progress: os.Stderr}
	flag.IntVar(&o.Nodes, "nodes", 200, "how many nodes there are")
	flag.IntVar(&o.GPUs, "gpus", 8, "how many GPUs a node has")
	flag.StringVar(&o.Model, "model", "h100-80-sxm", "the model of the GPUs")
	flag.DurationVar(&o.Spread, "spread", 2*time.Minute, "as kubeletPlugin.policySpread of the chart")
	flag.DurationVar(&o.Storm, "storm", 15*time.Minute, "how long all GPUs are at their thermal limit")
	log := flag.String("log", os.DevNull, "file for what the plugins log")
	flag.Parse()

	file, err := os.Create(*log)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if err := logTo(file); err != nil {
		return err
	}
	defer klog.Flush()

	if o.Dir, err = os.MkdirTemp("", "fleet"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(o.Dir) }()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	report, err := fleet.Run(ctx, o)
	return errors.Join(err, report.Write(os.Stdout))
}
