// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/document"
)

// formats are what files are, by keys at their top, in lower case. The first that has one of its keys is the format. Of those that no command
// translates it is said what to do.
var formats = []struct {
	what, command, advice string
	keys                  []string
}{
	{"a configuration of mig-parted", "mig-parted", "", []string{"mig-configs"}},
	{
		"values or a configuration of HAMi", "", "write a sharing policy, and translate the pods with kubectl gpu migrate pods",
		[]string{"resourcemem", "resourcemempercentage", "resourcecores", "nodeconfig", "nvidia"},
	},
	{"a node template of Cast AI", "castai", "", []string{"gpu", "constraints", "format_version", "items"}},
	{"a configuration of NVIDIA's device plugin", "device-plugin", "", []string{"version", "flags", "sharing", "imex"}},
	{
		"values of a chart", "", "give the configuration that is in them, or the ConfigMap that the chart makes of it",
		[]string{"config", "deviceplugin", "migmanager", "image", "nodeselector", "tolerations", "nameoverride", "sharingpolicy"},
	},
}

// Expect refuses configurations of which none is for a command. One without fields can be for any.
func Expect(command string, configs ...document.Config) (err error) {
	for _, c := range configs {
		other := mistaken(command, c.Root)
		if other == nil {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("%slooks like %w", c.Path, other)
		}
	}
	return err
}

// mistaken says what a configuration is, and what to do with it, unless it is for the command.
func mistaken(command string, root *yaml.Node) error {
	if root.Kind != yaml.MappingNode || len(root.Content) == 0 {
		return nil
	}
	keys := sets.New[string]()
	for key := range document.Fields(root) {
		keys.Insert(strings.ToLower(key.Value))
	}
	for _, f := range formats {
		switch {
		case !keys.HasAny(f.keys...):
		case f.command == command:
			return nil
		case f.command != "":
			return fmt.Errorf("%s: give it to kubectl gpu migrate %s", f.what, f.command)
		default:
			return fmt.Errorf("%s, which no command translates: %s", f.what, f.advice)
		}
	}
	return errors.New("nothing that kubectl gpu migrate translates")
}
