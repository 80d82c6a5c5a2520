// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
)

// selection is what a pod's node selector and affinity say about GPUs. What is translated is taken out of the pod.
type selection struct {
	*workload
	// shares and partitions say that containers ask for some, and whole for how many whole GPUs.
	shares, partitions bool
	whole              int64
	// expressions are in CEL, for every device.
	expressions []string
	// kind and profile are what nvidia.com/gpu is on these nodes, where they say it.
	kind    policy.Kind
	profile string
}

// Fields of an affinity.
const (
	nodeAffinity = "nodeAffinity"
	required     = "requiredDuringSchedulingIgnoredDuringExecution"
	preferred    = "preferredDuringSchedulingIgnoredDuringExecution"
	expressions  = "matchExpressions"
)

// selection reads the node selector and the affinity of the pod.
func (w *workload) selection(containers []*container) (*selection, error) {
	s := &selection{workload: w}
	for _, c := range containers {
		for _, d := range c.demands {
			kind, profile := d.device(w.options)
			s.shares = s.shares || kind == policy.MPS || kind == policy.TimeSlice
			s.partitions = s.partitions || kind == policy.Partition || profile != ""
			if kind == policy.Whole && !c.ends {
				s.whole += int64(d.count)
			}
		}
	}
	selector, gone := document.Get(w.spec, "nodeSelector"), map[string]bool{}
	for key, value := range document.Fields(selector) {
		var err error
		if gone[key.Value], err = s.take(requirement{key.Value, corev1.NodeSelectorOpIn, []string{value.Value}}, "nodeSelector["+key.Value+"]", value.Value); err != nil {
			return nil, fmt.Errorf("%s.nodeSelector: %s: %w", w.path, key.Value, err)
		}
	}
	if len(gone) > 0 {
		document.RemoveIf(selector, func(key string) bool { return gone[key] })
		removeEmpty(w.spec, "nodeSelector")
	}
	if err := s.affinity(); err != nil {
		return nil, fmt.Errorf("%s.affinity: %w", w.path, err)
	}
	return s, nil
}

// affinity reads the affinity to nodes. Preferences and alternatives stay, and so does what is not about GPUs.
func (s *selection) affinity() error {
	affinity := document.Get(s.spec, "affinity")
	nodes := document.Get(affinity, nodeAffinity)
	about := func(n *yaml.Node) bool { return strings.HasPrefix(document.Text(n, "key"), domain) }
	for i, p := range document.List(nodes, preferred) {
		for j, n := range document.List(document.Get(p, "preference"), expressions) {
			if about(n) {
				s.found.Add(finding.Lost, s.at(fmt.Sprintf("affinity.%s.%s[%d].preference.%s[%d]", nodeAffinity, preferred, i, expressions, j)), document.Text(n, "key"),
					"a preference stays one for nodes, by a label that goes with GPU feature discovery; a claim prefers devices with firstAvailable")
			}
		}
	}
	terms := document.List(document.Get(nodes, required), "nodeSelectorTerms")
	at := fmt.Sprintf("affinity.%s.%s.nodeSelectorTerms", nodeAffinity, required)
	if len(terms) != 1 {
		if slices.ContainsFunc(terms, func(t *yaml.Node) bool { return slices.ContainsFunc(document.List(t, expressions), about) }) {
			s.found.Add(finding.Lost, s.at(at), "", "alternatives stay as they are, by labels that go with GPU feature discovery")
		}
		return nil
	}
	list := document.Get(terms[0], expressions)
	var kept []*yaml.Node
	for i, n := range document.List(terms[0], expressions) {
		at := fmt.Sprintf("%s[0].%s[%d]", at, expressions, i)
		var r requirement
		gone, err := false, n.Decode(&r)
		if err == nil {
			gone, err = s.take(r, at, strings.TrimSpace(r.Key+" "+string(r.Operator)+" "+strings.Join(r.Values, ", ")))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
		if !gone {
			kept = append(kept, n)
		}
	}
	if list == nil || len(kept) == len(list.Content) {
		return nil
	}
	// A term without anything in it matches no node.
	if list.Content = kept; removeEmpty(terms[0], expressions) && len(terms[0].Content) == 0 {
		document.Remove(nodes, required)
		removeEmpty(affinity, nodeAffinity)
		removeEmpty(s.spec, "affinity")
	}
	return nil
}

// take translates a requirement that must hold, tells what is to be said of it, and reports whether the pod does not need it any more.
func (s *selection) take(r requirement, field, value string) (gone bool, err error) {
	o, err := s.translate(r)
	if err != nil {
		return false, err
	}
	if o.why != "" {
		kind := finding.Changed
		if o.stays {
			kind = finding.Lost
		}
		s.found.Add(kind, s.at(field), value, o.why)
	}
	if o.expression != "" {
		s.expressions = append(s.expressions, o.expression)
	}
	if s.kind != "" && o.kind != "" && s.kind != o.kind || s.profile != "" && o.profile != "" && s.profile != o.profile {
		return false, fmt.Errorf("labels of nodes contradict each other: nvidia.com/gpu would be %s and %s", describe(s.kind, s.profile), describe(o.kind, o.profile))
	}
	s.kind, s.profile = cmp.Or(s.kind, o.kind), cmp.Or(s.profile, o.profile)
	return !o.stays, nil
}

func describe(kind policy.Kind, profile string) string {
	return strings.TrimSpace(string(kind) + " " + profile)
}
