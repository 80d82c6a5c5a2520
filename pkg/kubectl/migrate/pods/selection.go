// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/policy"
)

// selection is what a pod's node selector and affinity say about GPUs. What is translated is taken out of the pod.
type selection struct {
	*workload
	containers []*container
	// expressions are in CEL, for every device.
	expressions []string
	// kind and profile are what nvidia.com/gpu is on these nodes, where they say it.
	kind    policy.Kind
	profile string
}

// selection reads the node selector and the affinity of the pod.
func (w *workload) selection(containers []*container) (*selection, error) {
	s := &selection{workload: w, containers: containers}
	if err := s.nodeSelector(); err != nil {
		return nil, fmt.Errorf("%s.nodeSelector: %w", w.path, err)
	}
	if err := s.affinity(); err != nil {
		return nil, fmt.Errorf("%s.affinity: %w", w.path, err)
	}
	return s, nil
}

// take translates a requirement that must hold, tells what is to be said of it, and reports whether the pod does not need it any more.
func (s *selection) take(r requirement, field, value string) (gone bool, err error) {
	o, err := s.translate(r)
	switch {
	case err != nil:
		return false, err
	case o.lost != "":
		s.findings().Lost(s.at(field), value, o.lost)
	case o.note != "":
		s.findings().Changed(s.at(field), value, o.note)
	}
	if o.expression != "" {
		s.expressions = append(s.expressions, o.expression)
	}
	if s.kind != "" && o.kind != "" && s.kind != o.kind || s.profile != "" && o.profile != "" && s.profile != o.profile {
		return false, fmt.Errorf("labels of nodes contradict each other: nvidia.com/gpu would be %s and %s", describe(s.kind, s.profile), describe(o.kind, o.profile))
	}
	s.kind, s.profile = cmp.Or(s.kind, o.kind), cmp.Or(s.profile, o.profile)
	return o.translated, nil
}

func describe(kind policy.Kind, profile string) string {
	return strings.TrimSpace(string(kind) + " " + profile)
}

// nodeSelector reads labels that must have one value each.
func (s *selection) nodeSelector() error {
	selector := document.Get(s.spec, "nodeSelector")
	gone := map[string]bool{}
	for key, value := range document.Fields(selector) {
		var err error
		if gone[key.Value], err = s.take(requirement{key.Value, in, []string{value.Value}}, "nodeSelector["+key.Value+"]", value.Value); err != nil {
			return fmt.Errorf("%s: %w", key.Value, err)
		}
	}
	if len(gone) > 0 {
		removeIf(selector, func(key string) bool { return gone[key] })
		removeEmpty(s.spec, "nodeSelector")
	}
	return nil
}

const (
	nodeAffinity = "nodeAffinity"
	required     = "requiredDuringSchedulingIgnoredDuringExecution"
	preferred    = "preferredDuringSchedulingIgnoredDuringExecution"
	expressions  = "matchExpressions"
)

// affinity reads the affinity to nodes. A preference cannot be translated: it stays.
func (s *selection) affinity() error {
	nodes := document.At(s.spec, "affinity", nodeAffinity)
	for i, p := range document.List(nodes, preferred) {
		for j, n := range document.List(document.Get(p, "preference"), expressions) {
			if key := document.Text(n, "key"); isGPULabel(key) {
				s.findings().Lost(s.at(fmt.Sprintf("affinity.%s.%s[%d].preference.%s[%d]", nodeAffinity, preferred, i, expressions, j)), key,
					"a preference stays one for nodes, by a label that goes with GPU feature discovery; a claim prefers devices with firstAvailable")
			}
		}
	}
	terms := document.List(document.Get(nodes, required), "nodeSelectorTerms")
	at := fmt.Sprintf("affinity.%s.%s.nodeSelectorTerms", nodeAffinity, required)
	if len(terms) == 1 {
		return s.term(terms[0], at+"[0]")
	}
	return s.alternatives(terms, at)
}

// term reads the only term: what is not about GPUs stays in it.
func (s *selection) term(term *yaml.Node, at string) error {
	gone := map[*yaml.Node]bool{}
	for i, n := range document.List(term, expressions) {
		at := fmt.Sprintf("%s.%s[%d]", at, expressions, i)
		r, err := readRequirement(n)
		if err == nil {
			gone[n], err = s.take(r, at, r.String())
		}
		if err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	list := document.Get(term, expressions)
	if list == nil {
		return nil
	}
	list.Content = slices.DeleteFunc(list.Content, func(n *yaml.Node) bool { return gone[n] })
	if len(gone) > 0 && removeEmpty(term, expressions) && len(term.Content) == 0 {
		s.removeRequired()
	}
	return nil
}

// removeRequired removes what is required of nodes: a term without anything in it matches no
// node.
func (s *selection) removeRequired() {
	affinity := document.Get(s.spec, "affinity")
	document.Remove(document.Get(affinity, nodeAffinity), required)
	removeEmpty(affinity, nodeAffinity)
	removeEmpty(s.spec, "affinity")
}

// alternatives reads several terms, of which a node must match one. They can be translated
// together if they are about nothing but GPUs.
func (s *selection) alternatives(terms []*yaml.Node, at string) error {
	var any []string
	about, whole := false, true
	for i, term := range terms {
		var all []string
		for j, n := range document.List(term, expressions) {
			r, err := readRequirement(n)
			var o outcome
			if err == nil {
				o, err = s.translate(r)
			}
			if err != nil {
				return fmt.Errorf("%s[%d].%s[%d]: %w", at, i, expressions, j, err)
			}
			about = about || isGPULabel(r.key)
			whole = whole && o.expression != "" && o.kind == "" && o.profile == ""
			all = append(all, o.expression)
		}
		whole = whole && len(term.Content) == 2 && len(all) > 0
		any = append(any, "("+strings.Join(all, " && ")+")")
	}
	switch {
	case !about:
	case !whole:
		s.findings().Lost(s.at(at), "", "alternatives that are not only about GPUs cannot be moved to a claim: they stay, by labels that go with GPU feature discovery")
	default:
		s.expressions = append(s.expressions, strings.Join(any, " || "))
		s.removeRequired()
	}
	return nil
}
