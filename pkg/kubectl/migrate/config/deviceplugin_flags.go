// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/strict"
)

// Why the device plugin's flags are not translated.
const (
	whyCDI     = "containers get their devices by CDI, and nothing else"
	whyLabels  = "it is of GPU feature discovery, which can go on running for those who read its labels"
	whyMachine = "what a host has beside GPUs is not for Partage to mount: use the driver of that device"
)

// flagReasons are the flags of the device plugin and of GPU feature discovery, beside
// migStrategy.
var flagReasons = map[string]string{
	"failOnInitError":         "the plugin runs everywhere, and is ready on nodes without a GPU",
	"mpsRoot":                 "set the chart's value host.mpsDir, if its default does not do",
	"nvidiaDriverRoot":        "set the chart's value host.driverRoot to it",
	"nvidiaDevRoot":           "set the chart's value host.devRoot to it, if auto does not find it",
	"gdrcopyEnabled":          whyMachine,
	"gdsEnabled":              whyMachine,
	"mofedEnabled":            whyMachine,
	"useNodeFeatureAPI":       whyLabels,
	"deviceDiscoveryStrategy": "GPUs are found through NVML",
}

var pluginFlagReasons = map[string]string{
	"passDeviceSpecs":               whyCDI,
	"deviceListStrategy":            whyCDI,
	"deviceIDStrategy":              whyCDI,
	"cdiAnnotationPrefix":           whyCDI,
	"nvidiaCTKPath":                 whyCDI,
	"containerDriverRoot":           "set the chart's value host.driverRoot to where the driver is on the host",
	"sharedDevicesAllocationPolicy": "the scheduler takes the first GPU with room, and so fills one after the other",
}

var discoveryFlagReasons = map[string]string{
	"oneshot": whyLabels, "noTimestamp": whyLabels, "sleepInterval": whyLabels, "outputFile": whyLabels, "machineTypeFile": whyLabels,
}

func (r *reader) flags(n *yaml.Node, at *field.Path, plugin *devicePlugin) {
	fields := r.lost(flagReasons)
	fields["migStrategy"] = func(n *yaml.Node, at *field.Path) {
		strategy, ok := strict.OneOf(&r.Reader, n, at, []string{strategyNone, strategySingle, strategyMixed, ""})
		if ok {
			plugin.migStrategy = cmp.Or(strategy, strategyNone)
		}
	}
	fields["plugin"] = func(n *yaml.Node, at *field.Path) { r.object(n, at, r.lost(pluginFlagReasons), r.unknown) }
	fields["gfd"] = func(n *yaml.Node, at *field.Path) { r.object(n, at, r.lost(discoveryFlagReasons), r.unknown) }
	r.object(n, at, fields, r.unknown)
}

// lost returns readers that tell why fields are not translated.
func (r *reader) lost(reasons map[string]string) map[string]strict.Read {
	fields := map[string]strict.Read{}
	for name, why := range reasons {
		fields[name] = func(n *yaml.Node, at *field.Path) { r.found.Lost(r.path(at), text(n), why) }
	}
	return fields
}
