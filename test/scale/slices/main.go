// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command slices writes the ResourceSlices of one node of each kind that the benchmark of the
// scheduler (test/scale/scheduler) has: what Partage publishes now, made by the driver's own code, and
// what NVIDIA's DRA driver publishes for the same GPUs. It is a program of its own because that
// benchmark is a module of its own.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/sliceset/template"
	"github.com/partage-dev/partage/test/scale/slices/reference"
)

// node is the name of the node and of its pool; the benchmark replaces it.
const node = "node"

const driver = "gpu.nvidia.com"

var pool = reference.Pool{Driver: driver, Node: node}

// machines are what nodes are made of.
var machines = map[string]template.Machine{
	"dgx-h100": {Model: "h100", Count: 8},
	"dgx-a100": {Model: "a100-80", Count: 8, MIG: true},
	"l4":       {Model: "l4", Count: 8},
}

func main() {
	dir := flag.String("o", "", "folder that the files are written to")
	flag.Parse()
	if err := run(*dir); err != nil {
		fmt.Fprintln(os.Stderr, "slices:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder for slices: %w", err)
	}
	for name, machine := range machines {
		facts, err := factsOf(machine)
		if err != nil {
			return err
		}
		inventory, err := device.NewInventory(facts, device.Terms{})
		if err != nil {
			return fmt.Errorf("determine the devices of %s: %w", name, err)
		}
		published := inventory.ResourceSlices(device.Options{
			Driver: driver, Pool: node, NodeName: node, PartitionableDevices: true, ConsumableCapacity: true,
		})
		if err := write(dir, name, published); err != nil {
			return err
		}
		if name == "dgx-h100" {
			if err := write(dir, "reference", pool.ResourceSlices(facts)); err != nil {
				return err
			}
		}
	}
	return write(dir, "toy", toy())
}

// factsOf is what such a machine reports, with the PCIe roots and NUMA nodes that real ones have.
func factsOf(machine template.Machine) (*gpu.Node, error) {
	facts, err := machine.Facts()
	if err != nil {
		return nil, err
	}
	for i := range facts.GPUs {
		numa := 2 * i / len(facts.GPUs)
		facts.GPUs[i].NUMANode, facts.GPUs[i].PCIeRoot = &numa, fmt.Sprintf("pci0000:%02x", 0x10+7*i)
	}
	return facts, nil
}

func write(dir, name string, published []resourceapi.ResourceSlice) error {
	data, err := json.Marshal(published)
	if err != nil {
		return fmt.Errorf("write slices of %s: %w", name, err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), data, 0o644); err != nil { // #nosec G306 -- nothing secret
		return fmt.Errorf("write slices of %s: %w", name, err)
	}
	return nil
}
