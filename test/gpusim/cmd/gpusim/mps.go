// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// shownServer is an MPS server on one of its devices.
type shownServer struct {
	PID        int           `json:"pid"`
	GPU        int           `json:"gpu"`
	InstanceID int           `json:"instanceID"` // -1: the undivided GPU
	ComputeID  int           `json:"computeID"`  // -1: none
	Status     string        `json:"status"`
	Pipe       string        `json:"pipe"`
	Clients    []shownClient `json:"clients,omitempty"`
}

// shownClient is a client of it that has a context there.
type shownClient struct {
	PID       int    `json:"pid"`
	Name      string `json:"name"`
	MemoryMiB uint64 `json:"memoryMiB"`
}

func viewServers(m *machine.Machine) []shownServer {
	var out []shownServer
	for _, p := range m.Processes {
		if p.Kind != machine.MPSServer {
			continue
		}
		s := shownServer{
			PID: p.PID, GPU: p.GPU, InstanceID: p.InstanceID, ComputeID: p.ComputeID, Status: p.Status.String(), Pipe: p.Pipe,
		}
		for _, c := range m.Processes {
			if c.Kind == machine.MPSClient && c.Owner == p.Owner && c.GPU == p.GPU {
				s.Clients = append(s.Clients, shownClient{c.PID, c.Name, c.MemoryBytes >> 20})
			}
		}
		out = append(out, s)
	}
	return out
}

// printServers writes a table of MPS servers, or nothing where there are none.
func printServers(w io.Writer, before string, servers []shownServer) {
	if len(servers) == 0 {
		return
	}
	fmt.Fprint(w, before, "MPS SERVER\tGPU\tGI\tCI\tSTATUS\tCLIENTS\tPIPE\n")
	for _, s := range servers {
		fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%s\t%d\t%s\n", s.PID, s.GPU, orNone(s.InstanceID), orNone(s.ComputeID), s.Status, len(s.Clients), s.Pipe)
	}
}

func mpsCommand() *cli.Command {
	return &cli.Command{
		Name:  "mps",
		Usage: "look at MPS servers, and make them have faults",
		Description: "Servers are real processes, started by the stand-in of nvidia-cuda-mps-control. Those\n" +
			"that are killed are gone from the machine at once.",
		Commands: []*cli.Command{mpsListCommand(), mpsFaultCommand(), mpsSetCommand()},
	}
}

func mpsListCommand() *cli.Command {
	return listCommand("list the servers by device", printServers, viewServers)
}

func mpsFaultCommand() *cli.Command {
	return &cli.Command{
		Name:      "fault",
		Usage:     "make a server have a fatal fault, as if a client had caused it",
		ArgsUsage: "[ROOT]",
		Description: "All clients with a context on the device end. The server takes no new ones until they\n" +
			"have gone. Returns when the server has done that. A server that has no clients there\n" +
			"shows nothing.",
		Flags: []cli.Flag{
			rootFlag(),
			&cli.IntFlag{Name: "gpu", Usage: "`INDEX` of the GPU", Required: true},
			&cli.IntFlag{Name: "pid", Usage: "process `ID` of the server (default: all on the GPU)"},
		},
		Action: func(ctx context.Context, c *cli.Command) error {
			return withState(c, func(f *state.File) error { return faultServers(ctx, f, c.Int("gpu"), c.Int("pid")) })
		},
	}
}

// mpsSettings are the words for the fields of machine.MPS: the strict choice, the
// other one, and what they are about.
var mpsSettings = []struct {
	flag, strict, other, usage string
	field                      func(*machine.MPS) *bool
}{
	{
		"killed-client", "undefined", "harmless", "what a client that is killed while it has work on a GPU leaves: a server that is `undefined`, or harmless",
		func(m *machine.MPS) *bool { return &m.HarmlessKills },
	},
	{
		"shared-memory", "anonymous", "file", "whether the shared memory of a server is `anonymous`, or a file in its /dev/shm that its clients must see",
		func(m *machine.MPS) *bool { return &m.NamedSharedMemory },
	},
	{
		"open-files", "needed", "any", "whether contexts need open files of the server, 16384 for all: `needed`, or any number is enough",
		func(m *machine.MPS) *bool { return &m.FewFiles },
	},
	{
		"client-priority", "known", "unknown", "whether the driver's MPS has client priorities: `known`, or unknown, as in older drivers",
		func(m *machine.MPS) *bool { return &m.NoPriorities },
	},
	{
		"control-shm", "any", "daemon", "whose /dev/shm nvidia-cuda-mps-control needs to send commands: `any`, or that of the daemon",
		func(m *machine.MPS) *bool { return &m.ControlNeedsSharedMemory },
	},
}

func mpsSetCommand() *cli.Command {
	flags := []cli.Flag{rootFlag()}
	for _, s := range mpsSettings {
		flags = append(flags, &cli.StringFlag{Name: s.flag, Usage: s.usage})
	}
	return &cli.Command{
		Name:        "set",
		Usage:       "set in what MPS differs between drivers, or what nobody knows",
		ArgsUsage:   "[ROOT]",
		Description: "What is not named stays as it is. A new machine has the first of each.",
		Flags:       flags,
		Action: func(_ context.Context, c *cli.Command) error {
			return withState(c, func(f *state.File) error {
				return f.Update(func(m *machine.Machine) error { return setMPS(c, &m.MPS) })
			})
		},
	}
}

func setMPS(c *cli.Command, m *machine.MPS) error {
	set := false
	for _, s := range mpsSettings {
		switch value := c.String(s.flag); {
		case !c.IsSet(s.flag):
			continue
		case value != s.strict && value != s.other:
			return wrong(c, s.flag, s.strict+" or "+s.other)
		default:
			*s.field(m) = value == s.other
			set = true
		}
	}
	if !set {
		return errors.New("say what to set, see gpusim mps set --help")
	}
	return nil
}

// faultServers asks the servers for a fault and waits until each has had it, or
// is no more.
func faultServers(ctx context.Context, f *state.File, gpu, pid int) error {
	var owners []uint64
	err := f.Update(func(m *machine.Machine) error {
		for i := range m.Processes {
			p := &m.Processes[i]
			if p.Kind == machine.MPSServer && p.GPU == gpu && (pid == 0 || p.PID == pid) {
				p.Fault = true
				owners = append(owners, p.Owner)
			}
		}
		if len(owners) == 0 {
			return fmt.Errorf("there is no such MPS server on GPU %d, the machine has %s", gpu, serversOf(m))
		}
		return nil
	})
	if err != nil {
		return err
	}
	for {
		pending := 0
		for _, owner := range owners {
			gpus, err := f.WantedFaults(owner)
			if err != nil {
				return err
			}
			pending += len(gpus)
		}
		if pending == 0 {
			return nil
		}
		m, err := f.Snapshot()
		if err != nil {
			return err
		}
		owners = slices.DeleteFunc(owners, func(owner uint64) bool {
			return !slices.ContainsFunc(m.Processes, func(p machine.Process) bool { return p.Owner == owner })
		})
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the fault on GPU %d: %w", gpu, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func serversOf(m *machine.Machine) string {
	var texts []string
	for _, s := range viewServers(m) {
		texts = append(texts, fmt.Sprintf("%d on GPU %d", s.PID, s.GPU))
	}
	if len(texts) == 0 {
		return "none"
	}
	return strings.Join(texts, ", ")
}
