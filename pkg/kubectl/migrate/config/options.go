// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/util/quote"
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
		var m Match
		field, known := map[string]*string{
			"productName": &m.ProductName, "architecture": &m.Architecture, "pciDeviceID": &m.PCIDeviceID, "uuid": &m.UUID,
		}[parts[1]]
		if !known {
			return fmt.Errorf("--match: Unsupported value: %s: want productName, architecture, pciDeviceID or uuid", quote.Text(parts[1]))
		}
		*field = parts[2]
		o.Matches[parts[0]] = m
	}
	return nil
}

// general returns the configuration that is for all GPUs which no other one is for. hint says how others are translated, too.
func (o *Options) general(names []string, hint string) (string, error) {
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

// namesOf returns the names of configurations, and an error where one is there twice.
func namesOf(configs []document.Config) ([]string, error) {
	var names []string
	for _, c := range configs {
		if slices.Contains(names, c.Name) {
			return nil, fmt.Errorf("%smore than one configuration has the name %s: give one file at a time", c.Path, quote.Text(c.Name))
		}
		names = append(names, c.Name)
	}
	return names, nil
}
