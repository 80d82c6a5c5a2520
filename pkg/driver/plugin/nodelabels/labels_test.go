// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
)

// board returns n GPUs of a model.
func board(t *testing.T, name string, n int) []*gpu.GPU {
	t.Helper()
	node, err := boards.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Repeat([]*gpu.GPU{&node.GPUs[0]}, n)
}

// TestOf: the values are those of GPU feature discovery.
func TestOf(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		gpus []*gpu.GPU
		want map[string]string
	}{
		"none": {want: map[string]string{}},
		"one model": {gpus: board(t, "h100", 8), want: map[string]string{
			Product: "NVIDIA-H100-80GB-HBM3", Count: "8", Memory: fmt.Sprint(board(t, "h100", 1)[0].Resources.MemoryBytes >> 20),
			Family: "hopper", ComputeMajor: "9", ComputeMinor: "0",
		}},
		"family of two words": {gpus: board(t, "l4", 1), want: map[string]string{
			Product: "NVIDIA-L4", Count: "1", Memory: fmt.Sprint(board(t, "l4", 1)[0].Resources.MemoryBytes >> 20),
			Family: "ada-lovelace", ComputeMajor: "8", ComputeMinor: "9",
		}},
		"models with something in common": {gpus: slices.Concat(board(t, "a100-40", 2), board(t, "a100-80", 1)), want: map[string]string{
			Count: "3", Family: "ampere", ComputeMajor: "8", ComputeMinor: "0",
		}},
		"models with nothing in common": {gpus: slices.Concat(board(t, "t4", 1), board(t, "h100", 1)), want: map[string]string{Count: "2"}},
		"what a label cannot be": {gpus: []*gpu.GPU{{ProductName: "GPU" + strings.Repeat("x", 61), Architecture: "?"}}, want: map[string]string{
			Count: "1",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(test.want, Of(test.gpus)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestProduct(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"NVIDIA H100 80GB HBM3":                        "NVIDIA-H100-80GB-HBM3",
		"NVIDIA A100-SXM4-80GB":                        "NVIDIA-A100-SXM4-80GB",
		" Quadro  RTX 6000/8000 (Passive)":             "Quadro-RTX-60008000-Passive",
		"NVIDIA RTX PRO 6000 Blackwell Server Edition": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
	} {
		if got := product(name); got != want {
			t.Errorf("%q is %q, want %q", name, got, want)
		}
	}
}

// TestPolicyAllowsTheLabels: the chart's admission policy names the labels that are written.
func TestPolicyAllowsTheLabels(t *testing.T) {
	t.Parallel()
	const template = "../../../../deployments/helm/partage/templates/nodelabels.yaml"
	text, err := os.ReadFile(template)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, key := range slices.Sorted(maps.Keys(Of(board(t, "h100", 1)))) {
		keys = append(keys, "'"+key+"'")
	}
	if list := "[" + strings.Join(keys, ", ") + "]"; len(keys) != 6 || strings.Count(string(text), list) != 1 {
		t.Errorf("%s does not have the list %s once", template, list)
	}
}
