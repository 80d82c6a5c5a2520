// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"golang.org/x/sync/errgroup"
)

// Snapshot is what was read of a cluster, all drivers' objects, sorted by the API server: by
// namespace and name. It is not of one moment: each list is.
type Snapshot struct {
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
}

// String says what is missing, for people.
func (m Missing) String() string {
	where := "in all namespaces"
	if m.Namespace != "" {
		where = "in namespace " + m.Namespace
	}
	return fmt.Sprintf("cannot list %s %s: %v", m.Resource, where, m.Err)
}

// pageSize is that of kubectl.
const pageSize = 500

// Read lists everything that a Snapshot has. Claims, templates and pods are those of all
// namespaces; where that is forbidden, those of the given one, and Missing says so: devices may
// then be taken by claims that nobody sees. Objects that may not be read at all are missing,
// too. It fails if the API server cannot be reached.
func Read(ctx context.Context, client kubernetes.Interface, namespace string) (*Snapshot, error) {
	s := &Snapshot{}
	r := &reader{snapshot: s}
	group, ctx := errgroup.WithContext(ctx)
	core, resource := client.CoreV1(), client.ResourceV1()
	const suffix = ".resource.k8s.io"
	group.Go(func() error { return read(ctx, r, &s.Nodes, "nodes", "", core.Nodes().List) })
	group.Go(func() error {
		return read(ctx, r, &s.Slices, "resourceslices"+suffix, "", resource.ResourceSlices().List)
	})
	group.Go(func() error {
		return read(ctx, r, &s.Classes, "deviceclasses"+suffix, "", resource.DeviceClasses().List)
	})
	group.Go(func() error {
		return read(ctx, r, &s.TaintRules, "devicetaintrules"+suffix, "", resource.DeviceTaintRules().List)
	})
	group.Go(func() error {
		return readNamespaced(ctx, r, &s.Claims, "resourceclaims"+suffix, namespace, func(n string) lister[*resourceapi.ResourceClaimList] { return resource.ResourceClaims(n).List })
	})
	group.Go(func() error {
		return readNamespaced(ctx, r, &s.Templates, "resourceclaimtemplates"+suffix, namespace, func(n string) lister[*resourceapi.ResourceClaimTemplateList] {
			return resource.ResourceClaimTemplates(n).List
		})
	})
	group.Go(func() error {
		return readNamespaced(ctx, r, &s.Pods, "pods", namespace, func(n string) lister[*corev1.PodList] { return core.Pods(n).List })
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return s, nil
}

type lister[L runtime.Object] func(context.Context, metav1.ListOptions) (L, error)

type reader struct {
	mu       sync.Mutex
	snapshot *Snapshot
}

func (r *reader) lacks(m Missing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.snapshot.Missing = append(r.snapshot.Missing, m)
}

// readNamespaced reads the objects of all namespaces or, where that is forbidden, of one.
func readNamespaced[T runtime.Object, L runtime.Object](ctx context.Context, r *reader, into *[]T, resource, namespace string, in func(string) lister[L]) error {
	err := list(ctx, into, in(metav1.NamespaceAll))
	if !unreadable(err) {
		return wrapped(err, resource)
	}
	r.lacks(Missing{Resource: resource, Err: err})
	if namespace == "" {
		return nil
	}
	return read(ctx, r, into, resource, namespace, in(namespace))
}

func read[T runtime.Object, L runtime.Object](ctx context.Context, r *reader, into *[]T, resource, namespace string, from lister[L]) error {
	err := list(ctx, into, from)
	if unreadable(err) {
		r.lacks(Missing{Resource: resource, Namespace: namespace, Err: err})
		return nil
	}
	return wrapped(err, resource)
}

// list reads page by page, from the API server's cache.
func list[T runtime.Object, L runtime.Object](ctx context.Context, into *[]T, from lister[L]) error {
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

// unreadable reports whether a list is forbidden or unknown to the API server.
func unreadable(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsNotFound(err) }

func wrapped(err error, resource string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("list %s: %w", resource, err)
}
