// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/mps/supervisor"
	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/host"
)

// config holds the value of every flag.
type config struct {
	mpsDir              string
	driverRoot, devRoot string
	hostDriverRoot      string
	extraContainerFiles string
	podsSocket          string
	seLinux             string
	memoryPercent       int
	checkInterval       time.Duration
	process             command.Process
}

func (c *config) flags() []cli.Flag {
	return append([]cli.Flag{
		command.String("", "mps-dir", "/run/partage/mps", &c.mpsDir,
			"directory for sessions and for the socket; must be the same path inside and outside the container, "+
				"and mounts below it must propagate to the host"),
		command.String("", "driver-root", "/", &c.driverRoot,
			"root of the tree that holds the NVIDIA driver's libraries and programs, as this process sees it"),
		command.String("", "dev-root", host.AutoDev, &c.devRoot,
			"root of the tree that holds dev/nvidia0, as this process sees it; "+host.AutoDev+": the driver root, or / if that has more of the driver's device nodes"),
		command.String("", "host-driver-root", "", &c.hostDriverRoot,
			"the driver root on the host; empty: the same path"),
		command.Duration("", "check-interval", 2*time.Second, &c.checkInterval,
			"time between two checks of a session's server; the end of a daemon is noticed at once"),
		command.String("", "extra-container-files", "", &c.extraContainerFiles,
			"names of files in a daemon's pipe directory that containers get beside the socket control, separated by commas, such as log"),
		command.String("", "kubelet-pods-socket", "", &c.podsSocket,
			"socket of the kubelet's Pods API, by which MPS clients are terminated before their pod is killed; empty: they are not"),
		command.SELinux("", &c.seLinux),
		command.Int("", "memory-percent", 50, &c.memoryPercent,
			"how much of the node's memory what is mounted for all sessions may take, above all /dev/shm"),
	}, c.process.Flags("")...)
}

// The range guards against a typing error that would keep the supervisor busy with
// checks, or from checking at all.
const (
	shortest = 50 * time.Millisecond
	longest  = time.Minute
)

// validate returns an error that names every wrong flag, its value and what is
// expected.
func (c *config) validate() error {
	return errors.Join(
		c.checkMPSDir(),
		command.CheckDirectory("driver-root", c.driverRoot, false),
		command.CheckDevRoot(c.devRoot),
		command.CheckDirectory("host-driver-root", cmp.Or(c.hostDriverRoot, "/"), false),
		command.CheckDuration("check-interval", c.checkInterval, shortest, longest),
		c.checkContainerFiles(),
		command.CheckPath("kubelet-pods-socket", c.podsSocket), // older kubelets have none
		command.CheckSELinux(c.seLinux),
		command.Check("memory-percent", c.memoryPercent, 1 <= c.memoryPercent && c.memoryPercent <= maxMemoryPercent,
			fmt.Sprintf("a number from 1 to %d", maxMemoryPercent)),
		c.process.Validate(),
	)
}

// checkMPSDir refuses a directory in which the first claims would find out that a daemon cannot make its sockets.
func (c *config) checkMPSDir() error {
	most := supervisor.MaxDir()
	return errors.Join(
		command.CheckDirectory("mps-dir", c.mpsDir, false),
		command.Check("mps-dir", c.mpsDir, len(c.mpsDir) <= most,
			fmt.Sprintf("a path of at most %d bytes, since those of sockets in it are limited", most)),
	)
}

// maxMemoryPercent leaves some of the node's memory to everything else.
const maxMemoryPercent = 80

func (c *config) roots() host.Roots {
	return host.Roots{Driver: c.driverRoot, Dev: c.devRoot, HostDriver: c.hostDriverRoot}.Complete()
}

// containerFiles returns the names in the flag.
func (c *config) containerFiles() []string {
	return strings.FieldsFunc(c.extraContainerFiles, func(r rune) bool { return r == ',' })
}

// fileName matches the names that MPS gives to its files.
var fileName = regexp.MustCompile(`^[A-Za-z0-9][-._A-Za-z0-9]*$`)

func (c *config) checkContainerFiles() error {
	for _, name := range c.containerFiles() {
		if !fileName.MatchString(name) || name == supervisor.PrivilegedSocket {
			return command.Wrong("extra-container-files", c.extraContainerFiles,
				"names of files, separated by commas, and not "+supervisor.PrivilegedSocket+", by which containers could command the daemon")
		}
	}
	return nil
}
