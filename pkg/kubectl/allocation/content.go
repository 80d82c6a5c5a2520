// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"hash/maphash"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
)

// seed of all hashes. They live as long as the process.
var seed = maphash.MakeSeed()

// identities are attributes that tell devices of one kind apart.
var identities = sets.New("uuid", "parentUUID", "pciBusID", "pcieRoot", "serial", "minor", "index", "numaNode", "nvlinkDomain", "pcieSwitch")

// contentOf stands for what a device of a driver has, apart from its name, the names of its counter sets and its identities: these differ
// between nodes that are otherwise alike.
func contentOf(driver string, d *resourceapi.Device) uint64 {
	c := *d
	c.Name, c.Attributes, c.ConsumesCounters, c.Taints = "", nil, slices.Clone(d.ConsumesCounters), slices.Clone(d.Taints)
	for i := range c.ConsumesCounters {
		c.ConsumesCounters[i].CounterSet = ""
	}
	for i := range c.Taints {
		c.Taints[i].TimeAdded = nil
	}
	return hashOf(driver, &c) + attributesOf(d, func(name string) bool { return !identities.Has(name) })
}

// identityIf stands for the identities of a device, if these matter.
func identityIf(matter bool, d *resourceapi.Device) uint64 {
	if !matter {
		return 0
	}
	return attributesOf(d, identities.Has)
}

func attributesOf(d *resourceapi.Device, wanted func(name string) bool) (sum uint64) {
	for name, a := range d.Attributes {
		if wanted(identifier(string(name))) {
			sum += hashOf(string(name), &a)
		}
	}
	return sum
}

// identifier returns a qualified name without its domain.
func identifier(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// hashOf is that of a part of the API and its name.
func hashOf(name string, part interface{ Marshal() ([]byte, error) }) uint64 {
	data, err := part.Marshal()
	if err != nil {
		data = []byte(err.Error()) // all of its types can be encoded
	}
	var h maphash.Hash
	h.SetSeed(seed)
	h.WriteString(name)
	h.WriteByte(0)
	h.Write(data)
	return h.Sum64()
}

// writtenOut matches the use of an attribute whose name is written out, and the parenthesis of a function that is called in place of one.
var writtenOut = regexp.MustCompile(`device\.attributes\[\??('[^']*'|"[^"]*")\]\.\??(\w+)(\s*\()?`)

// seesIdentities reports whether the identities of a device may decide what an expression is: it names one, or looks at attributes in a way
// that does not say which.
func seesIdentities(expression string) bool {
	for _, use := range writtenOut.FindAllStringSubmatch(expression, -1) {
		if identities.Has(use[2]) || use[3] != "" {
			return true
		}
	}
	return strings.Contains(writtenOut.ReplaceAllString(expression, ""), "attributes")
}
