// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

func TestMain(m *testing.M) { harness.Main(m) }

// TestHealth lets one GPU of a machine fail in NVIDIA's fake NVML and in the simulator. What the plugin publishes of it has to be the same.
func TestHealth(t *testing.T) {
	for name, failure := range map[string]struct {
		fake     string // of its configuration
		simulate func(t *testing.T, n *harness.Node)
		want     []string
	}{
		"lost": {
			fake:     "mode: lost",
			simulate: func(t *testing.T, n *harness.Node) { n.Update(t, lose) },
			want:     []string{"gpu-lost"},
		},
		"XID": {
			fake: "mode: ecc_uncorrectable, xid: {code: 79}",
			simulate: func(t *testing.T, n *harness.Node) {
				n.Update(t, func(m *machine.Machine) { m.GPUs[1].Health.VolatileECC.Uncorrected++ })
				n.SendXID(t, 1, 79, -1)
			},
			want: []string{"uncorrected-ecc", "xid=79"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Run("simulator", func(t *testing.T) {
				n := harness.NewNode(t, "dgx-h100")
				fails(t, n, n.Start(t, harness.Frequent...), failure.want, func() { failure.simulate(t, n) })
			})
			t.Run("NVIDIA", func(t *testing.T) {
				n := harness.NewNode(t, "dgx-h100")
				config := putFake(t, n)
				p := n.StartWith(t, []string{"MOCK_NVML_CONFIG=" + config, "MOCK_NVML_OVERRIDES_TTL=100ms"}, harness.Frequent...)
				fails(t, n, p, failure.want, func() {
					override := fmt.Sprintf("devices: {\"1\": {failure: {%s}}}\n", failure.fake)
					replace(t, filepath.Join(filepath.Dir(config), "overrides.yaml"), []byte(override))
				})
			})
		})
	}
}

func lose(m *machine.Machine) { m.GPUs[1].Failure = harness.NVMLGPUIsLost }

// putFake puts NVIDIA's library in the place of a machine's, and returns its configuration, with the addresses and UUIDs of the machine.
func putFake(t *testing.T, n *harness.Node) (config string) {
	t.Helper()
	fake := filepath.Join(page.Root(t), "_output/neighbours/mocknvml")
	library, err := os.ReadFile(filepath.Join(fake, "libnvidia-ml.so.1"))
	if err != nil {
		t.Skipf("test/neighbours/build has not built it: %v", err)
	}
	links, err := filepath.Glob(filepath.Join(n.Root, "usr/lib/*/libnvidia-ml.so.1"))
	if err != nil || len(links) != 1 {
		t.Fatalf("libraries %q, %v", links, err)
	}
	replace(t, links[0], library)
	text, err := os.ReadFile(filepath.Join(fake, "mock-nvml-config-h100.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	uuids, addresses := 0, 0
	text = regexp.MustCompile(`"GPU-[^"]*"`).ReplaceAllFunc(text, func([]byte) []byte {
		uuids++
		return fmt.Appendf(nil, "%q", n.Machine(t).GPUs[uuids-1].UUID)
	})
	text = regexp.MustCompile(`bus_id: "[^"]*"`).ReplaceAllFunc(text, func([]byte) []byte {
		addresses++
		return fmt.Appendf(nil, "bus_id: %q", strings.ToUpper(n.Address(t, addresses-1)))
	})
	config = filepath.Join(t.TempDir(), "config.yaml")
	replace(t, config, text)
	return config
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

// fails lets the second GPU fail, and waits until it has exactly these taints, and no other GPU has any.
func fails(t *testing.T, n *harness.Node, p *harness.Driver, want []string, fail func()) {
	t.Helper()
	p.Ready(t)
	p.UntilPublished(t, n, 0, 1, 2, 3, 4, 5, 6, 7)
	untilTaints(t, n, p, nil)
	fail()
	untilTaints(t, n, p, map[string][]string{harness.DeviceName(n.Address(t, 1), harness.Place{}): want})
}

// untilTaints waits until exactly these of the whole GPUs have taints.
func untilTaints(t *testing.T, n *harness.Node, p *harness.Driver, want map[string][]string) {
	t.Helper()
	p.Until(t, fmt.Sprintf("taints %v", want), func(context.Context) error {
		got := map[string][]string{}
		for name, d := range n.Published() {
			for _, taint := range d.Taints {
				if *d.Attributes["type"].StringValue == "gpu" {
					key := strings.TrimPrefix(taint.Key, harness.DriverName+"/")
					got[name] = append(got[name], strings.TrimSuffix(key+"="+taint.Value, "="))
				}
			}
			slices.Sort(got[name])
		}
		maps.DeleteFunc(got, func(_ string, taints []string) bool { return taints == nil })
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			return fmt.Errorf("(-want +got):\n%s", diff)
		}
		return nil
	})
}
