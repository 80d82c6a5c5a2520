// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package live

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
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

// mirror has the objects of one resource. It is the store of a reflector, which lists and
// watches them, and starts again after every error.
type mirror[T object] struct {
	cache.Store
	resource string
	// fallback is the namespace to read if all may not be read, "" for none.
	fallback string
	watcher  cache.ListerWatcher
	// notify says that something has changed.
	notify func()

	mu sync.Mutex
	// answered says that there was a final answer, be it that reading is forbidden.
	answered bool
	// filled says that objects were read: those of namespace, or of all.
	filled    bool
	namespace string
	missed    map[gapKey]view.Gap
}

type gapKey struct{ verb, namespace string }

func newMirror[T object, L runtime.Object](s *Source, resource, fallback string, clientFor func(namespace string) lister[L]) *mirror[T] {
	m := &mirror[T]{
		Store: cache.NewStore(cache.MetaNamespaceKeyFunc), resource: resource, fallback: fallback, notify: s.Notify, missed: map[gapKey]view.Gap{},
	}
	m.watcher = cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return tried(m, verbList, func(namespace string) (runtime.Object, error) { return clientFor(namespace).List(ctx, o) })
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			// A watch that begins with a list of its own may be refused where a list is not:
			// the reflector then lists first.
			return tried(m, verbWatch, func(namespace string) (watch.Interface, error) { return clientFor(namespace).Watch(ctx, o) })
		},
	}, s.client)
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
	m.mu.Lock()
	defer m.mu.Unlock()
	gap := view.Gap{
		Verb: verb, Resource: m.resource, Namespace: namespace, Unknown: "Without it is unknown " + fleet.UnknownWithout[m.resource] + ".",
		Absent: apierrors.IsNotFound(err), Forbidden: apierrors.IsForbidden(err),
	}
	switch {
	case err == nil:
		m.namespace = namespace
		m.closes(func(g view.Gap) bool {
			return !g.Forbidden || g.Verb == verb && (namespace == metav1.NamespaceAll || g.Namespace == namespace)
		})
		return
	case apierrors.IsInvalid(err), apierrors.IsResourceExpired(err), apierrors.IsGone(err), errors.Is(err, context.Canceled):
		// The reflector goes on with another kind of list, or has ended.
		return
	case gap.Absent:
		gap.Message = "the API server does not have this resource"
	default:
		gap.Message = err.Error()
	}
	answered := m.answered || gap.Absent || gap.Forbidden && verb == verbList && (m.fallback == "" || namespace == m.fallback)
	if key := (gapKey{verb, namespace}); m.missed[key] != gap || m.answered != answered {
		m.missed[key], m.answered = gap, answered
		m.notify()
	}
}

// closes forgets gaps that are none any more.
func (m *mirror[T]) closes(none func(view.Gap) bool) {
	before := len(m.missed)
	maps.DeleteFunc(m.missed, func(_ gapKey, g view.Gap) bool { return none(g) })
	if len(m.missed) != before {
		m.notify()
	}
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

// gaps returns what cannot be seen, sorted.
func (m *mirror[T]) gaps() []view.Gap {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.SortedFunc(maps.Values(m.missed), func(a, b view.Gap) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Verb, b.Verb))
	})
}

// missing says which objects the mirror does not have.
func (m *mirror[T]) missing() (all []fleet.Missing) {
	m.mu.Lock()
	filled, namespace := m.filled, m.namespace
	m.mu.Unlock()
	if filled && namespace == metav1.NamespaceAll {
		return nil
	}
	for _, gap := range m.gaps() {
		same := func(other fleet.Missing) bool { return other.Namespace == gap.Namespace }
		if (!filled || gap.Namespace == metav1.NamespaceAll) && !slices.ContainsFunc(all, same) {
			all = append(all, fleet.Missing{Resource: gap.Resource, Namespace: gap.Namespace, Err: errors.New(gap.Message), Absent: gap.Absent})
		}
	}
	return all
}

// list returns the objects, sorted as the API server does.
func (m *mirror[T]) list() []T {
	var all []T
	for _, one := range m.List() {
		if o, is := one.(T); is {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b T) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	})
	return all
}

// Add adds an object. It is called by the reflector, as the next three are.
func (m *mirror[T]) Add(o any) error {
	defer m.notify()
	return m.Store.Add(trimmed(o))
}

// Update replaces an object.
func (m *mirror[T]) Update(o any) error {
	defer m.notify()
	return m.Store.Update(trimmed(o))
}

// Delete removes an object.
func (m *mirror[T]) Delete(o any) error {
	defer m.notify()
	return m.Store.Delete(o)
}

// Replace replaces all objects.
func (m *mirror[T]) Replace(all []any, version string) error {
	for _, o := range all {
		trimmed(o)
	}
	err := m.Store.Replace(all, version)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answered, m.filled = true, true
	// A watch may have delivered the list.
	m.closes(func(g view.Gap) bool {
		return g.Verb == verbList && (m.namespace == metav1.NamespaceAll || g.Namespace == m.namespace)
	})
	m.notify()
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
