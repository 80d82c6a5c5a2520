// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package app is the command line of the cluster program.
package app

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"

	"github.com/urfave/cli/v3"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/boot"
	"github.com/partage-dev/partage/test/cluster/internal/cluster"
	"github.com/partage-dev/partage/test/cluster/internal/image"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/progress"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/toolchain"
)

const (
	repoFlag    = "repo"
	nameFlag    = "name"
	machineFlag = "machine"
	nameOfNode  = "node-name"
	nodesFlag   = "nodes"
	nodeFlag    = "node"
	networkFlag = "network-only"
	graceFlag   = "node-grace-period"
	gatesFlag   = "feature-gates"
	runtimeFlag = "runtime-config"
	syncFlag    = "sync-frequency"
	kubeFlag    = "kubernetes"
	kubeletFlag = "kubelet"
)

// New returns the program.
func New() *cli.Command {
	return &cli.Command{
		Name:  "cluster",
		Usage: "a real Kubernetes on this machine, its nodes in namespaces of their own",
		Flags: []cli.Flag{
			&cli.StringFlag{
				Name: repoFlag, Usage: "checkout of the repository (default: the one that holds this program or the working folder)",
				Sources: cli.EnvVars("PARTAGE_REPO"),
			},
			&cli.StringFlag{Name: nameFlag, Usage: "name of the cluster", Value: layout.DefaultName, Sources: cli.EnvVars("PARTAGE_CLUSTER")},
		},
		Commands: []*cli.Command{
			buildCommand(), imagesCommand(), imageCommand(), upCommand(), downCommand(), statusCommand(), runCommand(), loadCommand(), logsCommand(),
			powerCommand(boot.Off, "cut a node's power: programs and containers end at once, /run, GPU instances and device numbers are lost; "+
				"disks and the control plane are not"),
			powerCommand(boot.On, "start a node whose power was cut"),
			powerCommand(boot.Reboot, "power-off and power-on; works inside the node, too"),
			gateCommand(), initCommand(),
		},
		ExitErrHandler: func(context.Context, *cli.Command, error) {}, // main decides
	}
}

func repo(cmd *cli.Command) (layout.Repo, error) {
	if dir := cmd.String(repoFlag); dir != "" {
		return layout.Find(dir)
	}
	var from []string
	if self, err := os.Executable(); err == nil {
		from = append(from, self)
	}
	if dir, err := os.Getwd(); err == nil {
		from = append(from, dir)
	}
	return layout.Find(from...)
}

func named(cmd *cli.Command) (layout.Cluster, error) {
	r, err := repo(cmd)
	if err != nil {
		return layout.Cluster{}, err
	}
	return r.Cluster(cmd.String(nameFlag))
}

// interruptible ends ctx at the first signal; a second one ends the program at once.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := signal.NotifyContext(ctx, os.Interrupt, unix.SIGTERM, unix.SIGHUP)
	context.AfterFunc(ctx, cancel)
	return ctx, cancel
}

func buildCommand() *cli.Command {
	return &cli.Command{
		Name:      "build",
		Usage:     "build Kubernetes, etcd, containerd, runc, network plugins and helm, as far as they are out of date",
		ArgsUsage: "[PART ...]",
		Flags: []cli.Flag{
			&cli.IntFlag{Name: "parallel", Usage: "programs and packages built at once (default: one per processor)"},
			kubernetesFlag(),
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			ctx, cancel := interruptible(ctx)
			defer cancel()
			r, err := repo(cmd)
			if err != nil {
				return err
			}
			kubernetes, err := toolchain.Kubernetes(r, cmd.String(kubeFlag))
			if err != nil {
				return err
			}
			p := progress.New(os.Stdout)
			b := toolchain.Builder{Repo: r, Progress: p, Parallel: cmd.Int("parallel"), Only: cmd.Args().Slice(), Kubernetes: []string{kubernetes}}
			if err := b.Build(ctx); err != nil {
				return err
			}
			p.Printf("the cluster's programs are up to date in %s", r.Bin())
			return nil
		},
	}
}

func kubernetesFlag() cli.Flag {
	return &cli.StringFlag{
		Name: kubeFlag, Usage: "version of Kubernetes, as 1.36 or 1.36.1 (default: the one that test/cluster/go.mod pins)",
	}
}

func imagesCommand() *cli.Command {
	return &cli.Command{
		Name:  "images",
		Usage: "build the pause, demo and driver images from bin/ into _output/cluster/images",
		Action: func(_ context.Context, cmd *cli.Command) error {
			r, err := repo(cmd)
			if err != nil {
				return err
			}
			return cluster.BuildImages(r, progress.New(os.Stdout), false)
		},
	}
}

func imageCommand() *cli.Command {
	return &cli.Command{
		Name:      "image",
		Usage:     "build one image of files of this machine",
		ArgsUsage: "SRC:DST[:MODE] | dir:DST[:MODE] | link=TARGET:DST ...",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "ref", Usage: "name of the image, host/name:tag", Required: true},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "archive to write", Required: true},
			&cli.StringSliceFlag{Name: "entrypoint", Usage: "program and arguments that containers start with"},
			&cli.StringSliceFlag{Name: "env", Usage: "NAME=VALUE of the environment"},
			&cli.StringFlag{Name: "user", Usage: "user that containers run as"},
			&cli.BoolFlag{Name: "closure", Usage: "add the shared libraries that the files need"},
		},
		Action: func(_ context.Context, cmd *cli.Command) error {
			args := cmd.Args().Slice()
			if len(args) == 0 {
				return errors.New("image: no files given")
			}
			l := image.NewLayer()
			for _, arg := range args {
				l.Spec(arg)
			}
			if cmd.Bool("closure") {
				l.Closures(image.Resolver{}, args)
			}
			i := image.Image{
				Ref: cmd.String("ref"), Entrypoint: cmd.StringSlice("entrypoint"), Env: cmd.StringSlice("env"), User: cmd.String("user"), Layer: l,
			}
			return i.Write(cmd.String("output"))
		},
	}
}

func upCommand() *cli.Command {
	return &cli.Command{
		Name:  "up",
		Usage: "build what is missing and start the cluster; Ctrl-C ends all that was started",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: machineFlag, Usage: "simulated machine that the node is (gpusim machines lists them; default: no GPUs)"},
			&cli.StringFlag{Name: nameOfNode, Usage: "name of the node", Value: "n1"},
			&cli.StringFlag{Name: nodesFlag, Usage: "several nodes, as NAME=MACHINE,NAME=MACHINE or without =MACHINE; instead of the two above"},
			kubernetesFlag(),
			&cli.StringFlag{Name: kubeletFlag, Usage: "version of the kubelets, as 1.35, if it is to be older than the control plane"},
			&cli.StringFlag{Name: gatesFlag, Usage: "Kubernetes feature gates for all components, as NAME=true,NAME=false"},
			&cli.StringFlag{Name: runtimeFlag, Usage: "API versions to turn on or off, as the API server's flag of that name"},
			&cli.StringFlag{Name: syncFlag, Usage: "how often the kubelet syncs a pod, and so retries a failed Prepare (default: the kubelet's, 1m)"},
			&cli.StringFlag{Name: graceFlag, Usage: "how long a node may be silent before it is lost (default: the controller manager's, 50s)"},
		},
		Action: func(ctx context.Context, cmd *cli.Command) error {
			ctx, cancel := interruptible(ctx)
			defer cancel()
			c, err := named(cmd)
			if err != nil {
				return err
			}
			nodes, err := nodes(cmd)
			if err != nil {
				return err
			}
			kubernetes, err := toolchain.Kubernetes(c.Repo, cmd.String(kubeFlag))
			if err != nil {
				return err
			}
			kubelet, err := toolchain.Kubernetes(c.Repo, cmd.String(kubeletFlag))
			if err != nil {
				return err
			}
			options := cluster.Options{
				Nodes: nodes, Kubernetes: kubernetes, Kubelet: kubelet, FeatureGates: cmd.String(gatesFlag), RuntimeConfig: cmd.String(runtimeFlag),
				SyncFrequency: cmd.String(syncFlag), NodeGrace: cmd.String(graceFlag),
			}
			return cluster.Upper{Cluster: c, Options: options, Progress: progress.New(os.Stdout)}.Up(ctx)
		},
	}
}

// nodes are those of the flags.
func nodes(cmd *cli.Command) ([]cluster.Node, error) {
	if !cmd.IsSet(nodesFlag) {
		one, err := cluster.ParseNodes(cmd.String(nameOfNode))
		if err != nil {
			return nil, err
		}
		one[0].Machine = cmd.String(machineFlag)
		return one[:1], nil
	}
	for _, flag := range []string{machineFlag, nameOfNode} {
		if cmd.IsSet(flag) {
			return nil, fmt.Errorf("--%s and --%s exclude each other: say --%s NAME=MACHINE,…", nodesFlag, flag, nodesFlag)
		}
	}
	return cluster.ParseNodes(cmd.String(nodesFlag))
}

func downCommand() *cli.Command {
	return &cli.Command{
		Name:  "down",
		Usage: "end the cluster and remove all it made on the machine; also after a run that was killed",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			c, err := named(cmd)
			if err != nil {
				return err
			}
			p := progress.New(os.Stdout)
			found, err := cluster.Down(ctx, c)
			if err != nil {
				return err
			}
			if found {
				p.Printf("cluster %s is down; its logs stay in %s", c.Name, c.Logs())
			} else {
				p.Printf("cluster %s is not up", c.Name)
			}
			return nil
		},
	}
}

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:  "status",
		Usage: "show what runs, its versions and where its files are",
		Action: func(ctx context.Context, cmd *cli.Command) error {
			c, err := named(cmd)
			if err != nil {
				return err
			}
			return cluster.Status(ctx, c, os.Stdout)
		},
	}
}

func gateCommand() *cli.Command {
	return &cli.Command{
		Name: cluster.GateCommand, Hidden: true,
		Action: func(_ context.Context, cmd *cli.Command) error {
			return sandbox.Gate(append([]string{cluster.InitCommand}, cmd.Args().Slice()...))
		},
	}
}

func initCommand() *cli.Command {
	return &cli.Command{
		Name: cluster.InitCommand, Hidden: true,
		Action: func(_ context.Context, cmd *cli.Command) error {
			return boot.Init(cmd.Args().Get(0), cmd.Args().Get(1)) //nolint:contextcheck // it lives as long as the node, not as this command
		},
	}
}
