// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package machine gives a node the GPUs of a simulated machine.
package machine

import (
	"context"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/service"
)

// Root is where the simulated machine's driver, devices and kernel files are, in the node.
const Root = "/run/gpusim"

// BinEnv names the variable that points to another gpusim than the checkout's.
const BinEnv = "GPUSIM_BIN"

// Machine is a simulated machine by its name in gpusim's catalogue.
type Machine struct {
	Name string
	Seed int    // makes the UUIDs of its GPUs differ from those of other machines
	Bin  string // the gpusim program
}

// Find returns the machine that the default program, or the one of the environment, makes.
func Find(name, defaultBin string, seed int) (Machine, error) {
	bin := os.Getenv(BinEnv)
	if bin == "" {
		bin = defaultBin
	}
	if err := unix.Access(bin, unix.X_OK); err != nil {
		return Machine{}, fmt.Errorf("machine %s: no gpusim to make it with (%s: %w); run make build, or set %s", name, bin, err, BinEnv)
	}
	return Machine{Name: name, Seed: seed, Bin: bin}, nil
}

// Create makes the machine's root. It runs in the node's mount namespace, before the kubelet starts.
func (m Machine) Create(ctx context.Context, sup *service.Supervisor, log string) error {
	args := []string{m.Bin, "new", "--machine", m.Name, "--seed", strconv.Itoa(m.Seed), "--root", Root}
	return sup.Run(ctx, service.Spec{Name: "gpusim", Args: args, Log: log})
}

// Reboot does to the machine what a reboot does; device numbers are other ones afterwards.
func (m Machine) Reboot(ctx context.Context, sup *service.Supervisor, log string) error {
	return sup.Run(ctx, service.Spec{Name: "gpusim", Args: []string{m.Bin, "reboot", "--renumber", "--root", Root}, Log: log})
}
