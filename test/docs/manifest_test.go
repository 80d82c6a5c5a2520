// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/dynamic-resource-allocation/cel"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

const driver = "gpu.nvidia.com"

// classes are those of the chart. Pages and demos make others in the domains of ownClass.
var classes = []string{"gpu.nvidia.com", "mig.nvidia.com", "mps.partage.dev", "timeslice.partage.dev", "observer.partage.dev"}

var ownClass = regexp.MustCompile(`\.example\.com$|\.demo\.partage\.dev$|^mig-[0-9a-z.-]+\.`)

// foreignGroups are API groups that this module does not have. Templates of pods in their
// objects are looked at all the same.
var foreignGroups = []string{"ray.io", "kubescheduler.config.k8s.io", "kueue.x-k8s.io", "config.kueue.x-k8s.io", "monitoring.coreos.com", "karpenter.sh", "nvidia.com", "karpenter.k8s.aws", "policy.partage.dev"}

var strict = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// checkManifest: an object decodes strictly, and what is ours in it means something.
func checkManifest(content map[string]any, document string) error {
	version, _ := content["apiVersion"].(string)
	group, _, _ := strings.Cut(version, "/")
	if slices.Contains(foreignGroups, group) {
		return checkTemplates(content)
	}
	if version == api.Version {
		return checkConfig(runtime.RawExtension{Raw: asJSON(content)})
	}
	object, _, err := strict.Decode([]byte(document), nil, nil)
	if err != nil {
		return fmt.Errorf("decode it: %w", err)
	}
	switch o := object.(type) {
	case *resourceapi.ResourceClaim:
		return checkClaim(o.Spec.Devices)
	case *resourceapi.ResourceClaimTemplate:
		return checkClaim(o.Spec.Spec.Devices)
	case *resourceapi.DeviceClass:
		var configs []resourceapi.DeviceClaimConfiguration
		for _, c := range o.Spec.Config {
			configs = append(configs, resourceapi.DeviceClaimConfiguration{DeviceConfiguration: c.DeviceConfiguration})
		}
		return errors.Join(checkSelectors(o.Spec.Selectors), checkConfigs(configs))
	case *corev1.Pod:
		return checkPod(o.Spec)
	}
	return checkTemplates(content)
}

// checkPod: containers use claims that their pod has.
func checkPod(pod corev1.PodSpec) error {
	has := map[string]bool{}
	for _, c := range pod.ResourceClaims {
		has[c.Name] = true
	}
	var all []error
	for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
		for _, c := range container.Resources.Claims {
			if !has[c.Name] {
				all = append(all, fmt.Errorf("container %s uses claim %s, which its pod does not have", container.Name, c.Name))
			}
		}
	}
	return errors.Join(all...)
}

// checkTemplates: templates of pods anywhere in an object decode strictly.
func checkTemplates(content any) error {
	var all []error
	switch c := content.(type) {
	case map[string]any:
		for key, value := range c {
			if template, is := value.(map[string]any); is && key == "template" && template["spec"] != nil {
				var pod corev1.PodTemplateSpec
				all = append(all, strictly(value, &pod), checkPod(pod.Spec))
				continue
			}
			all = append(all, checkTemplates(value))
		}
	case []any:
		for _, value := range c {
			all = append(all, checkTemplates(value))
		}
	}
	return errors.Join(all...)
}

// strictly decodes content into a value without unknown fields.
func strictly(content, into any) error {
	if err := yaml.UnmarshalStrict(asJSON(content), into); err != nil {
		return fmt.Errorf("decode it: %w", err)
	}
	return nil
}

func asJSON(content any) []byte {
	document, err := yaml.Marshal(content)
	if err != nil {
		return nil
	}
	if document, err = yaml.YAMLToJSON(document); err != nil {
		return nil
	}
	return document
}

// checkPart: a part of a claim, of a pod, of a policy or of a configuration, by its first field.
func checkPart(content map[string]any, document string) error {
	first, _, _ := strings.Cut(firstLine(document), ":")
	switch strings.TrimPrefix(first, "- ") {
	case "spec":
		var part struct {
			Spec resourceapi.ResourceClaimTemplateSpec `json:"spec"`
		}
		if strictly(content, &part) == nil {
			return checkClaim(part.Spec.Spec.Devices)
		}
		var claim struct {
			Spec resourceapi.ResourceClaimSpec `json:"spec"`
		}
		return errors.Join(strictly(content, &claim), checkClaim(claim.Spec.Devices))
	case "devices":
		var part resourceapi.ResourceClaimSpec
		return errors.Join(strictly(content, &part), checkClaim(part.Devices))
	case "requests", "constraints", "config":
		var part resourceapi.DeviceClaim
		return errors.Join(strictly(content, &part), checkClaim(part))
	case "exactly", "firstAvailable":
		var part resourceapi.DeviceRequest
		return errors.Join(strictly(content, &part), checkRequest(part))
	case "deviceClassName", "capacity", "selectors", "count", "tolerations":
		var part resourceapi.ExactDeviceRequest
		return errors.Join(strictly(content, &part), checkRequest(resourceapi.DeviceRequest{Exactly: &part}))
	case "resources", "image", "command", "env":
		return strictly(content, &corev1.Container{})
	case "containers", "initContainers", "resourceClaims", "nodeSelector", "affinity":
		return strictly(content, &corev1.PodSpec{})
	case "sharing":
		content["apiVersion"], content["kind"] = api.Version, "GpuConfig"
		return checkConfig(runtime.RawExtension{Raw: asJSON(content)})
	case "rules", "default", "health":
		return checkPolicy(content)
	}
	return fmt.Errorf("it begins with %s, which is no part of anything known here; if it is for another program, say so in its first line: # values of …", first)
}

func firstLine(document string) string {
	for line := range strings.Lines(document) {
		if text := strings.TrimSpace(line); text != "" && !strings.HasPrefix(text, "#") {
			return text
		}
	}
	return ""
}

func checkClaim(claim resourceapi.DeviceClaim) error {
	all := []error{checkConfigs(claim.Config)}
	for _, r := range claim.Requests {
		all = append(all, checkRequest(r))
	}
	for _, c := range claim.Constraints {
		if c.MatchAttribute != nil {
			if name, is := strings.CutPrefix(string(*c.MatchAttribute), driver+"/"); is {
				all = append(all, isAttribute(name))
			}
		}
	}
	return errors.Join(all...)
}

func checkRequest(r resourceapi.DeviceRequest) error {
	type asked struct {
		class     string
		selectors []resourceapi.DeviceSelector
		capacity  *resourceapi.CapacityRequirements
	}
	var all []asked
	if e := r.Exactly; e != nil {
		all = append(all, asked{e.DeviceClassName, e.Selectors, e.Capacity})
	}
	for _, s := range r.FirstAvailable {
		all = append(all, asked{s.DeviceClassName, s.Selectors, s.Capacity})
	}
	var wrong []error
	for _, a := range all {
		if a.class != "" && !slices.Contains(classes, a.class) && !ownClass.MatchString(a.class) {
			wrong = append(wrong, fmt.Errorf("no class %s", a.class))
		}
		wrong = append(wrong, checkSelectors(a.selectors))
		if a.capacity != nil {
			for name := range a.capacity.Requests {
				wrong = append(wrong, isCapacity(string(name)))
			}
		}
	}
	return errors.Join(wrong...)
}

func checkConfigs(configs []resourceapi.DeviceClaimConfiguration) error {
	var all []error
	for _, c := range configs {
		if c.Opaque == nil || c.Opaque.Driver != driver {
			all = append(all, errors.New("a configuration is not for "+driver))
			continue
		}
		all = append(all, checkConfig(c.Opaque.Parameters))
	}
	return errors.Join(all...)
}

// checkConfig: the driver takes an opaque configuration.
func checkConfig(raw runtime.RawExtension) error {
	config, err := api.Decode(raw)
	if err != nil {
		return fmt.Errorf("decode a configuration: %w", err)
	}
	if err := config.Validate(); err != nil {
		return fmt.Errorf("validate a configuration: %w", err)
	}
	return nil
}

var (
	attributeUse = regexp.MustCompile(`attributes\['gpu\.nvidia\.com'\]\.\??(\w+)`)
	capacityUse  = regexp.MustCompile(`capacity\['gpu\.nvidia\.com'\]\.\??(\w+)`)
)

// checkSelectors: the scheduler compiles them, and devices have what they read.
func checkSelectors(selectors []resourceapi.DeviceSelector) error {
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	var all []error
	for _, s := range selectors {
		if s.CEL == nil {
			continue
		}
		if result := compiler.CompileCELExpression(s.CEL.Expression, cel.Options{}); result.Error != nil {
			all = append(all, fmt.Errorf("compile %s: %w", s.CEL.Expression, result.Error))
		}
		for _, found := range attributeUse.FindAllStringSubmatch(s.CEL.Expression, -1) {
			all = append(all, isAttribute(found[1]))
		}
		for _, found := range capacityUse.FindAllStringSubmatch(s.CEL.Expression, -1) {
			all = append(all, isCapacity(found[1]))
		}
	}
	return errors.Join(all...)
}

// names are those of attributes and capacities that devices have.
type names struct{ attributes, capacities []string }

// published has the names that the driver publishes for a GPU with MIG, in all that it can be, that has a near neighbour.
var published = sync.OnceValues(func() (names, error) {
	resources := gpu.Resources{MemoryBytes: 80 << 30, Multiprocessors: 132}
	one := gpu.GPU{
		PCIAddress: "0000:1b:00.0", PCIeSwitch: "0000:17:00.0", NVLink: &gpu.NVLink{Switches: []string{gpu.UnknownSwitch}}, UUID: "GPU-1", ProductName: "NVIDIA H100", Architecture: "Hopper", AddressingMode: "HMM",
		ComputeCapability: gpu.Version{Major: 9}, Resources: resources,
		MIG: &gpu.MIG{Dynamic: true, MemorySlices: 1, Profiles: []gpu.Profile{{
			ID: 19, Name: "1g.80gb", Slices: 1, MaxInstances: 1, Resources: resources, Placements: []gpu.Placement{{Start: 0, Size: 1}},
		}}},
	}
	other := one
	other.PCIAddress, other.UUID = "0000:1c:00.0", "GPU-2"
	inventory, err := device.NewInventory(&gpu.Node{
		DriverVersion: "580.95.05", CUDAVersion: gpu.Version{Major: 13}, GPUs: []gpu.GPU{one, other},
	}, device.Terms{Policy: policy.Builtin()})
	if err != nil {
		return names{}, fmt.Errorf("make the devices of a GPU: %w", err)
	}
	var n names
	for _, slice := range inventory.ResourceSlices(device.Options{
		Driver: driver, Pool: "node", NodeName: "node", PartitionableDevices: true, ConsumableCapacity: true,
	}) {
		for _, d := range slice.Spec.Devices {
			for name := range d.Attributes {
				n.attributes = append(n.attributes, string(name))
			}
			for name := range d.Capacity {
				n.capacities = append(n.capacities, string(name))
			}
		}
	}
	slices.Sort(n.attributes)
	slices.Sort(n.capacities)
	return names{slices.Compact(n.attributes), slices.Compact(n.capacities)}, nil
})

func isAttribute(name string) error {
	n, err := published()
	if err == nil && !slices.Contains(n.attributes, name) {
		err = fmt.Errorf("devices have no attribute %s, only %s", name, strings.Join(n.attributes, ", "))
	}
	return err
}

func isCapacity(name string) error {
	n, err := published()
	if err == nil && !slices.Contains(n.capacities, name) {
		err = fmt.Errorf("devices have no capacity %s, only %s", name, strings.Join(n.capacities, ", "))
	}
	return err
}
