// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package live keeps a fleet.Snapshot up to date by watching the cluster, and says what it
// cannot see: which right is missing, or that the API server does not answer.
package live

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// Source watches a cluster.
type Source struct {
	mu      sync.Mutex
	gaps    map[gapKey]view.Gap
	changed chan struct{}

	nodes      *mirror[*corev1.Node]
	slices     *mirror[*resourceapi.ResourceSlice]
	classes    *mirror[*resourceapi.DeviceClass]
	taintRules *mirror[*resourceapi.DeviceTaintRule]
	claims     *mirror[*resourceapi.ResourceClaim]
	templates  *mirror[*resourceapi.ResourceClaimTemplate]
	pods       *mirror[*corev1.Pod]
}

type gapKey struct{ verb, resource, namespace string }

// New returns a source that does nothing until Run. Claims, templates and pods are those of all
// namespaces or, where that is forbidden, those of the given one.
func New(client kubernetes.Interface, namespace string) *Source {
	s := &Source{gaps: map[gapKey]view.Gap{}, changed: make(chan struct{}, 1)}
	core, resource := client.CoreV1(), client.ResourceV1()
	const suffix = ".resource.k8s.io"
	global := func(name string) scope { return scope{source: s, client: client, resource: name} }
	namespaced := func(name string) scope {
		return scope{source: s, client: client, resource: name, fallback: namespace}
	}
	s.nodes = newMirror[*corev1.Node](global("nodes"), func(string) lister[*corev1.NodeList] { return core.Nodes() })
	s.slices = newMirror[*resourceapi.ResourceSlice](global("resourceslices"+suffix),
		func(string) lister[*resourceapi.ResourceSliceList] { return resource.ResourceSlices() })
	s.classes = newMirror[*resourceapi.DeviceClass](global("deviceclasses"+suffix),
		func(string) lister[*resourceapi.DeviceClassList] { return resource.DeviceClasses() })
	s.taintRules = newMirror[*resourceapi.DeviceTaintRule](global("devicetaintrules"+suffix),
		func(string) lister[*resourceapi.DeviceTaintRuleList] { return resource.DeviceTaintRules() })
	s.claims = newMirror[*resourceapi.ResourceClaim](namespaced("resourceclaims"+suffix),
		func(n string) lister[*resourceapi.ResourceClaimList] { return resource.ResourceClaims(n) })
	s.templates = newMirror[*resourceapi.ResourceClaimTemplate](namespaced("resourceclaimtemplates"+suffix),
		func(n string) lister[*resourceapi.ResourceClaimTemplateList] {
			return resource.ResourceClaimTemplates(n)
		})
	s.pods = newMirror[*corev1.Pod](namespaced("pods"), func(n string) lister[*corev1.PodList] { return core.Pods(n) })
	return s
}

// mirrored is a mirror of any resource.
type mirrored interface {
	run(ctx context.Context)
	ready() bool
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

// Ready reports whether everything has been read once, or was found not to be readable.
func (s *Source) Ready() bool {
	return !slices.ContainsFunc(s.mirrors(), func(m mirrored) bool { return !m.ready() })
}

// Snapshot returns what is known now. Its objects must not be changed.
func (s *Source) Snapshot() *fleet.Snapshot {
	snapshot := &fleet.Snapshot{
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

// Gaps returns what cannot be seen, sorted.
func (s *Source) Gaps() []view.Gap {
	s.mu.Lock()
	defer s.mu.Unlock()
	gaps := make([]view.Gap, 0, len(s.gaps))
	for _, gap := range s.gaps {
		gaps = append(gaps, gap)
	}
	slices.SortFunc(gaps, func(a, b view.Gap) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Verb, b.Verb))
	})
	return gaps
}

// lacks notes a gap, and closes forgets those that are none any more.
func (s *Source) lacks(gap view.Gap) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := gapKey{gap.Verb, gap.Resource, gap.Namespace}
	if s.gaps[key] != gap {
		s.gaps[key] = gap
		s.notify()
	}
}

func (s *Source) closes(belongs func(view.Gap) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := len(s.gaps)
	maps.DeleteFunc(s.gaps, func(_ gapKey, gap view.Gap) bool { return belongs(gap) })
	if len(s.gaps) != before {
		s.notify()
	}
}

func (s *Source) notify() {
	select {
	case s.changed <- struct{}{}:
	default: // one is waiting to be received
	}
}

// compareObjects sorts as the API server does.
func compareObjects(a, b metav1.Object) int {
	return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
}
