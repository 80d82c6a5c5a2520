// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/conformance"
)

// conformanceChanges are the flags for the parts that do more than read.
type conformanceChanges struct {
	mps, intrusive bool
	gpu            string
	workDir, probe string
	runtime, image string
}

func (c *conformanceChanges) flags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "mps", Destination: &c.mps, Usage: "also start MPS in a directory of its own, on a GPU that nobody uses; changes no setting of a GPU; adds 5 minutes to --timeout"},
		&cli.BoolFlag{Name: "intrusive", Destination: &c.intrusive, Usage: "also change modes and partitions of the GPU of --gpu, and undo that; for a node that was drained; adds 15 minutes to --timeout, and --limit is a minute at least"},
		&cli.StringFlag{Name: "gpu", Destination: &c.gpu, Usage: "UUID of the GPU for --mps and --intrusive; by default --mps takes the first that nobody uses"},
		&cli.StringFlag{Name: "work-dir", Value: "/tmp/partage-conformance", Destination: &c.workDir, Usage: "directory for the files of --mps, in a tmpfs that only this program sees"},
		&cli.StringFlag{Name: "runtime-endpoint", Destination: &c.runtime, Usage: "socket of the container runtime for --intrusive, such as unix:///run/containerd/containerd.sock; by default it is searched for on the host"},
		&cli.StringFlag{Name: "image", Destination: &c.image, Usage: "image with cuda-probe that is on the node, for --intrusive; by default that of this container"},
		&cli.StringFlag{Name: "cuda-probe", Destination: &c.probe, Usage: "program cuda-probe; by default the one beside this program"},
	}
}

func (c *conformanceChanges) validate() error {
	// MPS makes sockets in it, whose paths have at most 107 bytes.
	const most = 50
	return errors.Join(
		refuse(c.gpu != "" && !c.mps && !c.intrusive, "--gpu is for --mps and --intrusive"),
		refuse(c.intrusive && c.gpu == "", "--intrusive needs --gpu, the UUID of the GPU to change"),
		refuse(c.runtime != "" && !filepath.IsAbs(c.socket()), "--runtime-endpoint is %q: want unix:// and an absolute path", c.runtime),
		refuse(!filepath.IsAbs(c.workDir) || len(c.workDir) > most, "--work-dir is %q: want an absolute path of at most %d bytes", c.workDir, most),
	)
}

// socket is the path of the container runtime's.
func (c *conformanceChanges) socket() string { return strings.TrimPrefix(c.runtime, "unix://") }

// time is how long the parts may take, beyond what the read-only part may.
func (c *conformanceChanges) time() time.Duration {
	var more time.Duration
	if c.mps {
		more += 5 * time.Minute
	}
	if c.intrusive {
		more += 15 * time.Minute
	}
	return more
}

// leastChangeLimit is for what is made and undone within one question: a partition with
// MPS on it.
const leastChangeLimit = time.Minute

// alone keeps other runs away that would do more than read.
func (c *conformanceChanges) alone(dataDir string) (release func(), err error) {
	if !c.mps && !c.intrusive {
		return func() {}, nil
	}
	return conformance.Alone(dataDir)
}

// apply adds the parts to the options. With one of them this process is run again, in a
// mount namespace of its own.
func (c *conformanceChanges) apply(o *conformance.Options) error {
	if !c.mps && !c.intrusive {
		return nil
	}
	if c.probe == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find cuda-probe: %w", err)
		}
		c.probe = filepath.Join(filepath.Dir(self), "cuda-probe")
	}
	if _, err := os.Stat(c.probe); err != nil {
		return fmt.Errorf("--cuda-probe: %w", err)
	}
	if c.mps {
		o.Parts = append(o.Parts, conformance.MPS)
	}
	if c.intrusive {
		o.Parts = append(o.Parts, conformance.Intrusive)
		o.Limit = max(o.Limit, leastChangeLimit)
		o.RuntimeSocket, o.Image = c.socket(), c.image
	}
	o.GPU, o.WorkDir, o.Probe = c.gpu, filepath.Clean(c.workDir), c.probe
	return conformance.Enter(o.WorkDir)
}

// launchCommand is what the programs of MPS are started with.
func launchCommand() *cli.Command {
	return &cli.Command{
		Name:            conformance.LaunchCommand,
		Usage:           "become a program of the driver; for the sub-command conformance",
		Hidden:          true,
		SkipFlagParsing: true,
		Action: func(_ context.Context, cmd *cli.Command) error {
			return conformance.Launch(cmd.Args().Slice())
		},
	}
}
