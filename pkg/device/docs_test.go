// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/docs/source"
	"github.com/partage-dev/partage/test/expect"
)

var taintKey = regexp.MustCompile("`(?:gpu\\.nvidia\\.com|…)/([a-z-]+)`([^`(]*)(?:\\(`([A-Za-z]+)`\\))?")

// TestTaintsPage: docs/reference/taints.md has all taints, with their effects if these are not
// NoSchedule, and a star for those that the policy can change. What they mean and what to do is
// written by hand.
func TestTaintsPage(t *testing.T) {
	settable := policy.Builtin().Health.Conditions
	want := map[string]string{}
	for _, c := range source.Constants(source.Files(t, "."), "Reason") {
		note := ""
		effect, isSettable := settable[c.Value]
		// An XID has the effect that the policy, or else the table, has for its number.
		if isSettable || c.Value == string(XID) {
			note = "*"
		}
		if c.Value == string(Opened) {
			effect, isSettable = policy.EffectNone, true // always
		}
		if isSettable && effect != policy.EffectNoSchedule {
			note += fmt.Sprintf(" (`%s`)", effect)
		}
		want[c.Value] = note
	}
	found := 0
	for _, row := range page.Rows(t, "docs/reference/taints.md", "key", "the device", "it goes away", "what to do") {
		for _, key := range taintKey.FindAllStringSubmatch(row[0], -1) {
			got := ""
			if strings.Contains(key[2], "*") {
				got = "*"
			}
			if key[3] != "" {
				got += fmt.Sprintf(" (`%s`)", key[3])
			}
			note, exists := want[key[1]]
			if !exists {
				t.Errorf("there is no taint %s", key[1])
			} else if note != got {
				t.Errorf("the taint %s is followed by %q, want %q", key[1], got, note)
			}
			delete(want, key[1])
			found++
		}
		if slices.Contains(row, "") {
			t.Errorf("%s is not explained", row[0])
		}
	}
	for name, note := range want {
		t.Errorf("the page lacks | `gpu.nvidia.com/%s` %s | … | … | … |", name, note)
	}
	if t.Logf("%d cases", found); found < 18 {
		t.Errorf("only %d taints", found)
	}
}

// attributeTexts say what attributes mean.
var attributeTexts = map[string]string{
	"type":                            "the kind of device",
	"uuid":                            "the UUID of the GPU, or `MIG-…` for a partition that another tool created; empty for a partition that does not exist yet, and for shares of one",
	"parentUUID":                      "the UUID of the GPU, also for the GPU itself",
	"profile":                         "the MIG profile of the partition, or of the partition that is shared; empty for a whole GPU and shares of it ([not absent](#selectors-that-look-for-profile))",
	"productName":                     "the name of the model",
	"brand":                           "the brand, spelled as NVIDIA's DRA driver does: `Nvidia`, `NvidiaRTX`, `Tesla`, …; `Unknown` where the NVIDIA driver does not tell",
	"architecture":                    "the generation of the GPU",
	"cudaComputeCapability":           "the compute capability of CUDA",
	"driverVersion":                   "the version of the NVIDIA driver; a version has no leading zeros",
	"cudaDriverVersion":               "the latest version of CUDA that the NVIDIA driver supports",
	"addressingMode":                  "`HMM`, `ATS` or `None`: how the GPU addresses the memory of the host. Absent where the NVIDIA driver does not report it",
	"isolation":                       "how well the claims on the device are isolated, see below",
	"memoryLimit":                     "who holds a claim to its part of the memory: `driver`, `server`, `client` or `none`, see below; empty for what one claim has alone",
	ExtendedResources:                 "always `true`: pods can have the device by an extended resource such as `nvidia.com/gpu`. Absent where the node's kubelet is older than 1.36, or its version is unknown ([more](../how-to/request/without-a-claim.md#nodes-with-an-older-kubelet))",
	"nvlinkDomain":                    "what the GPUs of a node that reach each other over NVLink have in common: a UUID of one of them, or `<cluster UUID>.<clique ID>` where NVLink spans nodes, as in the node label `nvidia.com/gpu.clique`. Absent on GPUs without such a neighbour, and where it is unknown ([more](../how-to/request/close-together.md#nvlink))",
	"pcieSwitch":                      "the PCI address of the upstream port of the PCIe switch that the GPU shares with other GPUs of its node. Absent on others ([more](../how-to/request/close-together.md#pcie))",
	"resource.kubernetes.io/pciBusID": "the PCI address of the GPU",
	"resource.kubernetes.io/pcieRoot": "the PCIe root to which the GPU is connected. Absent where the host does not report it",
	"resource.kubernetes.io/numaNode": "the NUMA node to which the GPU is connected. Absent where the host does not report it",
}

// TestAttributesPage writes the attributes of an H100 with partitions into docs/reference/devices.md.
func TestAttributesPage(t *testing.T) {
	devices := withNeighbour(t)
	table := page.NewTable("name", "type", "devices", "on an H100", "meaning")
	names := ordered(devices, func(d resourceapi.Device) []string { return keysOf(d.Attributes) })
	for _, name := range names {
		var kind string
		var values, types []string
		for _, d := range devices {
			attribute, has := d.Attributes[resourceapi.QualifiedName(name)]
			if !has {
				continue
			}
			value, of := valueOf(attribute)
			kind = of
			if !slices.Contains(values, value) {
				values = append(values, value)
			}
			if ofDevice, _ := valueOf(d.Attributes["type"]); !slices.Contains(types, ofDevice) {
				types = append(types, ofDevice)
			}
		}
		slices.Sort(types)
		having := page.Codes(types)
		if len(types) == len(namesOfKind) {
			having = "all"
		}
		shown := page.Codes(values[:min(len(values), 5)])
		if len(values) > 5 {
			shown += ", …"
		}
		if attributeTexts[name] == "" {
			t.Errorf("the attribute %s is not described", name)
		}
		table.Row(page.Code(name), kind, having, shown, attributeTexts[name])
	}
	expect.Same(t, len(names), len(attributeTexts), "attributes that are described")
	page.Generated(t, *update, "docs/reference/devices.md", table.String())
}

// capacityTexts say what capacities mean.
var capacityTexts = map[string]string{
	"memory":          "memory that programs can have; of a whole GPU also what NVIDIA's driver keeps of it",
	"multiprocessors": "multiprocessors (SMs)",
	"smPercent":       "the part of the multiprocessors that the claims on the device have together, in percent",
	"shares":          "how many claims can have the device",
	"copyEngines":     "engines that copy memory",
	"decoders":        "engines that decode video (NVDEC)",
	"encoders":        "engines that encode video (NVENC)",
	"jpegEngines":     "engines that decode JPEG",
	"ofaEngines":      "optical flow accelerators",
}

// TestCapacitiesPage writes the capacities of an H100 into docs/reference/devices.md.
func TestCapacitiesPage(t *testing.T) {
	address := "gpu-0000-1b-00-0"
	shown := []string{"", "-mig-1g10gb-0", "-mps", "-timeslice", "-observer"}
	table := page.NewTable("name", "whole GPU", "partition `1g.10gb`", "MPS share", "time-slice share", "observer", "meaning")
	devices := published(t, loadNode(t, "h100-80-sxm"))
	names := ordered(devices, func(d resourceapi.Device) []string { return keysOf(d.Capacity) })
	for _, name := range names {
		row := []string{page.Code(name)}
		for _, suffix := range shown {
			at := slices.IndexFunc(devices, func(d resourceapi.Device) bool { return d.Name == address+suffix })
			if at < 0 {
				t.Fatalf("there is no device %s%s", address, suffix)
			}
			capacity, has := devices[at].Capacity[resourceapi.QualifiedName(name)]
			if !has {
				row = append(row, "–")
				continue
			}
			row = append(row, capacity.Value.String())
		}
		if capacityTexts[name] == "" {
			t.Errorf("the capacity %s is not described", name)
		}
		table.Row(append(row, capacityTexts[name])...)
	}
	expect.Same(t, len(names), len(capacityTexts), "capacities that are described")
	page.Generated(t, *update, "docs/reference/devices.md", table.String())
}

// TestBoardsPage writes what is published for one GPU of each model into docs/reference/devices.md.
func TestBoardsPage(t *testing.T) {
	table := page.NewTable("GPU", "architecture", "memory", "devices", "MIG profiles")
	for _, b := range testBoards(t) {
		devices := published(t, b.node)
		name := b.gpu().ProductName
		if mig := b.gpu().MIG; mig != nil && !mig.Dynamic {
			name += map[bool]string{true: ", MIG mode on", false: ", MIG mode off"}[mig.Enabled]
		}
		var kinds, profiles []string
		for _, d := range devices {
			kind, _ := valueOf(d.Attributes["type"])
			if !slices.Contains(kinds, kind) {
				kinds = append(kinds, kind)
			}
			if profile, _ := valueOf(d.Attributes["profile"]); profile != "" && !slices.Contains(profiles, profile) {
				profiles = append(profiles, profile)
			}
		}
		slices.Sort(kinds)
		memory := resource.NewQuantity(int64(b.gpu().Resources.MemoryBytes), resource.BinarySI)
		offered := "none"
		if len(profiles) > 0 {
			offered = page.Codes(profiles)
		}
		table.Row(name, b.gpu().Architecture, memory.String(), fmt.Sprintf("%d: %s", len(devices), page.Codes(kinds)), offered)
	}
	page.Generated(t, *update, "docs/reference/devices.md", table.String())
}

// published are the devices of a node with one GPU, as they are without a policy.
func published(t *testing.T, node *gpu.Node) []resourceapi.Device {
	t.Helper()
	var devices []resourceapi.Device
	for _, slice := range inventoryOf(t, node, Terms{ExtendedResources: true}).ResourceSlices(testOptions) {
		devices = append(devices, slice.Spec.Devices...)
	}
	return devices
}

// ordered are all names that devices have, in the order of the texts about them: sorted, those
// of other domains last.
func ordered(devices []resourceapi.Device, of func(resourceapi.Device) []string) []string {
	var all []string
	for _, d := range devices {
		all = append(all, of(d)...)
	}
	slices.SortFunc(all, func(a, b string) int {
		return cmp.Or(cmp.Compare(strings.Count(a, "/"), strings.Count(b, "/")), cmp.Compare(a, b))
	})
	return slices.Compact(all)
}

func keysOf[V any](m map[resourceapi.QualifiedName]V) []string {
	var names []string
	for name := range m {
		names = append(names, string(name))
	}
	return names
}

// valueOf is the value of an attribute as text, and its type.
func valueOf(a resourceapi.DeviceAttribute) (value, kind string) {
	switch {
	case a.StringValue != nil:
		return *a.StringValue, "string"
	case a.VersionValue != nil:
		return *a.VersionValue, "version"
	case a.IntValue != nil:
		return strconv.FormatInt(*a.IntValue, 10), "int"
	case a.BoolValue != nil:
		return strconv.FormatBool(*a.BoolValue), "bool"
	}
	return "", ""
}
