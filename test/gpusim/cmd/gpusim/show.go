// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/urfave/cli/v3"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// The output of show -o json, which tests read.
type (
	shown struct {
		Machine       string         `json:"machine"`
		DriverVersion string         `json:"driverVersion"`
		CUDAVersion   string         `json:"cudaVersion"`
		BootID        string         `json:"bootID"`
		GPUs          []shownGPU     `json:"gpus"`
		Processes     []shownProcess `json:"processes"`
		MPS           []shownServer  `json:"mps,omitempty"`
		Faults        []shownFault   `json:"faults,omitempty"`
		Latencies     []shownLatency `json:"latencies,omitempty"`
		// Unmodelled counts the calls of NVML functions that the library
		// exports and does not simulate.
		Unmodelled map[string]uint64 `json:"unmodelled"`
	}
	shownGPU struct {
		Index       int       `json:"index"`
		Minor       int       `json:"minor"`
		PCIAddress  string    `json:"pciAddress"`
		UUID        string    `json:"uuid"`
		Board       string    `json:"board"`
		ProductName string    `json:"productName"`
		MemoryMiB   uint64    `json:"memoryMiB"`
		PCIeRoot    string    `json:"pcieRoot"`
		NUMANode    int       `json:"numaNode"`
		ComputeMode string    `json:"computeMode"`
		TimeSlice   string    `json:"timeSlice"`
		Failure     string    `json:"failure,omitempty"` // the NVML code of every call
		Health      []string  `json:"health,omitempty"`  // what is not well
		MIG         *shownMIG `json:"mig,omitempty"`
	}
	shownMIG struct {
		Enabled   bool            `json:"enabled"`
		Pending   bool            `json:"pending"`
		Instances []shownInstance `json:"instances"`
	}
	shownInstance struct {
		ID        int            `json:"id"`
		Profile   string         `json:"profile"`
		ProfileID uint32         `json:"profileID"`
		Start     int            `json:"start"`
		Size      int            `json:"size"`
		Compute   []shownCompute `json:"compute"`
	}
	shownCompute struct {
		ID          int    `json:"id"`
		ProfileID   uint32 `json:"profileID"`
		Start       int    `json:"start"`
		Size        int    `json:"size"`
		UUID        string `json:"uuid"`
		ComputeMode string `json:"computeMode"`
	}
	shownProcess struct {
		PID        int    `json:"pid"`
		Name       string `json:"name"`
		GPU        int    `json:"gpu"`
		InstanceID int    `json:"instanceID"` // -1: the undivided GPU
		ComputeID  int    `json:"computeID"`  // -1: none
		MemoryMiB  uint64 `json:"memoryMiB"`
		SM         int    `json:"sm,omitempty"` // percentage of the multiprocessors that it keeps busy
	}
)

var (
	computeModes = []string{"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"}
	timeSlices   = []string{"default", "short", "medium", "long"}
)

func showCommand() *cli.Command {
	return &cli.Command{
		Name:      "show",
		Usage:     "print the present state of a machine",
		ArgsUsage: "[ROOT]",
		Flags: []cli.Flag{
			rootFlag(), outputFlag(),
		},
		Action: func(_ context.Context, c *cli.Command) error {
			print, err := printer(c, printTable)
			if err != nil {
				return err
			}
			return withState(c, func(f *state.File) error {
				m, err := f.Snapshot()
				if err != nil {
					return err
				}
				unmodelled, err := f.Unmodelled()
				if err != nil {
					return err
				}
				s := view(m)
				for name, n := range unmodelled {
					s.Unmodelled[name] = n
				}
				return print(c.Root().Writer, s)
			})
		},
	}
}

func outputFlag() cli.Flag {
	return &cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "`FORMAT`: table, json or yaml", Value: "table"}
}

// printer prints in the format that the user wants.
func printer[T any](c *cli.Command, table func(io.Writer, T) error) (func(io.Writer, T) error, error) {
	switch format := c.String("output"); format {
	case "table":
		return table, nil
	case "json":
		return printJSON[T], nil
	case "yaml":
		return printYAML[T], nil
	default:
		return nil, fmt.Errorf("output format %q is none of table, json, yaml", format)
	}
}

// view turns a machine into what is shown of it.
func view(m *machine.Machine) *shown {
	s := &shown{
		Machine: m.Name, DriverVersion: m.DriverVersion, BootID: m.BootID,
		CUDAVersion: fmt.Sprintf("%d.%d", m.CUDADriverVersion/1000, m.CUDADriverVersion%1000/10),
		GPUs:        []shownGPU{}, Processes: []shownProcess{}, Unmodelled: map[string]uint64{},
		MPS: viewServers(m), Faults: viewFaults(m.Faults), Latencies: viewLatencies(m.Latencies),
	}
	for i := range m.GPUs {
		g := &m.GPUs[i]
		failure := ""
		if g.Failure != 0 {
			failure = codeName(g.Failure)
		}
		s.GPUs = append(s.GPUs, shownGPU{
			Index: i, Minor: g.Minor, PCIAddress: g.PCIAddress, UUID: g.UUID, Board: g.Board, ProductName: g.ProductName,
			MemoryMiB: g.MemoryBytes >> 20, PCIeRoot: g.PCIeRoot, NUMANode: g.NUMANode,
			ComputeMode: name(computeModes, g.ComputeMode), TimeSlice: name(timeSlices, g.TimeSlice),
			Failure: failure, Health: viewHealth(g), MIG: viewMIG(g.MIG),
		})
	}
	for _, p := range m.Processes {
		s.Processes = append(s.Processes, shownProcess{p.PID, p.Name, p.GPU, p.InstanceID, p.ComputeID, p.MemoryBytes >> 20, p.SM})
	}
	return s
}

func viewMIG(m *machine.MIG) *shownMIG {
	if m == nil {
		return nil
	}
	out := &shownMIG{Enabled: m.Current, Pending: m.Pending, Instances: []shownInstance{}}
	for _, in := range m.Instances {
		profile := ""
		for _, p := range m.Profiles {
			if p.ID == in.ProfileID {
				profile = p.Name
			}
		}
		compute := []shownCompute{}
		for _, c := range in.Compute {
			compute = append(compute, shownCompute{c.ID, c.ProfileID, c.Placement.Start, c.Placement.Size, c.UUID, name(computeModes, c.ComputeMode)})
		}
		out.Instances = append(out.Instances, shownInstance{in.ID, profile, in.ProfileID, in.Placement.Start, in.Placement.Size, compute})
	}
	return out
}

func name(names []string, i int) string {
	if i < 0 || i >= len(names) {
		return strconv.Itoa(i)
	}
	return names[i]
}

func printJSON[T any](w io.Writer, s T) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(s)
}

func printYAML[T any](w io.Writer, s T) error {
	data, err := yaml.Marshal(s)
	if err != nil {
		return err
	}
	_, err = w.Write(data)
	return err
}

// printTable writes one table of GPUs, and others where there is something to
// put into them.
func printTable(out io.Writer, s *shown) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%s, driver %s, CUDA %s, boot %s\n\n", s.Machine, s.DriverVersion, s.CUDAVersion, s.BootID)
	fmt.Fprint(w, "GPU\tMINOR\tADDRESS\tPRODUCT\tMIG\tCOMPUTE MODE\tTIME SLICE\n")
	instances := 0
	for _, g := range s.GPUs {
		fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%s\t%s\t%s\n", g.Index, g.Minor, g.PCIAddress, g.ProductName, migMode(g.MIG), g.ComputeMode, g.TimeSlice)
		if g.MIG != nil {
			instances += len(g.MIG.Instances)
		}
	}
	printHealth(w, s.GPUs)
	if instances > 0 {
		fmt.Fprint(w, "\nGPU\tGI\tPROFILE\tPLACEMENT\tCI\tUUID\n")
		for _, g := range s.GPUs {
			printInstances(w, g)
		}
	}
	if len(s.Processes) > 0 {
		fmt.Fprint(w, "\nPID\tGPU\tGI\tCI\tMEMORY\tSM\tNAME\n")
		for _, p := range s.Processes {
			fmt.Fprintf(w, "%d\t%d\t%s\t%s\t%d MiB\t%d%%\t%s\n", p.PID, p.GPU, orNone(p.InstanceID), orNone(p.ComputeID), p.MemoryMiB, p.SM, p.Name)
		}
	}
	printServers(w, "\n", s.MPS)
	printFaults(w, "\n", s.Faults)
	printLatencies(w, s.Latencies)
	printUnmodelled(w, s.Unmodelled)
	return w.Flush()
}

func printUnmodelled(w io.Writer, calls map[string]uint64) {
	if len(calls) == 0 {
		return
	}
	fmt.Fprint(w, "\nCALLS\tNOT SIMULATED\n")
	for _, n := range slices.Sorted(maps.Keys(calls)) {
		fmt.Fprintf(w, "%d\t%s\n", calls[n], n)
	}
}

func printInstances(w io.Writer, g shownGPU) {
	if g.MIG == nil {
		return
	}
	for _, in := range g.MIG.Instances {
		row := fmt.Sprintf("%d\t%d\t%s\t%d:%d", g.Index, in.ID, in.Profile, in.Start, in.Size)
		if len(in.Compute) == 0 {
			fmt.Fprintf(w, "%s\t-\t-\n", row)
		}
		for _, c := range in.Compute {
			fmt.Fprintf(w, "%s\t%d\t%s\n", row, c.ID, c.UUID)
		}
	}
}

func migMode(m *shownMIG) string {
	word := map[bool]string{true: "on", false: "off"}
	switch {
	case m == nil:
		return "-"
	case m.Enabled != m.Pending:
		return word[m.Enabled] + " (" + word[m.Pending] + " after a reset)"
	}
	return word[m.Enabled]
}

func orNone(id int) string {
	if id < 0 {
		return "-"
	}
	return strconv.Itoa(id)
}
