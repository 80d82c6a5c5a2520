// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// Snapshot is what was read of a cluster, all drivers' objects, sorted by the API server: by
// namespace and name. It is not of one moment: each list is.
type Snapshot struct {
	// Namespace is the one that was read where all could not be.
	Namespace  string
	Nodes      []*corev1.Node
	Slices     []*resourceapi.ResourceSlice
	Classes    []*resourceapi.DeviceClass
	TaintRules []*resourceapi.DeviceTaintRule
	Claims     []*resourceapi.ResourceClaim
	Templates  []*resourceapi.ResourceClaimTemplate
	Pods       []*corev1.Pod
	// Missing is what could not be read.
	Missing []Missing
}

// Missing is a list that the user may not read, or that the API server does not have.
type Missing struct {
	// Resource is the plural name, with the group if it has one, such as
	// "resourceclaims.resource.k8s.io".
	Resource string
	// Namespace is "" where all namespaces were asked for.
	Namespace string
	// Err is what the API server answered.
	Err error
	// Absent says that the API server does not have such objects, so that none is hidden.
	Absent bool
}

// String says what is missing, why, and what is unknown without it.
func (m Missing) String() string {
	why := m.Err.Error()
	if apierrors.IsForbidden(m.Err) {
		// The rest of the error says at length what is said already.
		why = "it is forbidden"
	}
	if since := listed[m.Resource].since; m.Absent && since != "" {
		why = "the API server does not have it in resource.k8s.io/v1: " + since
	}
	return m.text() + ": " + why + m.Unknown("; without it is unknown ")
}

func (m Missing) text() string {
	text := "cannot list " + m.Resource
	switch {
	case m.Namespace != "":
		text += " in namespace " + m.Namespace
	case listed[m.Resource].namespaced:
		text += " in all namespaces"
	}
	return text
}

// Unknown says what commands cannot know without it, after some words, or nothing.
func (m Missing) Unknown(words string) string {
	if unknown := listed[m.Resource].unknown; unknown != "" {
		return words + unknown
	}
	return ""
}

const apiGroup = ".resource.k8s.io"

// Resources that are read, as Missing names them.
const (
	ResourceNodes      = "nodes"
	ResourceSlices     = "resourceslices" + apiGroup
	ResourceClasses    = "deviceclasses" + apiGroup
	ResourceTaintRules = "devicetaintrules" + apiGroup
	ResourceClaims     = "resourceclaims" + apiGroup
	ResourceTemplates  = "resourceclaimtemplates" + apiGroup
	ResourcePods       = "pods"
)

// listed are the resources that are read: whether they are of a namespace, what commands cannot know without them, and which Kubernetes has those of
// resource.k8s.io in the version that is read.
var listed = map[string]struct {
	namespaced     bool
	unknown, since string
}{
	ResourceNodes:      {false, "which labels and taints nodes have, and whether they are ready", ""},
	ResourceSlices:     {false, "which devices there are", sinceV1},
	ResourceClasses:    {false, "which devices a claim's class selects", sinceV1},
	ResourceTaintRules: {false, "which devices rules keep from being allocated", "Kubernetes 1.37 does"},
	ResourceClaims:     {true, "who has devices that look free", sinceV1},
	ResourceTemplates:  {true, "which claims pods that wait will have", sinceV1},
	ResourcePods:       {true, "which pods use a claim", ""},
}

const sinceV1 = "Kubernetes does since 1.34, unless it is turned off"

// Warn writes a line for everything that could not be read, except for the resources that a
// command has no use for.
func (s *Snapshot) Warn(w io.Writer, except ...string) {
	for _, m := range s.Missing {
		if !slices.Contains(except, m.Resource) {
			// Nobody reads what cannot be written.
			_, _ = fmt.Fprintln(w, "warning:", m)
		}
	}
}

// Need returns an error if one of the resources could not be read at all, in the namespace that was
// asked for: without it a command has nothing to say.
func (s *Snapshot) Need(namespace string, resources ...string) error {
	for _, m := range s.Missing {
		if slices.Contains(resources, m.Resource) && (!listed[m.Resource].namespaced || m.Namespace == namespace) {
			return fmt.Errorf("%s: %w%s", m.text(), m.Err, m.Unknown("; without it is unknown "))
		}
	}
	return nil
}

// Class returns a DeviceClass, or nil.
func (s *Snapshot) Class(name string) *resourceapi.DeviceClass { return Named(s.Classes, "", name) }

// ByExtendedResource returns the DeviceClasses that name each extended resource.
func (s *Snapshot) ByExtendedResource() map[string][]*resourceapi.DeviceClass {
	classes := map[string][]*resourceapi.DeviceClass{}
	for _, c := range s.Classes {
		if name := c.Spec.ExtendedResourceName; name != nil {
			classes[*name] = append(classes[*name], c)
		}
	}
	return classes
}

// Claim returns a ResourceClaim, or nil.
func (s *Snapshot) Claim(namespace, name string) *resourceapi.ResourceClaim {
	return Named(s.Claims, namespace, name)
}

// Node returns a Node, or nil.
func (s *Snapshot) Node(name string) *corev1.Node { return Named(s.Nodes, "", name) }

// Named returns the object of a namespace and name, or nil.
func Named[T interface {
	comparable
	metav1.Object
}](all []T, namespace, name string) (none T) {
	for _, o := range all {
		if o.GetNamespace() == namespace && o.GetName() == name {
			return o
		}
	}
	return none
}

// Hides reports whether objects of a resource may exist that could not be read, those of other namespaces included.
func (s *Snapshot) Hides(resource string) bool {
	return slices.ContainsFunc(s.Missing, func(m Missing) bool {
		return m.Resource == resource && (m.Namespace == "" || !listed[resource].namespaced) && !m.Absent
	})
}

// Lacks reports whether the list of a resource could not be read, in a namespace or, with "", in all. Where all could not be, only one was tried.
func (s *Snapshot) Lacks(resource, namespace string) bool {
	return slices.ContainsFunc(s.Missing, func(m Missing) bool {
		return m.Resource == resource && (m.Namespace == namespace || m.Namespace == "" && namespace != s.Namespace)
	})
}

// pageSize is that of kubectl.
const pageSize = 500

// Read lists everything that a Snapshot has. Claims, templates and pods are those of all
// namespaces; where that is forbidden, those of the given one, and Missing says so: devices may
// then be taken by claims that nobody sees. Objects that may not be read at all are missing,
// too. It fails if the API server cannot be reached.
func Read(ctx context.Context, client kubernetes.Interface, namespace string) (*Snapshot, error) {
	s := &Snapshot{Namespace: namespace}
	lists, ctx := errgroup.WithContext(ctx)
	r, core, resource := &reader{snapshot: s, lists: lists}, client.CoreV1(), client.ResourceV1()
	start(ctx, r, &s.Nodes, ResourceNodes, "", func(string) Lister[*corev1.NodeList] { return core.Nodes().List })
	start(ctx, r, &s.Slices, ResourceSlices, "", func(string) Lister[*resourceapi.ResourceSliceList] { return resource.ResourceSlices().List })
	start(ctx, r, &s.Classes, ResourceClasses, "", func(string) Lister[*resourceapi.DeviceClassList] { return resource.DeviceClasses().List })
	start(ctx, r, &s.TaintRules, ResourceTaintRules, "", func(string) Lister[*resourceapi.DeviceTaintRuleList] { return resource.DeviceTaintRules().List })
	start(ctx, r, &s.Claims, ResourceClaims, namespace, func(n string) Lister[*resourceapi.ResourceClaimList] { return resource.ResourceClaims(n).List })
	start(ctx, r, &s.Templates, ResourceTemplates, namespace, func(n string) Lister[*resourceapi.ResourceClaimTemplateList] {
		return resource.ResourceClaimTemplates(n).List
	})
	start(ctx, r, &s.Pods, ResourcePods, namespace, func(n string) Lister[*corev1.PodList] { return core.Pods(n).List })
	if err := lists.Wait(); err != nil {
		return nil, err
	}
	// They come in any order.
	slices.SortFunc(s.Missing, func(a, b Missing) int {
		return cmp.Or(cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Namespace, b.Namespace))
	})
	return s, nil
}

// Lister asks for a page of objects.
type Lister[L runtime.Object] func(context.Context, metav1.ListOptions) (L, error)

// reader reads several lists at once.
type reader struct {
	lists    *errgroup.Group
	mu       sync.Mutex
	snapshot *Snapshot
}

func start[T, L runtime.Object](ctx context.Context, r *reader, into *[]T, resource, namespace string, in func(string) Lister[L]) {
	r.lists.Go(func() error { return read(ctx, r, into, resource, namespace, in) })
}

// List adds the objects of one more resource, those of all namespaces or, where that is forbidden, of one. What could not be read is missing
// in the snapshot.
func List[T, L runtime.Object](ctx context.Context, s *Snapshot, into *[]T, resource, namespace string, in func(string) Lister[L]) error {
	return read(ctx, &reader{snapshot: s}, into, resource, namespace, in)
}

// read reads the objects of all namespaces or, where that is forbidden, of one.
func read[T, L runtime.Object](ctx context.Context, r *reader, into *[]T, resource, namespace string, in func(string) Lister[L]) error {
	for _, n := range slices.Compact([]string{metav1.NamespaceAll, namespace}) {
		err := list(ctx, into, in(n))
		if err == nil {
			return nil
		}
		if !Unreadable(err) {
			return fmt.Errorf("list %s: %w", resource, err)
		}
		r.mu.Lock()
		r.snapshot.Missing = append(r.snapshot.Missing, Missing{Resource: resource, Namespace: n, Err: err, Absent: apierrors.IsNotFound(err)})
		r.mu.Unlock()
	}
	return nil
}

// list reads page by page, from the API server's cache.
func list[T runtime.Object, L runtime.Object](ctx context.Context, into *[]T, from Lister[L]) error {
	*into = nil
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return from(ctx, o) })
	pages.PageSize = pageSize
	return pages.EachListItem(ctx, metav1.ListOptions{ResourceVersion: "0"}, func(o runtime.Object) error {
		one, is := o.(T)
		if !is {
			return fmt.Errorf("the list has a %T", o)
		}
		*into = append(*into, one)
		return nil
	})
}

// Unreadable reports whether what was asked for is forbidden, or unknown to the API server.
func Unreadable(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsNotFound(err) }

// Scope is which claims a command is about.
type Scope struct {
	// Namespace is "" for all. Labels are those of claims or of the pods that use them, nil for all.
	Namespace string
	Labels    labels.Selector
}

// Has reports whether a command is about the claim of a holding. A claim that is made from a template has no labels of its pod, and people
// know those. They count together, so that app!=web leaves out what a pod of web uses.
func (s Scope) Has(h *Holding) bool {
	own := labels.Set(h.Claim.Labels)
	return (s.Namespace == "" || h.Claim.Namespace == s.Namespace) && (s.Labels == nil || len(h.Pods) == 0 && s.Labels.Matches(own) ||
		slices.ContainsFunc(h.Pods, func(p *corev1.Pod) bool {
			return s.Labels.Matches(labels.Merge(own, p.Labels)) || s.Labels.Matches(labels.Merge(p.Labels, own))
		}))
}

// Look makes the model for a command, and returns what it is about. It fails where a resource that is needed, if one is,
// cannot be read, and warns of all others but those that the command has no use for.
func Look(ctx context.Context, o *options.Options, client kubernetes.Interface, needed string, unused ...string) (*Model, Scope, error) {
	var scope Scope
	var err error
	if scope.Labels, err = o.Labels(); err != nil {
		return nil, scope, err
	}
	if scope.Namespace, err = o.Namespace(); err != nil {
		return nil, scope, err
	}
	snapshot, err := Read(ctx, client, scope.Namespace)
	if err != nil {
		return nil, scope, err
	}
	if err := snapshot.Need(scope.Namespace, needed); err != nil {
		return nil, scope, err
	}
	snapshot.Warn(o.ErrOut, unused...)
	return New(snapshot, o.Driver), scope, nil
}
