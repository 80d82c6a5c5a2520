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
	type namespace struct{ allowed, known bool }
	type volume struct {
		is    bool
		doubt string
	}
	namespaces, events, volumes := memory[string, namespace]{}, memory[types.UID, eventsAnswer]{}, memory[string, volume]{}
	return func(ctx context.Context, m *fleet.Model) func(*corev1.Pod) view.Explanation {
		x := explain.New(ctx, m.Snapshot, m.Driver, time.Now())
		x.ReadFrom(ctx, client)
		readEvents, readNamespace, readVolume := x.Events, x.AdminAllowed, x.Volume
		x.Volume = func(of, name string) (is bool, doubt string) {
			answer := volumes.get(of+"/"+name, func() volume {
				is, doubt := readVolume(of, name)
				return volume{is, doubt}
			})
			return answer.is, answer.doubt
		}
		x.Events = func(pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
			answer := events.get(pod.UID, func() eventsAnswer {
				list, err := readEvents(pod, claims)
				return eventsAnswer{list, err}
			})
			return answer.list, answer.err
		}
		x.AdminAllowed = func(name string) (allowed, known bool) {
			answer := namespaces.get(name, func() namespace {
				allowed, known := readNamespace(name)
				return namespace{allowed, known}
			})
			return answer.allowed, answer.known
		}
		return func(pod *corev1.Pod) view.Explanation { return explanationOf(x.Pod(ctx, pod)) }
	}
}

type eventsAnswer struct {
	list []corev1.Event
	err  error
}

// memory has answers that are used again while they are fresh.
type memory[K comparable, V any] map[K]remembered[V]

type remembered[V any] struct {
	value V
	since time.Time
}

func (m memory[K, V]) get(key K, ask func() V) V {
	now := time.Now()
	maps.DeleteFunc(m, func(_ K, r remembered[V]) bool { return now.Sub(r.since) >= fresh })
	if r, has := m[key]; has {
		return r.value
	}
	m[key] = remembered[V]{ask(), now}
	return m[key].value
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
