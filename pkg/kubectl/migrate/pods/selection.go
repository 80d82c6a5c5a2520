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
	for k, v := range document.Fields(selector) {
		key, value := k.Value, v.Value
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
	for i, p := range document.List(nodes, preferred) {
		s.preference(document.Get(p, "preference"), fmt.Sprintf("affinity.%s.%s[%d]", nodeAffinity, preferred, i))
	}
	terms := document.List(document.Get(nodes, required), "nodeSelectorTerms")
	at := fmt.Sprintf("affinity.%s.%s.nodeSelectorTerms", nodeAffinity, required)
	if len(terms) == 1 {
		return s.term(terms[0], at+"[0]")
	}
	return s.alternatives(terms, at)
}

// preference tells that labels of GPUs are only a preference.
func (s *selection) preference(term *yaml.Node, at string) {
	for i, n := range document.List(term, "matchExpressions") {
		if key := document.Text(n, "key"); s.labels.knows(key) {
			s.workload.findings().Lost(s.workload.at(fmt.Sprintf("%s.preference.matchExpressions[%d]", at, i)), key,
				"a preference stays one for nodes, by a label that goes with GPU feature discovery; a claim prefers devices with firstAvailable")
		}
	}
}

// translated is a condition of a term, and what becomes of it.
type translated struct {
	requirement
	outcome
	node *yaml.Node
}

// term translates the conditions of a term.
func (l *labels) term(term *yaml.Node) (all []translated, err error) {
	for i, n := range document.List(term, "matchExpressions") {
		one := translated{node: n}
		if one.requirement, err = readRequirement(n); err == nil {
			one.outcome, err = l.translate(one.requirement)
		}
		if err != nil {
			return nil, fmt.Errorf("matchExpressions[%d]: %w", i, err)
		}
		all = append(all, one)
	}
	return all, nil
}

// term reads the only term: what is not about GPUs stays in it.
func (s *selection) term(term *yaml.Node, at string) error {
	all, err := s.labels.term(term)
	if err != nil {
		return fmt.Errorf("%s.%w", at, err)
	}
	gone := map[*yaml.Node]bool{}
	for i, one := range all {
		at := fmt.Sprintf("%s.matchExpressions[%d]", at, i)
		if !s.workload.tell(one.outcome, at, one.String()) {
			continue
		}
		if err := s.add(one.outcome); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
		gone[one.node] = true
	}
	if len(gone) == 0 {
		return nil
	}
	s.removals = append(s.removals, func() {
		expressions := document.Get(term, "matchExpressions")
		expressions.Content = slices.DeleteFunc(expressions.Content, func(n *yaml.Node) bool { return gone[n] })
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
func (s *selection) alternatives(terms []*yaml.Node, at string) error {
	var any []string
	about, whole := 0, true
	for i, term := range terms {
		conditions, err := s.labels.term(term)
		if err != nil {
			return fmt.Errorf("%s[%d]: %w", at, i, err)
		}
		whole = whole && len(term.Content) == 2 && len(conditions) > 0
		var all []string
		for _, one := range conditions {
			if s.labels.knows(one.key) {
				about++
			}
			whole = whole && one.expression != "" && one.kind == "" && one.profile == ""
			all = append(all, one.expression)
		}
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
