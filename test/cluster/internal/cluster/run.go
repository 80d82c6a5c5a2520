// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/partage-dev/partage/test/cluster/internal/boot"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/node"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/service"
	"github.com/partage-dev/partage/test/cluster/internal/toolchain"
)

// first returns the first process of a node that runs; without a name, of the cluster's first node.
func first(c layout.Cluster, node string) (Process, error) {
	if err := root(); err != nil {
		return Process{}, err
	}
	state, err := Load(c)
	if err != nil {
		return Process{}, err
	}
	if state == nil {
		return Process{}, fmt.Errorf("cluster %s is not up: run cluster up", c.Name)
	}
	name, process, err := state.first(node)
	switch {
	case err != nil:
		return Process{}, fmt.Errorf("cluster %s: %w", c.Name, err)
	case !process.Alive():
		return Process{}, fmt.Errorf("node %s of cluster %s has ended; see %s, then run cluster down and up", name, c.Name, c.Node(name).Logs())
	}
	return process, nil
}

// Where says where a command runs.
type Where struct {
	Node string // its name; empty: the first
	// NetworkOnly: with the machine's files and processes, and only the network of the node.
	NetworkOnly bool
}

// Run runs a command with the caller's stdin, stdout and stderr. A status other than 0 is a sandbox.ExitStatus.
func Run(ctx context.Context, c layout.Cluster, where Where, args []string) error {
	cmd, err := command(c, args)
	if err != nil {
		return err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return enter(ctx, c, where, cmd)
}

func enter(ctx context.Context, c layout.Cluster, where Where, cmd *exec.Cmd) error {
	process, err := first(c, where.Node)
	if err != nil {
		return err
	}
	namespaces := sandbox.All
	if where.NetworkOnly {
		namespaces = sandbox.NetworkOnly
	}
	return sandbox.Run(ctx, process.PID, namespaces, cmd)
}

// command has the tools of the cluster and the project's own programs, as kubectl's plugin, before the caller's in PATH. Tools keep their caches with the cluster, so that nothing is
// left in the home folder.
func command(c layout.Cluster, args []string) (*exec.Cmd, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, fmt.Errorf("find the working folder: %w", err)
	}
	helm := filepath.Join(c.Run(), "helm")
	cmd := &exec.Cmd{Args: args, Dir: dir}
	cmd.Env = append(os.Environ(),
		"PATH="+c.Bin()+":"+c.Products()+":"+os.Getenv("PATH"), "KUBECONFIG="+c.Kubeconfig(), "KUBECACHEDIR="+filepath.Join(c.Run(), "kubectl"),
		"HELM_CACHE_HOME="+filepath.Join(helm, "cache"), "HELM_CONFIG_HOME="+filepath.Join(helm, "config"),
		"HELM_DATA_HOME="+filepath.Join(helm, "data"),
		"PARTAGE_CLUSTER="+c.Name, "CONTAINERD_ADDRESS="+node.Socket, "CONTAINERD_NAMESPACE=k8s.io",
	)
	return cmd, nil
}

// Power turns a node off or on, the first if none is named. After boot.On and boot.Reboot its kubelet has been started. It may be
// called inside a node, for this node.
func Power(ctx context.Context, c layout.Cluster, node string, turn boot.Turn) error {
	if _, err := os.Stat(boot.Switch); err == nil {
		own, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("find the name of this node: %w", err)
		}
		if node != "" && node != own {
			return fmt.Errorf("%s of node %s: this is inside node %s, which reaches only its own power; run it on the machine", turn, node, own)
		}
		return boot.Power(ctx, turn)
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	return Run(ctx, c, Where{Node: node}, []string{self, "--repo", c.Root, "--name", c.Name, string(turn)})
}

// LoadImage imports an image archive into a node, or into all when none is named.
func LoadImage(ctx context.Context, c layout.Cluster, name, archive string) error {
	path, err := filepath.Abs(archive)
	if err != nil {
		return fmt.Errorf("load image %s: %w", archive, err)
	}
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("load image: %w", err)
	}
	nodes := []string{name}
	if state, err := Load(c); name == "" && err == nil && state != nil {
		nodes = nil
		for _, n := range state.Options.Nodes {
			nodes = append(nodes, n.Name)
		}
	}
	for _, n := range nodes {
		if err := Run(ctx, c, Where{Node: n}, node.ImportArgs(path)); err != nil {
			return fmt.Errorf("load image %s: %w", archive, err)
		}
	}
	return nil
}

// Status prints what runs.
func Status(ctx context.Context, c layout.Cluster, out io.Writer) error {
	state, err := Load(c)
	if err != nil {
		return err
	}
	if state == nil {
		_, err := fmt.Fprintf(out, "cluster %s is not up\n", c.Name)
		return err
	}
	phase := string(state.Phase)
	if !state.Alive() {
		phase = "ended by itself or was killed; run cluster down"
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(k, format string, args ...any) {
		_, _ = fmt.Fprintf(w, "%s\t%s\n", k, fmt.Sprintf(format, args...))
	}
	row("cluster", "%s, %s", c.Name, phase)
	row("since", "%s (%s)", state.Since.Format(time.DateTime), time.Since(state.Since).Round(time.Second))
	row("options", "%s", state.Options)
	row("kubeconfig", "%s (cluster run -- kubectl …)", c.Kubeconfig())
	row("logs", "%s", c.Logs())
	versions, err := toolchain.Versions(c.Repo)
	if err != nil {
		return err
	}
	for _, part := range toolchain.Components {
		row(part.Name, "%s", state.Options.version(part.Name, versions[part.Module]))
	}
	for i, n := range state.Options.Nodes {
		own := c.Node(n.Name)
		row("node "+n.Name, "first process %d, files in %s", state.First[i].PID, own.Run())
		for _, s := range services(own) {
			row("  "+s.Name, "%s", describe(s))
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("print status: %w", err)
	}
	if asRoot := root() == nil; !asRoot || state.Phase != Up || !state.Alive() {
		return nil
	}
	cmd, err := command(c, []string{"kubectl", "get", "nodes"})
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = out, out
	return enter(ctx, c, Where{}, cmd)
}

func services(n layout.Node) []service.Status {
	var all []service.Status
	if b, err := os.ReadFile(n.Services()); err == nil {
		_ = json.Unmarshal(b, &all) // informs only
	}
	return all
}

func describe(s service.Status) string {
	now := fmt.Sprintf("pid %d, %s", s.PID, time.Since(s.Since).Round(time.Second))
	if s.PID == 0 {
		now = "not running"
	}
	if s.LastExit != "" {
		now += fmt.Sprintf(", started again %d times, last %s", s.Restarts, s.LastExit)
	}
	return now
}
