// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/driver/plugin"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/node/process"
)

// runtimeCheck finds out whether containers without a claim can have the GPUs of this
// machine, if it has any. The starter is the process that started this container.
func (c *config) runtimeCheck(roots host.Roots, proc string, starter int) plugin.RuntimeCheck {
	return func(handlers []string) (unclaimed.Access, error) {
		if gpus, err := roots.NVIDIAGPUs(); err == nil && len(gpus) == 0 {
			return unclaimed.Access{}, nil
		}
		from := unclaimed.Starter{Proc: proc, PID: starter}
		if c.annotationNamespaces != "" {
			from.Trusted = strings.Split(c.annotationNamespaces, ",")
		}
		return from.Access(handlers)
	}
}

func doctorCommand(c *config, stdout io.Writer) *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "say whether containers without a claim can have this node's GPUs, and fail if they can; for kubectl exec in the plugin's pod",
		Action: command.NoArguments(func(ctx context.Context, _ *cli.Command) error {
			return examine(ctx, c, "/proc", c.starter(ctx, os.Getppid()), stdout)
		}),
	}
}

// starter returns the process that started this container: the parent of the plugin, which
// serves on the health socket. The own parent may be a runtime that waits for what kubectl
// exec runs, as with CRI-O; it is the answer where no plugin serves.
func (c *config) starter(ctx context.Context, parent int) int {
	plugin, err := process.Peer(ctx, c.process.HealthSocket)
	if err != nil {
		return parent
	}
	starter, err := process.Parent(plugin)
	if err != nil {
		return parent
	}
	return starter
}

// errExposed follows what was found.
var errExposed = errors.New("containers can have GPUs without a claim")

func examine(ctx context.Context, c *config, proc string, parent int, out io.Writer) error {
	node, err := c.node(ctx)
	if err := errors.Join(c.validateRoots(), err); err != nil {
		return err
	}
	handlers := unclaimed.Handlers(node)
	access, err := c.runtimeCheck(c.roots(), proc, parent)(handlers)
	if err != nil {
		return err
	}
	runtime := access.Runtime
	if runtime == "" {
		runtime = "not looked for: there are no NVIDIA GPUs"
	}
	_, err = fmt.Fprintf(out, "container runtime: %s\nhandlers for RuntimeClasses: %s\n%s.\n", runtime, strings.Join(handlers, " "), access.Text())
	if err == nil && access.Open() {
		err = errExposed
	}
	return err
}

// node reads the Node object. It needs the rights of the plugin's pod.
func (c *config) node(ctx context.Context) (*corev1.Node, error) {
	if err := errors.Join(c.validateNodeName(), c.validateClient()); err != nil {
		return nil, err
	}
	clients, err := c.kubeClients()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	node, err := clients.main.CoreV1().Nodes().Get(ctx, c.nodeName, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", c.nodeName, err)
	}
	return node, nil
}
