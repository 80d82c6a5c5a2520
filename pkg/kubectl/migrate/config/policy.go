// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/policy"
)

// Policy is a SharingPolicy as people write it. What is left out is as built in.
type Policy struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`
	Rules      []Rule `yaml:"rules,omitempty"`
	Default    *Offer `yaml:"default,omitempty"`
}

// Rule is an offer for some GPUs.
type Rule struct {
	Name  string `yaml:"name"`
	Match Match  `yaml:"match"`
	Offer Offer  `yaml:"offer"`
}

// Match selects GPUs.
type Match struct {
	ProductName  string `yaml:"productName,omitempty"`
	Architecture string `yaml:"architecture,omitempty"`
	PCIDeviceID  string `yaml:"pciDeviceID,omitempty"`
	UUID         string `yaml:"uuid,omitempty"`
}

// Offer is what GPUs are published as.
type Offer struct {
	Kinds   []policy.Kind `yaml:"kinds,flow"`
	MIG     *MIG          `yaml:"mig,omitempty"`
	Sharing `yaml:",inline"`
}

// MIG is which partitions are offered.
type MIG struct {
	// Profiles is nil for all, and points to an empty list for none.
	Profiles *[]string         `yaml:"profiles,flow,omitempty"`
	Shares   []PartitionShares `yaml:"shares,omitempty"`
}

// PartitionShares is how partitions are shared.
type PartitionShares struct {
	Profiles []string `yaml:"profiles,flow"`
	Sharing  `yaml:",inline"`
}

// Sharing is how many share a device, in one of two ways.
type Sharing struct {
	MPS       *Share `yaml:"mps,omitempty"`
	TimeSlice *Share `yaml:"timeslice,omitempty"`
}

// Share is how many share a device.
type Share struct {
	Clients int `yaml:"clients"`
}

func sharing(kind policy.Kind, clients int) Sharing {
	if kind == policy.MPS {
		return Sharing{MPS: &Share{clients}}
	}
	return Sharing{TimeSlice: &Share{clients}}
}

// partitionShares are those of some profiles, with a number of clients for each.
func partitionShares(kind policy.Kind, clients map[string]int) (shares []PartitionShares) {
	for _, profile := range slices.Sorted(maps.Keys(clients)) {
		shares = append(shares, PartitionShares{[]string{profile}, sharing(kind, clients[profile])})
	}
	return shares
}
