// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package config translates configurations of other programs that share GPUs: into a
// SharingPolicy and device classes.
package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

// Options choose what is translated.
type Options struct {
	// Driver is the name of the driver.
	Driver string
	// Configs are the names of the configurations to translate, of a file with several.
	Configs []string
	// Matches are the GPUs that a configuration is for, by its name.
	Matches map[string]Match
	// SingleProfile is the MIG profile that all partitions of a node have with the device
	// plugin's strategy "single".
	SingleProfile string
}

// AddMatches reads texts of the form NAME=FIELD=VALUE, such as t4=productName=Tesla T4.
func (o *Options) AddMatches(texts []string) error {
	o.Matches = map[string]Match{}
	for _, text := range texts {
		parts := strings.SplitN(text, "=", 3)
		if len(parts) != 3 || parts[0] == "" || parts[2] == "" {
			return fmt.Errorf("--match: Invalid value: %s: want CONFIG=FIELD=VALUE, such as t4=productName=Tesla T4", quote.Text(text))
		}
		if _, twice := o.Matches[parts[0]]; twice {
			return fmt.Errorf("--match: Duplicate value: %s: a configuration is for GPUs of one kind", quote.Text(parts[0]))
		}
		if !slices.Contains(matchFields, parts[1]) {
			return fmt.Errorf("--match: Unsupported value: %s: want productName, architecture, pciDeviceID or uuid", quote.Text(parts[1]))
		}
		o.Matches[parts[0]] = Match{parts[1]: parts[2]}
	}
	return nil
}

// general returns the configuration that is for all GPUs which no other one is for. hint says how others are translated, too.
func (o *Options) general(configs []document.Config, hint string) (string, error) {
	var names []string
	for _, c := range configs {
		if slices.Contains(names, c.Name) {
			return "", fmt.Errorf("%smore than one configuration has the name %s: give one file at a time", c.Path, quote.Text(c.Name))
		}
		names = append(names, c.Name)
	}
	if err := o.checkNames(names); err != nil {
		return "", err
	}
	switch {
	case len(o.Configs) == 1:
		return o.Configs[0], nil
	case len(o.Configs) > 1:
		return "", fmt.Errorf("--config: Too many: %d: one configuration is for all GPUs%s", len(o.Configs), hint)
	case len(names) == 1:
		return names[0], nil
	case slices.Contains(names, "default"):
		return "default", nil
	}
	return "", fmt.Errorf("there are several configurations: %s. Say which is for all GPUs with --config NAME%s", quote.Names(names), hint)
}

// checkNames refuses names of configurations that are not there.
func (o *Options) checkNames(names []string) error {
	for flag, all := range map[string][]string{"config": o.Configs, "match": slices.Collect(maps.Keys(o.Matches))} {
		for _, wanted := range all {
			if !slices.Contains(names, wanted) {
				return fmt.Errorf("--%s: Not found: %s: there are %s", flag, quote.Text(wanted), quote.Names(names))
			}
		}
	}
	return nil
}

// reader reads configurations of programs that ignore fields which they do not know.
type reader struct {
	strict.Reader
	found *finding.List
	// prefix leads to the document.
	prefix string
	// plain makes one of the names that a field may have.
	plain func(key string) string
	// isUnset reports that nobody has set a field which is there, unless it is nil.
	isUnset func(n *yaml.Node) bool
}

func (r *reader) tell(kind finding.Kind, at *field.Path, value, why string) {
	r.found.Add(kind, r.prefix+at.String(), value, why)
}

// told returns what reads a field by telling what becomes of it.
func (r *reader) told(kind finding.Kind, why string) strict.Read {
	return func(n *yaml.Node, at *field.Path) { r.tell(kind, at, text(n), why) }
}

// lost returns what reads fields that are not translated, for these reasons.
func (r *reader) lost(reasons map[string]string) map[string]strict.Read {
	fields := map[string]strict.Read{}
	for name, why := range reasons {
		fields[name] = r.told(finding.Lost, why)
	}
	return fields
}

// object reads the fields of an object. Fields that are null or unset are not there.
func (r *reader) object(n *yaml.Node, at *field.Path, fields map[string]strict.Read, unknown strict.Read) map[string]bool {
	seen, names := map[string]bool{}, map[string]string{}
	for name := range fields {
		names[r.plain(name)] = name
	}
	r.Map(n, at, func(key string, n *yaml.Node, _ *field.Path) {
		path := field.NewPath(key)
		if at != nil {
			path = at.Child(key)
		}
		name := names[r.plain(key)]
		switch read := fields[name]; {
		case r.isUnset != nil && r.isUnset(n):
		case read == nil:
			unknown(n, path)
		case seen[name]:
			r.Fault(field.Duplicate(path, key))
		case !strict.IsNull(n):
			seen[name] = true
			read(n, path)
		}
	})
	return seen
}

// require refuses an object without some fields.
func (r *reader) require(n *yaml.Node, at *field.Path, seen map[string]bool, why string, names ...string) {
	for _, name := range names {
		if n.Kind == yaml.MappingNode && !seen[name] {
			r.Fault(field.Required(at.Child(name), why))
		}
	}
}

// maxShown is how many items of a list or an object are shown in a line.
const maxShown = 8

// text returns a value in one line.
func text(n *yaml.Node) string {
	var items []string
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value
	case yaml.AliasNode:
		return "*" + n.Value
	case yaml.SequenceNode:
		for _, item := range n.Content[:min(len(n.Content), maxShown)] {
			items = append(items, text(item))
		}
		return "[" + strings.Join(items, ", ") + "]"
	}
	for key, value := range document.Fields(n) {
		if len(items) < maxShown {
			items = append(items, key.Value+": "+text(value))
		}
	}
	return "{" + strings.Join(items, ", ") + "}"
}
