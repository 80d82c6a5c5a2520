// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"path"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
)

// architectures are all names that package gpu/nvml uses, and so all that a rule can
// match.
var architectures = []string{
	"Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Rubin",
}

// For returns the offer for a GPU. A nil policy is the built-in one.
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

// matchesGlob matches nothing with a malformed glob, which Decode refuses.
func matchesGlob(glob, name string) bool {
	if glob == "" {
		return true
	}
	matched, err := path.Match(noPath(glob), noPath(name))
	return err == nil && matched
}

// noPath lets '*' match a slash like any other character, and ignores letter case.
func noPath(text string) string { return strings.ReplaceAll(strings.ToLower(text), "/", "\x00") }

// covers reports whether m certainly matches every GPU that n matches: n has all of
// m's conditions.
func (m Match) covers(n Match) bool {
	return coversGlob(m.ProductName, n.ProductName) &&
		matchesText(m.Architecture, n.Architecture) &&
		matchesText(m.PCIDeviceID, n.PCIDeviceID) &&
		matchesText(m.UUID, n.UUID)
}

// coversGlob reports whether a glob certainly matches every name that another one
// matches. Only '*' is understood in the general one: what stands for other characters
// in the special one cannot match anything else there.
func coversGlob(general, special string) bool {
	switch {
	case strings.Trim(general, "*") == "", strings.EqualFold(general, special):
		return true
	case special == "", strings.ContainsAny(general, `?[\`), strings.ContainsAny(special, `[\`):
		return false
	}
	return matchesGlob(general, special)
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
