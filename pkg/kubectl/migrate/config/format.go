// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/document"
)

// formats are what files are, by keys at their top, in lower case: the first that has one of its keys, with the command that translates it.
var formats = []struct {
	command, what string
	keys          []string
}{
	{"mig-parted", "a configuration of mig-parted: give it to kubectl gpu migrate mig-parted", []string{"mig-configs"}},
	{
		"", "values or a configuration of HAMi, which no command translates: write a sharing policy; kubectl gpu migrate pods translates pods",
		[]string{"resourcemem", "resourcemempercentage", "resourcecores", "nodeconfig", "nvidia"},
	},
	// Its API has a version, too.
	{"castai", "a node template of Cast AI: give it to kubectl gpu migrate castai", []string{"gpu", "constraints", "format_version", "items"}},
	{
		"device-plugin", "a configuration of NVIDIA's device plugin: give it to kubectl gpu migrate device-plugin",
		[]string{"version", "flags", "sharing", "imex"},
	},
	{
		"", "values of a chart, which no command translates: give the configuration that is in them, or the ConfigMap that the chart makes of it",
		[]string{"config", "deviceplugin", "migmanager", "image", "nodeselector", "tolerations", "nameoverride", "sharingpolicy"},
	},
}

// Expect refuses configurations of which none is for a command. One without fields can be for any.
func Expect(command string, configs ...document.Config) (err error) {
	for _, c := range configs {
		translates, what := recognize(c.Root)
		if translates == command || c.Root.Kind != yaml.MappingNode || len(c.Root.Content) == 0 {
			return nil
		}
		err = cmp.Or(err, fmt.Errorf("%slooks like %s", c.Path, what))
	}
	return err
}

// recognize says what a configuration looks like, and which command translates it.
func recognize(root *yaml.Node) (command, what string) {
	for _, f := range formats {
		for key := range document.Fields(root) {
			if slices.Contains(f.keys, strings.ToLower(key.Value)) {
				return f.command, f.what
			}
		}
	}
	return "", "nothing that kubectl gpu migrate translates"
}
