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
	"strings"
	"text/tabwriter"
	"time"

	"github.com/partage-dev/partage/test/cluster/internal/boot"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/node"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/service"
	"github.com/partage-dev/partage/test/cluster/internal/toolchain"
)

// up returns the record of a cluster that is up.
func up(c layout.Cluster) (*State, error) {
	if err := root(); err != nil {
		return nil, err
	}
	state, err := Load(c)
	if err != nil {
		return nil, err
	}
	switch {
	case state == nil:
		return nil, fmt.Errorf("cluster %s is not up: run cluster up", c.Name)
	case !state.Alive():
		return nil, fmt.Errorf("cluster %s has ended; see %s, then run cluster down and up", c.Name, c.Logs())
	}
	return state, nil
}

// Run runs a command inside the cluster's node with the caller's stdin, stdout and stderr. A status other than 0 is a
// sandbox.ExitStatus.
func Run(ctx context.Context, c layout.Cluster, args []string) error {
	cmd, err := command(c, args)
	if err != nil {
		return err
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return enter(ctx, c, cmd)
}

func enter(ctx context.Context, c layout.Cluster, cmd *exec.Cmd) error {
	state, err := up(c)
	if err != nil {
		return err
	}
	return sandbox.Run(ctx, state.First, cmd)
}

// command has the tools of the cluster before the caller's in PATH. Tools keep their caches with the cluster, so that nothing is
// left in the home folder.
func command(c layout.Cluster, args []string) (*exec.Cmd, error) {
	dir, err := os.Getwd()
	if err != nil {
		return nil, fmt.Errorf("find the working folder: %w", err)
	}
	helm := filepath.Join(c.Run(), "helm")
	cmd := &exec.Cmd{Args: args, Dir: dir}
	cmd.Env = append(os.Environ(),
		"PATH="+c.Bin()+":"+os.Getenv("PATH"), "KUBECONFIG="+c.Kubeconfig(), "KUBECACHEDIR="+filepath.Join(c.Run(), "kubectl"),
		"HELM_CACHE_HOME="+filepath.Join(helm, "cache"), "HELM_CONFIG_HOME="+filepath.Join(helm, "config"),
		"HELM_DATA_HOME="+filepath.Join(helm, "data"),
		"CONTAINERD_ADDRESS="+node.Socket, "CONTAINERD_NAMESPACE=k8s.io",
	)
	return cmd, nil
}

// Reboot reboots the cluster's node and returns when its kubelet has been started. It may be called inside the node.
func Reboot(ctx context.Context, c layout.Cluster) error {
	if _, err := os.Stat(boot.Switch); err == nil {
		return boot.Reboot(ctx)
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	return Run(ctx, c, []string{self, "--repo", c.Root, "--name", c.Name, "reboot"})
}

// LoadImage imports an image archive into the cluster's node.
func LoadImage(ctx context.Context, c layout.Cluster, archive string) error {
	path, err := filepath.Abs(archive)
	if err != nil {
		return fmt.Errorf("load image %s: %w", archive, err)
	}
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("load image: %w", err)
	}
	if err := Run(ctx, c, node.ImportArgs(path)); err != nil {
		return fmt.Errorf("load image %s: %w", archive, err)
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
	row("node", "%s", state.Options)
	row("kubeconfig", "%s (cluster run -- kubectl …)", c.Kubeconfig())
	row("logs", "%s", c.Logs())
	versions, err := toolchain.Versions(c.Repo)
	if err != nil {
		return err
	}
	for _, part := range toolchain.Components {
		row(part.Name, "%s", versions[part.Module])
	}
	for _, s := range services(c) {
		now := fmt.Sprintf("pid %d, %s", s.PID, time.Since(s.Since).Round(time.Second))
		if s.PID == 0 {
			now = "not running"
		}
		if s.LastExit != "" {
			now += fmt.Sprintf(", started again %d times, last %s", s.Restarts, s.LastExit)
		}
		row("  "+s.Name, "%s", now)
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
	return enter(ctx, c, cmd)
}

func services(c layout.Cluster) []service.Status {
	var all []service.Status
	if b, err := os.ReadFile(c.Services()); err == nil {
		_ = json.Unmarshal(b, &all) // informs only
	}
	return all
}

// Components returns the names of the logs that there are.
func Components(c layout.Cluster) ([]string, error) {
	files, err := filepath.Glob(c.Log("*"))
	if err != nil {
		return nil, fmt.Errorf("list logs: %w", err)
	}
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), ".log")
	}
	return files, nil
}
