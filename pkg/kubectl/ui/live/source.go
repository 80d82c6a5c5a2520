// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package live keeps a fleet.Snapshot up to date by watching the cluster, and says what it
// cannot see: which right is missing, or that the API server does not answer.
package live

import (
	"cmp"
	"context"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// Source watches a cluster.
type Source struct {
	client  kubernetes.Interface
	changed chan struct{}

	nodes      *mirror[*corev1.Node]
	slices     *mirror[*resourceapi.ResourceSlice]
	classes    *mirror[*resourceapi.DeviceClass]
	taintRules *mirror[*resourceapi.DeviceTaintRule]
	claims     *mirror[*resourceapi.ResourceClaim]
	templates  *mirror[*resourceapi.ResourceClaimTemplate]
	pods       *mirror[*corev1.Pod]
}

// New returns a source that does nothing until Run. Claims, templates and pods are those of all
// namespaces or, where that is forbidden, those of the given one.
func New(client kubernetes.Interface, namespace string) *Source {
	s := &Source{client: client, changed: make(chan struct{}, 1)}
	core, resource := client.CoreV1(), client.ResourceV1()
	s.nodes = newMirror[*corev1.Node](s, fleet.ResourceNodes, "", func(string) lister[*corev1.NodeList] { return core.Nodes() })
	s.slices = newMirror[*resourceapi.ResourceSlice](s, fleet.ResourceSlices, "",
		func(string) lister[*resourceapi.ResourceSliceList] { return resource.ResourceSlices() })
	s.classes = newMirror[*resourceapi.DeviceClass](s, fleet.ResourceClasses, "",
		func(string) lister[*resourceapi.DeviceClassList] { return resource.DeviceClasses() })
	s.taintRules = newMirror[*resourceapi.DeviceTaintRule](s, fleet.ResourceTaintRules, "",
		func(string) lister[*resourceapi.DeviceTaintRuleList] { return resource.DeviceTaintRules() })
	s.claims = newMirror[*resourceapi.ResourceClaim](s, fleet.ResourceClaims, namespace,
		func(n string) lister[*resourceapi.ResourceClaimList] { return resource.ResourceClaims(n) })
	s.templates = newMirror[*resourceapi.ResourceClaimTemplate](s, fleet.ResourceTemplates, namespace,
		func(n string) lister[*resourceapi.ResourceClaimTemplateList] {
			return resource.ResourceClaimTemplates(n)
		})
	s.pods = newMirror[*corev1.Pod](s, fleet.ResourcePods, namespace, func(n string) lister[*corev1.PodList] { return core.Pods(n) })
	return s
}

// mirrored is a mirror of any resource.
type mirrored interface {
	run(ctx context.Context)
	ready() bool
	gaps() []view.Gap
	missing() []fleet.Missing
}

func (s *Source) mirrors() []mirrored {
	return []mirrored{s.nodes, s.slices, s.classes, s.taintRules, s.claims, s.templates, s.pods}
}

// Run watches until the context ends.
func (s *Source) Run(ctx context.Context) {
	var all sync.WaitGroup
	for _, mirror := range s.mirrors() {
		all.Go(func() { mirror.run(ctx) })
	}
	all.Wait()
}

// Changed receives a value after something has changed; many changes may give one.
func (s *Source) Changed() <-chan struct{} { return s.changed }

// Notify has Changed receive a value: what goes with the objects has changed.
func (s *Source) Notify() {
	select {
	case s.changed <- struct{}{}:
	default: // one is waiting to be received
	}
}

// Ready reports whether everything has been read once, or was found not to be readable.
func (s *Source) Ready() bool {
	return !slices.ContainsFunc(s.mirrors(), func(m mirrored) bool { return !m.ready() })
}

// Snapshot returns what is known now. Its objects must not be changed.
func (s *Source) Snapshot() *fleet.Snapshot {
	snapshot := &fleet.Snapshot{
		Namespace:  s.claims.fallback,
		Nodes:      s.nodes.list(),
		Slices:     s.slices.list(),
		Classes:    s.classes.list(),
		TaintRules: s.taintRules.list(),
		Claims:     s.claims.list(),
		Templates:  s.templates.list(),
		Pods:       s.pods.list(),
	}
	for _, mirror := range s.mirrors() {
		snapshot.Missing = append(snapshot.Missing, mirror.missing()...)
	}
	return snapshot
}

// Gaps returns what cannot be seen, by resource.
func (s *Source) Gaps() []view.Gap {
	gaps := []view.Gap{}
	for _, mirror := range s.mirrors() {
		gaps = append(gaps, mirror.gaps()...)
	}
	slices.SortStableFunc(gaps, func(a, b view.Gap) int { return cmp.Compare(a.Resource, b.Resource) })
	return gaps
}
