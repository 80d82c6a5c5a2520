// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/flow/harness"
)

// renderedChart is what helm makes of the chart with its default values.
const renderedChart = "../../../deployments/helm/testdata/defaults.golden.yaml"

// chartClasses are the chart's DeviceClasses.
func chartClasses(t *testing.T) (classes []resourceapi.DeviceClass) {
	t.Helper()
	chart, err := os.ReadFile(renderedChart)
	if err != nil {
		t.Fatal(err)
	}
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(chart), 4096); ; {
		var class resourceapi.DeviceClass
		err := decoder.Decode(&class)
		if errors.Is(err, io.EOF) {
			return classes
		}
		if err == nil && class.Kind == "DeviceClass" { // otherwise an object of another kind
			classes = append(classes, class)
		}
	}
}

// classesOf are those by which pods get devices for an extended resource.
func classesOf(t *testing.T, extendedResource string) []resourceapi.DeviceClass {
	t.Helper()
	return slices.DeleteFunc(chartClasses(t), func(c resourceapi.DeviceClass) bool {
		return ptr.Deref(c.Spec.ExtendedResourceName, "") != extendedResource
	})
}

// selected are the published devices that a scheduler may allocate for a request of a class.
func selected(t *testing.T, n *harness.Node, class *resourceapi.DeviceClass) (names []string) {
	t.Helper()
	for name, d := range n.Published() {
		matches := true
		for _, selector := range class.Spec.Selectors {
			program := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true}).CompileCELExpression(selector.CEL.Expression, cel.Options{})
			if program.Error != nil {
				t.Fatal(program.Error)
			}
			is, _, err := program.DeviceMatches(t.Context(), cel.Device{
				Driver: harness.DriverName, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
			})
			if err != nil {
				t.Fatalf("class %s on device %s, which ends the scheduling of pods: %v", class.Name, name, err)
			}
			matches = matches && is
		}
		if matches {
			names = append(names, name)
		}
	}
	return names
}

// TestExtendedResourceNeedsKubelet: a kubelet older than 1.36 does not know extended resources that are devices: it starts a
// container that asks for nvidia.com/gpu without a GPU, while a device is allocated. So no device of its node is
// given out for it, whatever the version of the control plane.
func TestExtendedResourceNeedsKubelet(t *testing.T) {
	t.Parallel()
	for kubelet, want := range map[string]int{"v1.35.9": 0, "v1.36.0": 2, "vunknown": 0} {
		t.Run(strings.ReplaceAll(kubelet[1:], ".", "-"), func(t *testing.T) {
			n := harness.NewNode(t, "h100x2")
			n.API.SetKubelet(harness.NodeName, kubelet)
			n.Start(t).Ready(t)
			classes := classesOf(t, "nvidia.com/gpu")
			if len(classes) != 1 {
				t.Fatalf("%d classes of the chart are for nvidia.com/gpu, want one", len(classes))
			}
			if got := selected(t, n, &classes[0]); len(got) != want {
				t.Errorf("for nvidia.com/gpu %d devices of a node with kubelet %s are given out, want %d: %v", len(got), kubelet, want, got)
			}
			if shared := classesOf(t, "nvidia.com/gpu.shared"); len(shared) != 1 || len(selected(t, n, &shared[0])) != want {
				t.Errorf("for nvidia.com/gpu.shared with kubelet %s: %d classes, want one with %d devices", kubelet, len(shared), want)
			}
			for _, class := range chartClasses(t) {
				if got := selected(t, n, &class); class.Name == "gpu.nvidia.com" && len(got) != 2 {
					t.Errorf("for claims %v are given out with kubelet %s", got, kubelet)
				}
			}
		})
	}
}
