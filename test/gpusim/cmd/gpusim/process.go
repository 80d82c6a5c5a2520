// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

func processCommand() *cli.Command {
	return &cli.Command{
		Name:  "proc",
		Usage: "simulate processes that hold a GPU or an instance",
		Description: "A simulated process is only an entry in the machine's state: what it holds cannot\n" +
			"be destroyed, and NVML lists it. No process is started.",
		Commands: []*cli.Command{processAddCommand(), processSetCommand(), processRemoveCommand()},
	}
}

func processAddCommand() *cli.Command {
	return &cli.Command{
		Name:      "add",
		Usage:     "add a process",
		ArgsUsage: "[ROOT]",
		Flags: []cli.Flag{
			rootFlag(),
			&cli.IntFlag{Name: "gpu", Usage: "`INDEX` of the GPU", Required: true},
			&cli.IntFlag{Name: "gi", Usage: "`ID` of the GPU instance", Value: -1},
			&cli.IntFlag{Name: "ci", Usage: "`ID` of the compute instance (default: the first)", Value: -1},
			&cli.IntFlag{Name: "pid", Usage: "process `ID` (default: the first free one from 10000)"},
			&cli.StringFlag{Name: "name", Usage: "`NAME` of the process", Value: "python3"},
			&cli.Uint64Flag{Name: "memory", Usage: "GPU memory in `MiB`", Value: 256},
			smFlag(),
		},
		Action: func(_ context.Context, c *cli.Command) error {
			p := machine.Process{
				PID: c.Int("pid"), Name: c.String("name"), GPU: c.Int("gpu"),
				InstanceID: c.Int("gi"), ComputeID: c.Int("ci"), MemoryBytes: c.Uint64("memory") << 20, SM: c.Int("sm"),
			}
			err := withState(c, func(f *state.File) error {
				return f.Update(func(m *machine.Machine) error { return addProcess(m, &p) })
			})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.Root().Writer, p.PID)
			return err
		},
	}
}

func smFlag() cli.Flag {
	return &cli.IntFlag{Name: "sm", Usage: "`PERCENTAGE` of the multiprocessors of what it holds that it keeps busy"}
}

func processSetCommand() *cli.Command {
	return &cli.Command{
		Name:        "set",
		Usage:       "change what a process uses",
		ArgsUsage:   "[ROOT]",
		Description: "A process that says itself what it uses, such as cuda-client, may change it again.",
		Flags: []cli.Flag{
			rootFlag(),
			&cli.IntFlag{Name: "pid", Usage: "process `ID`", Required: true},
			&cli.Uint64Flag{Name: "memory", Usage: "GPU memory in `MiB`"},
			smFlag(),
		},
		Action: func(_ context.Context, c *cli.Command) error {
			if !c.IsSet("memory") && !c.IsSet("sm") {
				return errors.New("say what the process uses by --memory or --sm")
			}
			return withState(c, func(f *state.File) error {
				return f.Update(func(m *machine.Machine) error { return setProcess(c, m) })
			})
		},
	}
}

func setProcess(c *cli.Command, m *machine.Machine) error {
	found := false
	for i := range m.Processes {
		p := &m.Processes[i]
		if p.PID != c.Int("pid") {
			continue
		}
		found = true
		if c.IsSet("memory") {
			p.MemoryBytes = c.Uint64("memory") << 20
		}
		if c.IsSet("sm") {
			p.SM = c.Int("sm")
		}
	}
	if !found {
		return fmt.Errorf("there is no process %d", c.Int("pid"))
	}
	return nil
}

// addProcess adds p after it has filled what the user left out.
func addProcess(m *machine.Machine, p *machine.Process) error {
	if p.GPU < 0 || p.GPU >= len(m.GPUs) {
		return fmt.Errorf("there is no GPU %d, the machine has 0 to %d", p.GPU, len(m.GPUs)-1)
	}
	if err := place(&m.GPUs[p.GPU], p); err != nil {
		return err
	}
	taken := func(pid int) bool {
		return slices.ContainsFunc(m.Processes, func(q machine.Process) bool { return q.PID == pid })
	}
	if p.PID == 0 {
		for p.PID = 10000; taken(p.PID); {
			p.PID++
		}
	}
	if p.PID < 0 || taken(p.PID) {
		return fmt.Errorf("process id %d is not possible or taken", p.PID)
	}
	m.Processes = append(m.Processes, *p)
	return nil
}

// place checks that what the process is to hold exists.
func place(g *machine.GPU, p *machine.Process) error {
	divided := g.MIG != nil && g.MIG.Current
	switch {
	case p.InstanceID < 0 && p.ComputeID >= 0:
		return errors.New("--ci needs --gi")
	case p.InstanceID < 0 && divided:
		return fmt.Errorf("GPU %d is in MIG mode: say which instance by --gi", p.GPU)
	case p.InstanceID < 0:
		return nil
	case !divided:
		return fmt.Errorf("GPU %d is not in MIG mode, it has no instances", p.GPU)
	}
	i := slices.IndexFunc(g.MIG.Instances, func(in machine.GPUInstance) bool { return in.ID == p.InstanceID })
	if i < 0 {
		return fmt.Errorf("GPU %d has no GPU instance %d", p.GPU, p.InstanceID)
	}
	compute := g.MIG.Instances[i].Compute
	if len(compute) == 0 {
		return fmt.Errorf("GPU instance %d of GPU %d has no compute instance, nothing can run in it", p.InstanceID, p.GPU)
	}
	if p.ComputeID < 0 {
		p.ComputeID = compute[0].ID
	}
	if !slices.ContainsFunc(compute, func(c machine.ComputeInstance) bool { return c.ID == p.ComputeID }) {
		return fmt.Errorf("GPU instance %d of GPU %d has no compute instance %d", p.InstanceID, p.GPU, p.ComputeID)
	}
	return nil
}

func processRemoveCommand() *cli.Command {
	return &cli.Command{
		Name:      "rm",
		Usage:     "remove a process, or all of them",
		ArgsUsage: "[ROOT]",
		Flags: []cli.Flag{
			rootFlag(),
			&cli.IntFlag{Name: "pid", Usage: "process `ID`"},
			&cli.BoolFlag{Name: "all", Usage: "remove every process"},
		},
		Action: func(_ context.Context, c *cli.Command) error {
			pid, all := c.Int("pid"), c.Bool("all")
			if all == c.IsSet("pid") {
				return errors.New("say which process by --pid, or --all")
			}
			return withState(c, func(f *state.File) error {
				return f.Update(func(m *machine.Machine) error {
					before := len(m.Processes)
					m.Processes = slices.DeleteFunc(m.Processes, func(p machine.Process) bool { return all || p.PID == pid })
					if !all && len(m.Processes) == before {
						return fmt.Errorf("there is no process %d", pid)
					}
					return nil
				})
			})
		},
	}
}
