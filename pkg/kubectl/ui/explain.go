// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/explain"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// fresh is how long the answer to a question about one pod or namespace is used again: a page
// that is left open must not ask the API server for the events of every stuck pod all the time.
const fresh = 30 * time.Second

// Explain prepares for explaining pods over what is known of the cluster. It is not called by
// several at once, and neither is what it returns.
type Explain func(context.Context, *fleet.Model) func(*corev1.Pod) view.Explanation

// ByAllocator explains as kubectl gpu explain does, with the same words. Events and namespaces
// are read from the client.
func ByAllocator(client kubernetes.Interface) Explain {
	namespaces, volumes := memory[string, bool, bool]{}, memory[string, bool, string]{}
	events := memory[types.UID, []corev1.Event, error]{}
	return func(ctx context.Context, m *fleet.Model) func(*corev1.Pod) view.Explanation {
		x := explain.New(m, time.Now())
		x.ReadFrom(ctx, client)
		readEvents, readNamespace, readVolume := x.Events, x.AdminAllowed, x.Volume
		x.Volume = func(of, name string) (is bool, doubt string) {
			return volumes.get(of+"/"+name, func() (bool, string) { return readVolume(of, name) })
		}
		x.Events = func(pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
			return events.get(pod.UID, func() ([]corev1.Event, error) { return readEvents(pod, claims) })
		}
		x.AdminAllowed = func(name string) (allowed, known bool) {
			return namespaces.get(name, func() (bool, bool) { return readNamespace(name) })
		}
		return func(pod *corev1.Pod) view.Explanation { return explanationOf(x.Pod(ctx, pod)) }
	}
}

// memory has answers, of two parts each, that are used again while they are fresh.
type memory[K comparable, A, B any] map[K]remembered[A, B]

type remembered[A, B any] struct {
	a     A
	b     B
	since time.Time
}

func (m memory[K, A, B]) get(key K, ask func() (A, B)) (A, B) {
	now := time.Now()
	maps.DeleteFunc(m, func(_ K, r remembered[A, B]) bool { return now.Sub(r.since) >= fresh })
	r, has := m[key]
	if !has {
		r.a, r.b = ask()
		r.since = now
		m[key] = r
	}
	return r.a, r.b
}

func explanationOf(e *explain.Explanation) view.Explanation {
	var text bytes.Buffer
	if err := explain.View(e).Write(&text, printer.Format{Unicode: true}); err != nil {
		return view.Explanation{Verdict: fmt.Sprintf("The explanation cannot be shown: %v", err)}
	}
	return view.Explanation{Verdict: verdict(e), Text: text.String()}
}

// verdict is an explanation in one line.
func verdict(e *explain.Explanation) string {
	switch {
	case e.Verdict == explain.Allocatable:
		return "It can be allocated now; the scheduler will try again."
	case len(e.Unseen) > 0 && e.Verdict == explain.Unknown:
		return "Unknown: " + e.Unseen[0]
	case len(e.Stuck) > 0:
		return e.Stuck[0].Text
	case len(e.Reasons) > 0:
		return e.Reasons[0].Text
	default:
		return cmp.Or(string(e.Verdict), "Unknown")
	}
}
