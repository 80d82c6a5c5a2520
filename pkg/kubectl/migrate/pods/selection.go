// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/policy"
)

// selection is what a pod's node selector and affinity say about GPUs.
type selection struct {
	// expressions are in CEL, for every device.
	expressions []string
	// kind and profile are what nvidia.com/gpu is on these nodes, where they say it.
	kind    policy.Kind
	profile string
	// removals take what is translated out of the pod.
	removals []func()
	workload *workload
	labels   *labels
}

// apply takes out of the pod what is translated.
func (s *selection) apply() {
	for _, removal := range s.removals {
		removal()
		s.workload.changed = true
	}
}

func (s *selection) add(o outcome) error {
	if o.expression != "" {
		s.expressions = append(s.expressions, o.expression)
	}
	if s.kind != "" && o.kind != "" && s.kind != o.kind || s.profile != "" && o.profile != "" && s.profile != o.profile {
		return fmt.Errorf("labels of nodes contradict each other: nvidia.com/gpu would be %s and %s", describe(s.kind, s.profile), describe(o.kind, o.profile))
	}
	s.kind, s.profile = cmp.Or(s.kind, o.kind), cmp.Or(s.profile, o.profile)
	return nil
}

func describe(kind policy.Kind, profile string) string {
	return strings.TrimSpace(string(kind) + " " + profile)
}

// selection reads the node selector and the affinity of the pod.
func (w *workload) selection(containers []*container) (*selection, error) {
	s := &selection{workload: w, labels: &labels{options: w.options, containers: containers}}
	if err := s.nodeSelector(); err != nil {
		return nil, fmt.Errorf("%s.nodeSelector: %w", w.path, err)
	}
	if err := s.affinity(); err != nil {
		return nil, fmt.Errorf("%s.affinity: %w", w.path, err)
	}
	return s, nil
}

// nodeSelector reads labels that must have one value each.
func (s *selection) nodeSelector() error {
	w := s.workload
	selector := document.Get(w.spec, "nodeSelector")
	if selector == nil || selector.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(selector.Content); i += 2 {
		key, value := selector.Content[i].Value, selector.Content[i+1].Value
		o, err := s.labels.translate(requirement{key: key, operator: in, values: []string{value}})
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		if !w.tell(o, "nodeSelector["+key+"]", value) {
			continue
		}
		if err := s.add(o); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		s.removals = append(s.removals, func() {
			remove(selector, key)
			removeEmpty(w.spec, "nodeSelector")
		})
	}
	return nil
}

// tell adds what is to be said of a label, and reports whether it is translated.
func (w *workload) tell(o outcome, field, value string) bool {
	switch {
	case o.lost != "":
		w.findings().Lost(w.at(field), value, o.lost)
	case o.note != "":
		w.findings().Changed(w.at(field), value, o.note)
	case o.kept != "":
		w.findings().Kept(w.at(field), value, o.kept)
	}
	return o.translated
}

// removeEmpty removes an object or list in which nothing is left.
func removeEmpty(n *yaml.Node, key string) bool {
	if value := document.Get(n, key); value != nil && len(value.Content) == 0 {
		remove(n, key)
		return true
	}
	return false
}

const (
	nodeAffinity = "nodeAffinity"
	required     = "requiredDuringSchedulingIgnoredDuringExecution"
	preferred    = "preferredDuringSchedulingIgnoredDuringExecution"
)

// affinity reads the affinity to nodes. A preference cannot be translated: it stays.
func (s *selection) affinity() error {
	w := s.workload
	nodes := document.At(w.spec, "affinity", nodeAffinity)
	if preferences := document.Get(nodes, preferred); preferences != nil && preferences.Kind == yaml.SequenceNode {
		for i, p := range preferences.Content {
			s.preference(document.At(p, "preference", "matchExpressions"), fmt.Sprintf("affinity.%s.%s[%d]", nodeAffinity, preferred, i))
		}
	}
	terms := document.At(nodes, required, "nodeSelectorTerms")
	if terms == nil || terms.Kind != yaml.SequenceNode {
		return nil
	}
	at := fmt.Sprintf("affinity.%s.%s.nodeSelectorTerms", nodeAffinity, required)
	if len(terms.Content) == 1 {
		return s.term(terms.Content[0], at+"[0]")
	}
	return s.alternatives(terms, at)
}

// preference tells that labels of GPUs are only a preference.
func (s *selection) preference(expressions *yaml.Node, at string) {
	if expressions == nil {
		return
	}
	for i, n := range expressions.Content {
		if key := document.Text(n, "key"); s.labels.knows(key) {
			s.workload.findings().Lost(s.workload.at(fmt.Sprintf("%s.preference.matchExpressions[%d]", at, i)), key,
				"a preference stays one for nodes, by a label that goes with GPU feature discovery; a claim prefers devices with firstAvailable")
		}
	}
}

// term reads the only term: what is not about GPUs stays in it.
func (s *selection) term(term *yaml.Node, at string) error {
	w := s.workload
	expressions := document.Get(term, "matchExpressions")
	if expressions == nil || expressions.Kind != yaml.SequenceNode {
		return nil
	}
	gone := map[*yaml.Node]bool{}
	for i, n := range expressions.Content {
		r, err := readRequirement(n)
		if err != nil {
			return fmt.Errorf("%s.matchExpressions[%d]: %w", at, i, err)
		}
		o, err := s.labels.translate(r)
		if err != nil {
			return fmt.Errorf("%s.matchExpressions[%d]: %w", at, i, err)
		}
		if !w.tell(o, fmt.Sprintf("%s.matchExpressions[%d]", at, i), r.String()) {
			continue
		}
		if err := s.add(o); err != nil {
			return fmt.Errorf("%s.matchExpressions[%d]: %w", at, i, err)
		}
		gone[n] = true
	}
	if len(gone) == 0 {
		return nil
	}
	s.removals = append(s.removals, func() {
		var kept []*yaml.Node
		for _, n := range expressions.Content {
			if !gone[n] {
				kept = append(kept, n)
			}
		}
		expressions.Content = kept
		if removeEmpty(term, "matchExpressions") && len(term.Content) == 0 {
			s.removeRequired()
		}
	})
	return nil
}

// removeRequired removes what is required of nodes: a term without anything in it matches no
// node.
func (s *selection) removeRequired() {
	spec := s.workload.spec
	affinity := document.Get(spec, "affinity")
	remove(document.Get(affinity, nodeAffinity), required)
	removeEmpty(affinity, nodeAffinity)
	removeEmpty(spec, "affinity")
}

// alternatives reads several terms, of which a node must match one. They can be translated
// together if they are about nothing but GPUs.
func (s *selection) alternatives(terms *yaml.Node, at string) error {
	var any []string
	about, whole := 0, true
	for i, term := range terms.Content {
		all, known, complete, err := s.labels.wholeTerm(term)
		if err != nil {
			return fmt.Errorf("%s[%d]: %w", at, i, err)
		}
		about += known
		whole = whole && complete
		any = append(any, "("+strings.Join(all, " && ")+")")
	}
	switch {
	case about == 0:
		return nil
	case !whole:
		s.workload.findings().Lost(s.workload.at(at), "", "alternatives that are not only about GPUs cannot be moved to a claim: they stay, by labels that go with GPU feature discovery")
		return nil
	}
	s.expressions = append(s.expressions, strings.Join(any, " || "))
	s.removals = append(s.removals, s.removeRequired)
	return nil
}

// wholeTerm translates a term. complete says that nothing of it is left.
func (l *labels) wholeTerm(term *yaml.Node) (all []string, known int, complete bool, err error) {
	expressions := document.Get(term, "matchExpressions")
	complete = len(term.Content) == 2 && expressions != nil && len(expressions.Content) > 0
	if expressions == nil {
		return nil, 0, complete, nil
	}
	for i, n := range expressions.Content {
		r, err := readRequirement(n)
		if err != nil {
			return nil, 0, false, fmt.Errorf("matchExpressions[%d]: %w", i, err)
		}
		if l.knows(r.key) {
			known++
		}
		o, err := l.translate(r)
		if err != nil {
			return nil, 0, false, fmt.Errorf("matchExpressions[%d]: %w", i, err)
		}
		complete = complete && o.expression != "" && o.kind == "" && o.profile == ""
		all = append(all, o.expression)
	}
	return all, known, complete, nil
}
