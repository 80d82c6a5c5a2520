// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

const (
	verbList  = "list"
	verbWatch = "watch"
)

// lister is what all typed clients have.
type lister[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// object is a pointer to an object of the API.
type object interface {
	comparable
	runtime.Object
	metav1.Object
}

// scope is what is mirrored, and where.
type scope struct {
	source   *Source
	client   kubernetes.Interface
	resource string
	// fallback is the namespace to read if all may not be read, "" for none.
	fallback string
}

// mirror has the objects of one resource. It is the store of a reflector, which lists and
// watches them, and starts again after every error.
type mirror[T object] struct {
	scope
	store   cache.Store
	watcher cache.ListerWatcher

	mu sync.Mutex
	// answered says that there was a final answer, be it that reading is forbidden.
	answered bool
	// filled says that objects were read: those of namespace, or of all.
	filled    bool
	namespace string
}

func newMirror[T object, L runtime.Object](in scope, clientFor func(namespace string) lister[L]) *mirror[T] {
	m := &mirror[T]{scope: in, store: cache.NewStore(cache.MetaNamespaceKeyFunc)}
	m.watcher = cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return tried(m, verbList, func(namespace string) (runtime.Object, error) { return clientFor(namespace).List(ctx, o) })
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			// A watch that begins with a list of its own may be refused where a list is not:
			// the reflector then lists first.
			return tried(m, verbWatch, func(namespace string) (watch.Interface, error) { return clientFor(namespace).Watch(ctx, o) })
		},
	}, in.client)
	return m
}

// tried calls in all namespaces and, where that is forbidden, in the one to fall back to.
func tried[T object, R any](m *mirror[T], verb string, call func(namespace string) (R, error)) (R, error) {
	result, err := call(metav1.NamespaceAll)
	m.note(verb, metav1.NamespaceAll, err)
	if m.fallback == "" || !apierrors.IsForbidden(err) {
		return result, err
	}
	result, err = call(m.fallback)
	m.note(verb, m.fallback, err)
	return result, err
}

// note remembers what the API server answered to a call.
func (m *mirror[T]) note(verb, namespace string, err error) {
	gap := view.Gap{
		Verb: verb, Resource: m.resource, Namespace: namespace, Unknown: "Without it is unknown " + fleet.UnknownWithout[m.resource] + ".",
	}
	switch {
	case err == nil:
		m.mu.Lock()
		m.namespace = namespace
		m.mu.Unlock()
		m.source.closes(func(g view.Gap) bool {
			return g.Resource == m.resource && (!g.Forbidden || g.Verb == verb && (namespace == metav1.NamespaceAll || g.Namespace == namespace))
		})
	case apierrors.IsInvalid(err), apierrors.IsResourceExpired(err), apierrors.IsGone(err), errors.Is(err, context.Canceled):
		// The reflector goes on with another kind of list, or has ended.
	case apierrors.IsNotFound(err):
		gap.Absent, gap.Message = true, "the API server does not have this resource"
		m.source.lacks(gap)
		m.settle()
	case apierrors.IsForbidden(err):
		gap.Forbidden, gap.Message = true, err.Error()
		m.source.lacks(gap)
		if verb == verbList && (m.fallback == "" || namespace == m.fallback) {
			m.settle()
		}
	default:
		gap.Message = err.Error()
		m.source.lacks(gap)
	}
}

// settle notes that there is a final answer, for now.
func (m *mirror[T]) settle() {
	m.mu.Lock()
	m.answered = true
	m.mu.Unlock()
	m.source.notify()
}

func (m *mirror[T]) run(ctx context.Context) {
	var none T
	quiet := logr.Discard() // errors are gaps, which the page shows
	r := cache.NewReflectorWithOptions(m.watcher, nil, m, cache.ReflectorOptions{
		Logger: &quiet, Name: m.resource, TypeDescription: fmt.Sprintf("%T", none),
	})
	r.RunWithContext(klog.NewContext(ctx, quiet))
}

func (m *mirror[T]) ready() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.answered
}

// missing says which objects the mirror does not have.
func (m *mirror[T]) missing() []fleet.Missing {
	m.mu.Lock()
	complete := m.filled && m.namespace == metav1.NamespaceAll
	filled := m.filled
	m.mu.Unlock()
	if complete {
		return nil
	}
	var all []fleet.Missing
	for _, gap := range m.source.Gaps() {
		same := func(other fleet.Missing) bool { return other.Namespace == gap.Namespace }
		if gap.Resource == m.resource && (!filled || gap.Namespace == metav1.NamespaceAll) && !slices.ContainsFunc(all, same) {
			all = append(all, fleet.Missing{Resource: gap.Resource, Namespace: gap.Namespace, Err: errors.New(gap.Message), Absent: gap.Absent})
		}
	}
	return all
}

// list returns the objects, sorted.
func (m *mirror[T]) list() []T {
	var all []T
	for _, one := range m.store.List() {
		if o, is := one.(T); is {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b T) int { return compareObjects(a, b) })
	return all
}

// Add adds an object. It is called by the reflector, as the next four are.
func (m *mirror[T]) Add(o any) error { return m.change(m.store.Add(trimmed(o))) }

// Update replaces an object.
func (m *mirror[T]) Update(o any) error { return m.change(m.store.Update(trimmed(o))) }

// Delete removes an object.
func (m *mirror[T]) Delete(o any) error { return m.change(m.store.Delete(o)) }

// Replace replaces all objects.
func (m *mirror[T]) Replace(all []any, version string) error {
	for _, o := range all {
		trimmed(o)
	}
	err := m.store.Replace(all, version)
	m.mu.Lock()
	m.answered, m.filled = true, true
	namespace := m.namespace
	m.mu.Unlock()
	// A watch may have delivered the list.
	m.source.closes(func(g view.Gap) bool {
		return g.Resource == m.resource && g.Verb == verbList && (namespace == metav1.NamespaceAll || g.Namespace == namespace)
	})
	return m.change(err)
}

// Resync does nothing: every reader reads the whole mirror.
func (m *mirror[T]) Resync() error { return nil }

func (m *mirror[T]) change(err error) error {
	m.source.notify()
	return err
}

// trimmed drops what nobody looks at and what takes much memory. The object has just been
// decoded, so that nothing else uses it.
func trimmed(o any) any {
	if accessor, is := o.(metav1.Object); is {
		accessor.SetManagedFields(nil)
	}
	return o
}
