// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	maxRules = 256
	maxGlob  = 256
)

var (
	ruleName    = regexp.MustCompile(`^[0-9A-Za-z]([0-9A-Za-z_.-]{0,61}[0-9A-Za-z])?$`)
	pciDeviceID = regexp.MustCompile(`^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4}$`)
	uuid        = regexp.MustCompile(`^GPU-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$`)
)

func (r *reader) rules(n *yaml.Node, at *field.Path) []Rule {
	before := r.FaultCount()
	var rules []Rule
	r.List(n, at, maxRules, func(n *yaml.Node, at *field.Path) { rules = append(rules, r.rule(n, at)) })
	first := map[string]int{}
	for i, rule := range rules {
		if _, taken := first[rule.Name]; taken && rule.Name != "" {
			r.Fault(field.Duplicate(at.Index(i).Child("name"), quote.Short(rule.Name)))
			continue
		}
		first[rule.Name] = i
	}
	// Rules with faults cannot be compared.
	if r.FaultCount() == before {
		r.checkReachable(rules, at)
	}
	return rules
}

// checkReachable refuses a rule that can never apply because of one before it.
func (r *reader) checkReachable(rules []Rule, at *field.Path) {
	for i, rule := range rules {
		earlier := slices.IndexFunc(rules[:i], func(e Rule) bool { return e.Match.covers(rule.Match) })
		if earlier < 0 {
			continue
		}
		r.Fault(field.Invalid(at.Index(i).Child("match"), rule.Match.String(),
			fmt.Sprintf("rule %q never counts: rules[%d] %q (%s) comes first and matches all of these GPUs; put the special rule before the general one, or remove it",
				rule.Name, earlier, rules[earlier].Name, rules[earlier].Match)))
	}
}

func (r *reader) rule(n *yaml.Node, at *field.Path) Rule {
	var rule Rule
	seen := r.Object(n, at, map[string]strict.Read{
		"name": func(n *yaml.Node, at *field.Path) {
			rule.Name = r.Pattern(n, at, ruleName,
				"1 to 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends")
		},
		"match": strict.Into(&rule.Match, r.match),
		"offer": strict.Into(&rule.Offer, r.offer),
	})
	if n.Kind != yaml.MappingNode {
		return rule
	}
	for _, f := range []struct{ name, what string }{
		{"name", "says in logs which rule counts"},
		{"match", "says which GPUs the rule is for"},
		{"offer", "says what these GPUs are offered as; {} is everything, with built-in values"},
	} {
		if !seen[f.name] {
			r.Fault(field.Required(at.Child(f.name), f.what))
		}
	}
	return rule
}

func (r *reader) match(n *yaml.Node, at *field.Path) Match {
	var m Match
	seen := r.Object(n, at, map[string]strict.Read{
		"productName":  strict.Into(&m.ProductName, r.glob),
		"architecture": strict.Into(&m.Architecture, r.architecture),
		"pciDeviceID": func(n *yaml.Node, at *field.Path) {
			m.PCIDeviceID = strings.ToLower(r.Pattern(n, at, pciDeviceID, `vendor and device as lspci -nn prints them, such as "10de:20b2"`))
		},
		"uuid": func(n *yaml.Node, at *field.Path) {
			text := r.Pattern(n, at, uuid, `a GPU's UUID as nvidia-smi -L prints it, such as "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"`)
			m.UUID = "GPU-" + strings.ToLower(strings.TrimPrefix(text, "GPU-"))
		},
	})
	if n.Kind == yaml.MappingNode && len(seen) == 0 {
		r.Fault(field.Required(at, "at least one of productName, architecture, pciDeviceID, uuid; what is for all other GPUs goes into default"))
	}
	return m
}

func (r *reader) glob(n *yaml.Node, at *field.Path) string {
	text, ok := r.String(n, at)
	if !ok {
		return ""
	}
	if text == "" || len(text) > maxGlob {
		r.Invalid(n, at, "must be a pattern of 1 to %d bytes such as \"NVIDIA A100*\"", maxGlob)
		return text
	}
	if _, err := path.Match(strings.ToLower(text), ""); err != nil {
		r.Invalid(n, at, "must be a pattern such as \"NVIDIA A100*\": '*' stands for any text, '?' for one character, '[…]' for one of some, '\\' takes the meaning from the next one")
	}
	return text
}

func (r *reader) architecture(n *yaml.Node, at *field.Path) string {
	text, ok := r.String(n, at)
	if !ok {
		return ""
	}
	i := slices.IndexFunc(architectures, func(known string) bool { return strings.EqualFold(known, text) })
	if i < 0 {
		r.Fault(field.NotSupported(at, quote.Short(text), architectures))
		return ""
	}
	return architectures[i]
}
