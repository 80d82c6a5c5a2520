// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

// hardwareChecks compare GPUs with the simulated ones, on which the driver was tested.
var hardwareChecks = []Check{
	{
		ID:         "hardware.product",
		Assumption: "the GPU is like the simulated one of its model",
		Code:       "test/gpusim/catalog/boards",
		Run:        checkProduct,
	},
	{
		ID:         "hardware.profiles",
		Assumption: "its partitions are like those of the simulated one",
		Code:       "test/gpusim/catalog/boards",
		Run:        checkProfiles,
	},
	{
		ID:         "hardware.latency",
		Assumption: "calls into NVML answer long before they are given up",
		Code:       "pkg/call/call.go",
		Run:        checkLatency,
	},
}

// compare runs a comparison with what the catalogue has of each GPU.
func (n *Node) compare(ctx context.Context, what string, differences func(is, known *Board) []string) []Finding {
	expected := "as in the catalogue"
	return n.EachGPU(ctx, expected, func(g *gpu.GPU) []Finding {
		facts, err := n.facts(ctx, g)
		if err != nil {
			return []Finding{Failed(g.PCIAddress, expected, err)}
		}
		is := measure(g, facts)
		known := catalogued(g.ProductName)
		if known == nil {
			return []Finding{Cannot(g.PCIAddress, expected, "the catalogue has no %s; --catalogue-patch writes what is known now", g.ProductName)}
		}
		if what == "profiles" && is.MIG == nil && known.MIG == nil {
			return nil
		}
		found := differences(&is, known)
		observed := "as in " + known.Name + ".yaml"
		if len(found) > 0 {
			observed = strings.Join(found, "; ")
		}
		return []Finding{Expect(g.PCIAddress, len(found) == 0, expected, observed).
			Because("the driver reads these values and does not rely on the catalogue, but it was not tested with them: please report them (--catalogue-patch)")}
	})
}

func checkProduct(ctx context.Context, n *Node) []Finding {
	return n.compare(ctx, "product", func(is, known *Board) []string {
		return differing("", is.Product, known.Product, known.Product.Tags)
	})
}

func checkProfiles(ctx context.Context, n *Node) []Finding {
	return n.compare(ctx, "profiles", func(is, known *Board) []string {
		if is.MIG == nil || known.MIG == nil {
			return []string{fmt.Sprintf("MIG is possible: %t, in the catalogue %t", is.MIG != nil, known.MIG != nil)}
		}
		var found []string
		if is.MIG.MemorySlices != known.MIG.MemorySlices {
			found = append(found, fmt.Sprintf("%d memory slices, in the catalogue %d", is.MIG.MemorySlices, known.MIG.MemorySlices))
		}
		if is.MIG.ResetToSwitch != known.MIG.ResetToSwitch {
			found = append(found, fmt.Sprintf("the MIG mode needs a reset: %t, in the catalogue %t", is.MIG.ResetToSwitch, known.MIG.ResetToSwitch))
		}
		return append(found, differingProfiles(is.MIG.Profiles, known.MIG.Profiles)...)
	})
}

func differingProfiles(is, known []Profile) []string {
	byName := map[string]Profile{}
	for _, p := range known {
		byName[p.Name] = p
	}
	var found []string
	for _, p := range is {
		expected, ok := byName[p.Name]
		delete(byName, p.Name)
		if !ok {
			found = append(found, p.Name+" is not in the catalogue")
			continue
		}
		found = append(found, differing(p.Name+" ", p, expected, expected.Tags)...)
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		found = append(found, name+" is in the catalogue only")
	}
	return found
}

// differing lists the values of a section that were measured and are others than those of
// the catalogue, by their keys there.
func differing(prefix string, is, known any, tags Tags) []string {
	measured, err := fields(is)
	expected, knownErr := fields(known)
	if err := errors.Join(err, knownErr); err != nil {
		return []string{fmt.Sprintf("%scannot be compared: %v", prefix, err)}
	}
	var found []string
	for _, key := range slices.Sorted(maps.Keys(measured)) {
		if key == "source" || key == "except" || measured[key] == expected[key] || expected[key] == "" {
			continue
		}
		source := tags.Source
		if other, ok := tags.Except[key]; ok {
			source = other
		}
		found = append(found, fmt.Sprintf("%s%s %s, in the catalogue %s (%s)", prefix, key, measured[key], expected[key], source))
	}
	return found
}

// fields returns the values of a section as text.
func fields(section any) (map[string]string, error) {
	data, err := json.Marshal(section)
	if err != nil {
		return nil, err
	}
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		return nil, err
	}
	out := map[string]string{}
	for key, value := range raw {
		out[key] = strings.Trim(string(value), `"`)
	}
	return out, nil
}

// slow is the part of the limit of a call above which it is worth a look.
const slow = 10

// slowestShown is how many functions the report names.
const slowestShown = 3

func checkLatency(ctx context.Context, n *Node) []Finding {
	found, err := Ask(ctx, n, NVML, "latency so far", func(context.Context) (latencies, error) {
		return latencies{Limit: n.CallLimit, Functions: n.calls.latencies()}, nil
	})
	if err != nil {
		return []Finding{Failed("", "calls that answer", err)}
	}
	allowed := found.Limit / slow
	expected := fmt.Sprintf("each call of NVML takes %s at most, a part of --nvml-call-limit", allowed)
	if len(found.Functions) == 0 {
		return []Finding{Cannot("", expected, "NVML was not called")}
	}
	var slowest []string
	for _, l := range found.Functions[:min(slowestShown, len(found.Functions))] {
		slowest = append(slowest, fmt.Sprintf("%s %s", l.Function, l.Longest.Round(time.Microsecond)))
	}
	return []Finding{Expect("", found.Functions[0].Longest <= allowed, expected, "longest: "+strings.Join(slowest, ", ")).
		Because("GPUs are taken for hung when their calls take longer than --nvml-call-limit")}
}
