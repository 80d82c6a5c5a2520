// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"path"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
)

// architectures are the names that package gpu/nvml gives. A GPU that it does not
// know has no other name that a rule could ask for.
var architectures = []string{
	"Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Rubin",
}

// For finds the offer for a GPU. A nil policy is the built-in one.
func (p *Policy) For(g *gpu.GPU) Effective {
	if p == nil {
		p = Builtin()
	}
	for _, rule := range p.Rules {
		if rule.Match.matches(g) {
			return Effective{Offer: rule.Offer, Rule: rule.Name}
		}
	}
	return Effective{Offer: p.Default}
}

func (m Match) matches(g *gpu.GPU) bool {
	return matchesGlob(m.ProductName, g.ProductName) &&
		matchesText(m.Architecture, g.Architecture) &&
		matchesText(m.PCIDeviceID, g.PCIDeviceID) &&
		matchesText(m.UUID, g.UUID)
}

func matchesText(want, is string) bool { return want == "" || strings.EqualFold(want, is) }

// matchesGlob takes a glob that cannot be read for one that matches nothing;
// Decode lets none through.
func matchesGlob(glob, name string) bool {
	if glob == "" {
		return true
	}
	matched, err := path.Match(noPath(glob), noPath(name))
	return err == nil && matched
}

// noPath makes a slash a character like any other, which '*' stands for too.
func noPath(text string) string { return strings.ReplaceAll(strings.ToLower(text), "/", "\x00") }

// covers tells that every GPU which n matches is certain to be matched by m: what
// m asks for, n asks for too. Whether one glob is within another is not looked at.
func (m Match) covers(n Match) bool {
	return matchesText(m.ProductName, n.ProductName) &&
		matchesText(m.Architecture, n.Architecture) &&
		matchesText(m.PCIDeviceID, n.PCIDeviceID) &&
		matchesText(m.UUID, n.UUID)
}

// String lists the fields that are set.
func (m Match) String() string {
	var parts []string
	for _, f := range []struct{ name, value string }{
		{"productName", m.ProductName}, {"architecture", m.Architecture}, {"pciDeviceID", m.PCIDeviceID}, {"uuid", m.UUID},
	} {
		if f.value != "" {
			parts = append(parts, f.name+" "+f.value)
		}
	}
	return strings.Join(parts, ", ")
}
