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
	Kinds     []policy.Kind `yaml:"kinds,flow"`
	MIG       *MIG          `yaml:"mig,omitempty"`
	MPS       *Share        `yaml:"mps,omitempty"`
	TimeSlice *Share        `yaml:"timeslice,omitempty"`
}

// MIG is which partitions are offered.
type MIG struct {
	// Profiles is nil for all, and points to an empty list for none.
	Profiles *[]string         `yaml:"profiles,flow,omitempty"`
	Shares   []PartitionShares `yaml:"shares,omitempty"`
}

// PartitionShares is how partitions are shared.
type PartitionShares struct {
	Profiles  []string `yaml:"profiles,flow"`
	MPS       *Share   `yaml:"mps,omitempty"`
	TimeSlice *Share   `yaml:"timeslice,omitempty"`
}

// Share is how many share a device.
type Share struct {
	Clients int `yaml:"clients"`
}

// shared offers whole GPUs as shares of one kind.
func (o *Offer) shared(kind policy.Kind, clients int) {
	o.Kinds = append(o.Kinds, kind)
	if kind == policy.MPS {
		o.MPS = &Share{Clients: clients}
		return
	}
	o.TimeSlice = &Share{Clients: clients}
}

// partitionShares are those of some profiles, with a number of clients for each.
func partitionShares(kind policy.Kind, clients map[string]int) []PartitionShares {
	var shares []PartitionShares
	for _, profile := range slices.Sorted(maps.Keys(clients)) {
		s := PartitionShares{Profiles: []string{profile}}
		if kind == policy.MPS {
			s.MPS = &Share{Clients: clients[profile]}
		} else {
			s.TimeSlice = &Share{Clients: clients[profile]}
		}
		shares = append(shares, s)
	}
	return shares
}
