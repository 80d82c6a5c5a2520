// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/dynamic-resource-allocation/cel"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/knownfailures"
)

// renderedChart is what helm makes of the chart with its default values.
const renderedChart = "../../../deployments/helm/testdata/defaults.golden.yaml"

// classesOf are the chart's DeviceClasses by which pods get devices for an extended resource.
func classesOf(t *testing.T, extendedResource string) (classes []resourceapi.DeviceClass) {
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
		if err != nil {
			continue // an object of another kind
		}
		if name := class.Spec.ExtendedResourceName; class.Kind == "DeviceClass" && name != nil && *name == extendedResource {
			classes = append(classes, class)
		}
	}
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
	for kubelet, want := range map[string]int{"v1.35.9": 0, "v1.36.0": 2} {
		t.Run(strings.ReplaceAll(kubelet[1:], ".", "-"), func(t *testing.T) {
			knownfailures.Expect(t)
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
			if len(n.Published()) == 0 {
				t.Error("nothing is published")
			}
		})
	}
}
