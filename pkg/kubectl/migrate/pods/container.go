// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/config"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	domain         = config.Domain
	resourceGPU    = config.ResourceGPU
	resourceShared = resourceGPU + config.SharedSuffix
	// hamiMemory, in MiB, and hamiCores, in percent, are what HAMi limits a container's part of a GPU by.
	hamiMemory = domain + "gpumem"
	hamiCores  = domain + "gpucores"
	hamiDomain = "hami.io/"
	// maxMemoryMi is more than any GPU has.
	maxMemoryMi = 1 << 24
)

// hamiOthers are what no node has without HAMi and no claim can ask for.
var hamiOthers = map[string]string{
	domain + "gpumem-percentage": "no node has it without HAMi, so that the pod as printed is never scheduled. Write nvidia.com/gpumem, in Mi, instead, and translate it again",
	domain + "priority":          "no node has it without HAMi, so that the pod as printed is never scheduled. Remove it, and translate it again",
}

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
	profile, _ := config.ProfileOf(name)
	return name == resourceGPU || name == resourceShared || profile != ""
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
	profile, shared := config.ProfileOf(d.resource)
	if shared {
		return o.Shared, profile
	}
	return policy.Partition, profile
}

// containers reads all containers of the pod, in the order in which they start.
func (w *workload) containers() ([]*container, error) {
	var all []*container
	for _, list := range []string{"initContainers", "containers"} {
		nodes := document.Get(w.spec, list)
		if nodes == nil || strict.IsNull(nodes) {
			continue
		}
		if nodes.Kind != yaml.SequenceNode {
			return nil, fmt.Errorf("%s.%s: Invalid value: must be a list", w.path, list)
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
	amounts := map[string]int{}
	for _, section := range []string{"limits", "requests"} {
		for key, value := range document.Fields(document.At(c.node, "resources", section)) {
			if err := w.readAmount(c, amounts, key.Value, value, "resources."+section+"["+quote.Name(key.Value)+"]"); err != nil {
				return err
			}
		}
	}
	if memoryMi, percent := amounts[hamiMemory], amounts[hamiCores]; memoryMi+percent > 0 {
		// HAMi takes one GPU where the container names no number.
		at := slices.IndexFunc(c.demands, func(d demand) bool { return d.resource == resourceGPU })
		if at < 0 {
			at, c.demands = len(c.demands), append(c.demands, demand{resource: resourceGPU, count: 1})
		}
		c.demands[at].memoryMi, c.demands[at].percent = memoryMi, percent
		if memoryMi == 0 || percent == 0 {
			w.found.Add(finding.Changed, w.at(c.path+".resources.limits"), "",
				"HAMi limits the memory or the multiprocessors only; of the other, an MPS share has what the sharing policy gives by default, a quarter of the GPU unless it says otherwise: add memory or smPercent to capacity.requests")
		}
	}
	if wrong := validation.IsDNS1123Label(c.name); len(c.demands) > 0 && len(wrong) > 0 {
		return fmt.Errorf("name: Invalid value: %s: %s", quote.Text(c.name), wrong[0])
	}
	return nil
}

// readAmount reads what a container asks for of one resource.
func (w *workload) readAmount(c *container, amounts map[string]int, name string, value *yaml.Node, at string) error {
	if !isGPUResource(name) && !isHAMi(name) {
		if strings.HasPrefix(name, domain) {
			w.found.Add(finding.Lost, w.at(c.path+"."+at), value.Value,
				cmp.Or(hamiOthers[name], "no device class of Partage has this resource; the request is kept, and needs the device plugin that serves it now"))
		}
		return nil
	}
	count, err := amount(name, value)
	if err != nil {
		return fmt.Errorf("%s: Invalid value: %s: %w", at, quote.Text(value.Value), err)
	}
	before, twice := amounts[name]
	amounts[name] = count
	switch {
	case twice && before != count:
		return fmt.Errorf("%s: Invalid value: %d: must be the same as in limits, %d", at, count, before)
	case twice:
	case isHAMi(name):
		w.found.Add(finding.Changed, w.at(c.path+"."+at), value.Value, "is what the MPS share has of memory, in Mi, or of the multiprocessors, in percent")
	case count > 0:
		c.demands = append(c.demands, demand{resource: name, count: count})
	}
	return nil
}

// amount reads a whole number. What is written with an exponent may be too large to be looked at.
func amount(name string, n *yaml.Node) (int, error) {
	const whole = "must be a whole number from 0 on"
	most, why := int64(maxDevices), fmt.Sprintf("a claim has %d devices at most; divide the pod, or give it several claims by hand", maxDevices)
	switch name {
	case hamiMemory:
		most, why = maxMemoryMi, whole+", and not more than any GPU has"
	case hamiCores:
		most, why = 100, "is percent of the multiprocessors, 100 at most: nothing would ever give that"
	}
	if n.Kind != yaml.ScalarNode || len(n.Value) > 20 || strings.ContainsAny(n.Value, "eE") {
		return 0, errors.New(whole)
	}
	quantity, err := resource.ParseQuantity(n.Value)
	number, isWhole := quantity.AsInt64()
	switch {
	case err != nil || !isWhole || number < 0:
		return 0, errors.New(whole)
	case number > most:
		return 0, errors.New(why)
	}
	return int(number), nil
}

// use has a container use its requests of the claim instead of extended resources.
func (c *container) use(claim string, several bool) error {
	resources := document.Get(c.node, "resources")
	if resources == nil || resources.Kind != yaml.MappingNode {
		return nil
	}
	for _, section := range []string{"limits", "requests"} {
		if amounts := document.Get(resources, section); amounts != nil && len(amounts.Content) > 0 {
			document.RemoveIf(amounts, func(name string) bool { return isGPUResource(name) || isHAMi(name) })
			removeEmpty(resources, section)
		}
	}
	if len(c.requests) == 0 {
		removeEmpty(c.node, "resources")
		return nil
	}
	claims, err := listAt(resources, "claims")
	if err != nil {
		return fmt.Errorf("resources: %w", err)
	}
	for _, r := range c.requests {
		use := []string{"name", claim}
		if several {
			use = append(use, "request", r.Name)
		}
		claims.Content = append(claims.Content, object(use...))
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
				w.found.Add(finding.Lost, w.at(fmt.Sprintf("%s.env[%d]", c.path, i)), name+"="+value, why)
			}
		}
	}
}

// text makes a string.
func text(value string) *yaml.Node {
	n := &yaml.Node{}
	n.SetString(value)
	return n
}

// object makes an object of keys and values.
func object(pairs ...string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for _, pair := range pairs {
		n.Content = append(n.Content, text(pair))
	}
	return n
}

// listAt returns the list at a key, and makes it if it is not there.
func listAt(n *yaml.Node, key string) (*yaml.Node, error) {
	list := document.Get(n, key)
	switch {
	case list == nil:
		list = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		n.Content = append(n.Content, text(key), list)
	case strict.IsNull(list) || strict.IsEmptyList(list):
		*list = yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	case list.Kind != yaml.SequenceNode:
		return nil, fmt.Errorf("%s: Invalid value: must be a list", key)
	}
	return list, nil
}

// removeEmpty removes an object or list in which nothing is left.
func removeEmpty(n *yaml.Node, key string) bool {
	if value := document.Get(n, key); value != nil && len(value.Content) == 0 {
		document.Remove(n, key)
		return true
	}
	return false
}
