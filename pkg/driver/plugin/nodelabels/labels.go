// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package nodelabels writes labels about GPUs to the node, with the names and values of
// NVIDIA's GPU feature discovery, for manifests that select nodes by them.
//
//	labels.go  which labels describe GPUs
//	writer.go  keeps them on the node
package nodelabels

import (
	"fmt"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Labels of a node. GPU feature discovery has more: those that are missing here say what does
// not hold with Partage, such as how often a GPU is shared, or make NVIDIA's operator and
// device plugin start pods on the node.
const (
	Product      = "nvidia.com/gpu.product"
	Count        = "nvidia.com/gpu.count"
	Memory       = "nvidia.com/gpu.memory"
	Family       = "nvidia.com/gpu.family"
	ComputeMajor = "nvidia.com/gpu.compute.major"
	ComputeMinor = "nvidia.com/gpu.compute.minor"
)

// Of returns the labels for a node with these GPUs. Each is true of all of them: where GPUs
// differ in something, no label says it. Without GPUs there are none.
func Of(gpus []*gpu.GPU) map[string]string {
	if len(gpus) == 0 {
		return map[string]string{}
	}
	labels := of(gpus[0])
	for _, g := range gpus[1:] {
		other := of(g)
		for key, value := range labels {
			if other[key] != value {
				delete(labels, key)
			}
		}
	}
	labels[Count] = fmt.Sprint(len(gpus))
	return labels
}

// of returns the labels that describe one GPU.
func of(g *gpu.GPU) map[string]string {
	labels := map[string]string{
		Product: product(g.ProductName),
		Family:  strings.ReplaceAll(strings.ToLower(g.Architecture), " ", "-"),
	}
	if mebibytes := g.Resources.MemoryBytes >> 20; mebibytes > 0 {
		labels[Memory] = fmt.Sprint(mebibytes)
	}
	if g.ComputeCapability.Major > 0 {
		labels[ComputeMajor] = fmt.Sprint(g.ComputeCapability.Major)
		labels[ComputeMinor] = fmt.Sprint(g.ComputeCapability.Minor)
	}
	for key, value := range labels {
		if value == "" || len(validation.IsValidLabelValue(value)) > 0 {
			delete(labels, key)
		}
	}
	return labels
}

var notInProduct = regexp.MustCompile(`[^A-Za-z0-9_. -]`)

// product makes a label's value of a product's name, as GPU feature discovery does.
func product(name string) string {
	return strings.Join(strings.Fields(notInProduct.ReplaceAllString(name, "")), "-")
}
