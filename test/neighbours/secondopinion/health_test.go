// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

func TestMain(m *testing.M) { harness.Main(m) }

// TestHealth lets the last GPU of a machine fail in NVIDIA's fake NVML and in the simulator. What the plugin publishes has to be the same.
func TestHealth(t *testing.T) {
	for name, failure := range map[string]struct {
		gpus     int    // one where it is an event: the fake gives events to whoever waits, also for another GPU
		fake     string // of its configuration
		simulate func(t *testing.T, n *harness.Node, gpu int)
		want     []string
	}{
		"lost": {
			gpus: 8,
			fake: "mode: lost",
			simulate: func(t *testing.T, n *harness.Node, gpu int) {
				n.Update(t, func(m *machine.Machine) { m.GPUs[gpu].Failure = harness.NVMLGPUIsLost })
			},
			want: []string{"gpu-lost"},
		},
		"broken memory and an XID": {
			gpus: 1,
			fake: "mode: ecc_uncorrectable, xid: {code: 79}",
			simulate: func(t *testing.T, n *harness.Node, gpu int) {
				n.Update(t, func(m *machine.Machine) {
					m.GPUs[gpu].Health.VolatileECC.Uncorrected, m.GPUs[gpu].Health.RemappedRows.Failed = 1, true
				})
				n.SendXID(t, gpu, 79, -1)
			},
			want: []string{"row-remap-failed", "uncorrected-ecc", "xid=79"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			node := func() *harness.Node {
				return harness.NewNode(t, "dgx-h100", func(m *machine.Machine) { m.GPUs = m.GPUs[:failure.gpus] })
			}
			last := failure.gpus - 1
			t.Run("simulator", func(t *testing.T) {
				n := node()
				p := n.Start(t, append(harness.Frequent, n.Policy(t, steady))...)
				untilTaints(t, n, p, func() {})
				// The driver keeps no event for those who wait later.
				untilTaints(t, n, p, func() { failure.simulate(t, n, last) }, failure.want...)
			})
			t.Run("NVIDIA", func(t *testing.T) {
				n := node()
				config := putFake(t, n)
				p := n.StartWith(t, []string{"MOCK_NVML_CONFIG=" + config, "MOCK_NVML_OVERRIDES_TTL=100ms"},
					append(harness.Frequent, n.Policy(t, steady))...)
				untilTaints(t, n, p, func() {})
				override := fmt.Sprintf("devices: {\"%d\": {failure: {%s}}}\n", last, failure.fake)
				replace(t, filepath.Join(filepath.Dir(config), "overrides.yaml"), []byte(override))
				untilTaints(t, n, p, func() {}, failure.want...)
			})
		})
	}
}

// steady keeps what was noticed.
const steady = "health: {quietPeriod: 1h}\n"

// putFake puts NVIDIA's library in the place of a machine's, and returns its configuration, with the addresses and UUIDs of the machine.
func putFake(t *testing.T, n *harness.Node) (config string) {
	t.Helper()
	fake := filepath.Join(page.Root(t), "_output/neighbours/mocknvml")
	library, err := os.ReadFile(filepath.Join(fake, "libnvidia-ml.so.1"))
	if err != nil {
		t.Skipf("test/neighbours/build has not built it: %v", err)
	}
	replace(t, libraryOf(t, n), library)
	text, err := os.ReadFile(filepath.Join(fake, "mock-nvml-config-h100.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	delete(values, "pcie_topology")
	var devices []any
	for i, gpu := range n.Machine(t).GPUs {
		devices = append(devices, map[string]any{"index": i, "uuid": gpu.UUID, "pci": map[string]any{"bus_id": strings.ToUpper(gpu.PCIAddress)}})
	}
	values["devices"] = devices
	if text, err = yaml.Marshal(values); err != nil {
		t.Fatal(err)
	}
	config = filepath.Join(t.TempDir(), "config.yaml")
	replace(t, config, text)
	return config
}

// libraryOf is the NVML library of a machine.
func libraryOf(t *testing.T, n *harness.Node) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(n.Root, "usr/lib/*/libnvidia-ml.so.1"))
	if err != nil || len(found) != 1 {
		t.Fatalf("libraries %q, %v", found, err)
	}
	return found[0]
}

func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// untilTaints waits until the last GPU has exactly these taints, and no other has any.
func untilTaints(t *testing.T, n *harness.Node, p *harness.Driver, each func(), want ...string) {
	t.Helper()
	gpus := n.Machine(t).GPUs
	p.Until(t, fmt.Sprintf("taints %v", want), func(context.Context) error {
		each()
		wanted, got := map[string][]string{}, map[string][]string{}
		for _, gpu := range gpus {
			wanted[harness.DeviceName(gpu.PCIAddress, harness.Place{})] = nil
		}
		wanted[harness.DeviceName(gpus[len(gpus)-1].PCIAddress, harness.Place{})] = want
		for name, d := range n.Published() {
			if *d.Attributes["type"].StringValue != "gpu" {
				continue
			}
			got[name] = nil
			for _, taint := range d.Taints {
				key := strings.TrimPrefix(taint.Key, harness.DriverName+"/")
				got[name] = append(got[name], strings.TrimSuffix(key+"="+taint.Value, "="))
			}
			slices.Sort(got[name])
		}
		if diff := cmp.Diff(wanted, got, cmpopts.EquateEmpty()); diff != "" {
			return fmt.Errorf("(-want +got):\n%s", diff)
		}
		return nil
	})
}
