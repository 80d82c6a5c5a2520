// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	domain         = "nvidia.com/"
	resourceGPU    = domain + "gpu"
	resourceShared = domain + "gpu.shared"
	sharedSuffix   = ".shared"
	// hamiMemory, in MiB, and hamiCores, in percent, are what HAMi limits a container's part of a GPU by.
	hamiMemory    = domain + "gpumem"
	hamiCores     = domain + "gpucores"
	maxContainers = 1000
)

// migResource matches the names that the device plugin has for partitions.
var migResource = regexp.MustCompile(`^nvidia\.com/mig-([0-9]{1,2}g\.[0-9]{1,4}gb)((?:\.[a-z]{1,8}){0,2}?|-[a-z]{1,8})(\.shared)?$`)

// container is a container that may ask for GPUs.
type container struct {
	node *yaml.Node
	name string
	// path is where it is in the pod's spec.
	path string
	// ends says that it is an init container that ends before others start.
	ends     bool
	demands  []demand
	requests []*request
}

// demand is a request for an extended resource.
type demand struct {
	resource string
	count    int
	// memoryMi and percent make it an MPS share of that size.
	memoryMi, percent int
}

// isGPUResource reports whether a name is one of the device plugin's.
func isGPUResource(name string) bool {
	return name == resourceGPU || name == resourceShared || migResource.MatchString(name)
}

// isHAMi reports whether a name is of what HAMi limits.
func isHAMi(name string) bool { return name == hamiMemory || name == hamiCores }

// device returns which devices a resource stands for.
func (d demand) device(o Options) (kind policy.Kind, profile string) {
	if d.memoryMi > 0 || d.percent > 0 {
		return policy.MPS, ""
	}
	switch d.resource {
	case resourceGPU:
		return o.GPU, o.GPUProfile
	case resourceShared:
		return o.Shared, ""
	}
	parts := migResource.FindStringSubmatch(d.resource)
	if parts == nil {
		return o.GPU, ""
	}
	profile = parts[1]
	if variant := parts[2]; strings.HasPrefix(variant, ".") {
		profile += "+" + variant[1:]
	} else {
		profile += variant
	}
	if parts[3] == sharedSuffix {
		return o.Shared, profile
	}
	return policy.Partition, profile
}

// containers reads all containers of the pod, in the order in which they start.
func (w *workload) containers() ([]*container, error) {
	var all []*container
	for _, list := range []string{"initContainers", "containers"} {
		nodes := document.Get(w.spec, list)
		if nodes == nil || isNull(nodes) {
			continue
		}
		if nodes.Kind != yaml.SequenceNode {
			return nil, fmt.Errorf("%s.%s: Invalid value: must be a list", w.path, list)
		}
		if len(nodes.Content) > maxContainers {
			return nil, fmt.Errorf("%s.%s: Too many: %d: must have at most %d items", w.path, list, len(nodes.Content), maxContainers)
		}
		for i, n := range nodes.Content {
			c := &container{node: n, path: fmt.Sprintf("%s[%d]", list, i), name: document.Text(n, "name")}
			c.ends = list == "initContainers" && document.Text(n, "restartPolicy") != "Always"
			if err := w.readDemands(c); err != nil {
				return nil, fmt.Errorf("%s.%s: %w", w.path, c.path, err)
			}
			all = append(all, c)
		}
	}
	return all, nil
}

// readDemands reads what a container asks for. Limits and requests are the same for extended
// resources; either may be left out.
func (w *workload) readDemands(c *container) error {
	if c.node.Kind != yaml.MappingNode {
		return errors.New("must be an object")
	}
	seen := map[string]int{}
	for _, section := range []string{"limits", "requests"} {
		for key, value := range document.Fields(document.At(c.node, "resources", section)) {
			if err := w.readAmount(c, seen, key.Value, value, "resources."+section+"["+quote.Name(key.Value)+"]"); err != nil {
				return err
			}
		}
	}
	c.limit(seen[hamiMemory], seen[hamiCores])
	if len(c.demands) > 0 {
		if wrong := validation.IsDNS1123Label(c.name); len(wrong) > 0 {
			return fmt.Errorf("name: Invalid value: %s: %s", quote.Text(c.name), wrong[0])
		}
	}
	return nil
}

// readAmount reads what a container asks for of one resource.
func (w *workload) readAmount(c *container, seen map[string]int, name string, value *yaml.Node, at string) error {
	before, twice := seen[name]
	switch {
	case isHAMi(name):
		size, whole := wholeNumber(value)
		if name == hamiCores && whole && size > 100 {
			return fmt.Errorf("%s: Invalid value: %s: is percent of the multiprocessors, 100 at most: nothing would ever give that", at, quote.Text(value.Value))
		}
		if !whole || size > maxHAMi {
			return fmt.Errorf("%s: Invalid value: %s: must be a whole number from 0 on", at, quote.Text(value.Value))
		}
		if !twice {
			w.findings().Changed(w.at(c.path+"."+at), value.Value, "is what the MPS share has of memory, in Mi, or of the multiprocessors, in percent")
		}
		seen[name] = int(size)
		return nil
	case !isGPUResource(name):
		if strings.HasPrefix(name, domain) {
			w.findings().Lost(w.at(c.path+"."+at), value.Value, "no device class of Partage has this resource; the request is kept")
		}
		return nil
	}
	count, err := amount(value)
	if err != nil {
		return fmt.Errorf("%s: Invalid value: %s: %w", at, quote.Text(value.Value), err)
	}
	if twice && before != count {
		return fmt.Errorf("%s: Invalid value: %d: must be the same as in limits, %d", at, count, before)
	}
	seen[name] = count
	if !twice && count > 0 {
		c.demands = append(c.demands, demand{resource: name, count: count})
	}
	return nil
}

// maxHAMi is more than any GPU has.
const maxHAMi = 1 << 24

// limit makes shares of what HAMi limits. It takes one GPU where the container names no number.
func (c *container) limit(memoryMi, percent int) {
	if memoryMi+percent == 0 {
		return
	}
	at := slices.IndexFunc(c.demands, func(d demand) bool { return d.resource == resourceGPU })
	if at < 0 {
		c.demands = append(c.demands, demand{resource: resourceGPU, count: 1})
		at = len(c.demands) - 1
	}
	c.demands[at].memoryMi, c.demands[at].percent = memoryMi, percent
}

// wholeNumber reads one from 0 on. What is written with an exponent may be too large to be looked at.
func wholeNumber(n *yaml.Node) (int64, bool) {
	if n.Kind != yaml.ScalarNode || len(n.Value) > 20 || strings.ContainsAny(n.Value, "eE") {
		return 0, false
	}
	quantity, err := resource.ParseQuantity(n.Value)
	if err != nil {
		return 0, false
	}
	number, whole := quantity.AsInt64()
	return number, whole && number >= 0
}

// amount reads a whole number of devices.
func amount(n *yaml.Node) (int, error) {
	count, whole := wholeNumber(n)
	if !whole {
		return 0, errors.New("must be a whole number of devices from 0 on")
	}
	if count > maxDevices {
		return 0, fmt.Errorf("a claim has %d devices at most; divide the pod, or give it several claims by hand", maxDevices)
	}
	return int(count), nil
}

// use has a container use its requests of the claim instead of extended resources.
func (c *container) use(claim string, several bool) error {
	resources := document.Get(c.node, "resources")
	if resources == nil || resources.Kind != yaml.MappingNode {
		return nil
	}
	for _, section := range []string{"limits", "requests"} {
		amounts := document.Get(resources, section)
		if amounts == nil || amounts.Kind != yaml.MappingNode {
			continue
		}
		had := len(amounts.Content)
		removeIf(amounts, func(name string) bool { return isGPUResource(name) || isHAMi(name) })
		if len(amounts.Content) == 0 && had > 0 {
			document.Remove(resources, section)
		}
	}
	if len(c.requests) == 0 {
		if len(resources.Content) == 0 {
			document.Remove(c.node, "resources")
		}
		return nil
	}
	claims, err := listAt(resources, "claims")
	if err != nil {
		return fmt.Errorf("resources: %w", err)
	}
	for _, r := range c.requests {
		if !several {
			claims.Content = append(claims.Content, object("name", claim))
			continue
		}
		claims.Content = append(claims.Content, object("name", claim, "request", r.Name))
	}
	return nil
}

// variables of a container's environment that tell NVIDIA's runtime, CUDA or MPS what a
// claim says.
var variables = map[string]string{
	"NVIDIA_VISIBLE_DEVICES":            "kept: where NVIDIA's runtime is the default one, it adds GPUs by this variable, whatever the claim has. Remove it",
	"CUDA_VISIBLE_DEVICES":              "kept: numbers count the devices of the claim from 0, and UUIDs are those of one node. Remove it unless it chooses among them",
	"CUDA_MPS_PIPE_DIRECTORY":           "kept: the daemon of a claim is at /tmp/nvidia-mps, and another folder leads around its limits. Remove it",
	"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "kept: the claim sets it, by smPercent in capacity.requests. Remove it",
	"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT":  "kept: the claim sets it, by memory in capacity.requests. Remove it",
}

// flagEnvironment tells which variables get a container GPUs without a claim.
func (w *workload) flagEnvironment(containers []*container) {
	for _, c := range containers {
		for i, variable := range document.List(c.node, "env") {
			name, value := document.Text(variable, "name"), document.Text(variable, "value")
			if why := variables[name]; why != "" && value != "void" && value != "none" {
				w.findings().Lost(w.at(fmt.Sprintf("%s.env[%d]", c.path, i)), name+"="+value, why)
			}
		}
	}
}
