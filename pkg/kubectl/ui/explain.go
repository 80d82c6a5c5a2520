// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/explain"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// fresh is how long an explanation by events, which make no new model, is taken for true.
const fresh = 30 * time.Second

// Explain prepares for explaining pods over what is known of the cluster. It is not called by
// several at once, and neither is what it returns.
type Explain func(context.Context, *fleet.Model) func(*corev1.Pod) view.Explanation

// ByAllocator explains as kubectl gpu explain does, with the same words. Events and namespaces
// are read from the client.
func ByAllocator(client kubernetes.Interface) Explain {
	return func(ctx context.Context, m *fleet.Model) func(*corev1.Pod) view.Explanation {
		x := explain.New(m, time.Now())
		x.ReadFrom(ctx, client)
		return func(pod *corev1.Pod) view.Explanation {
			var text bytes.Buffer
			e := x.Pod(ctx, pod)
			if err := explain.View(e).Write(&text, printer.Format{}); err != nil {
				return view.Explanation{Verdict: fmt.Sprintf("The explanation cannot be shown: %v", err)}
			}
			return view.Explanation{Verdict: verdict(e), Text: text.String(), Starting: e.Verdict == explain.Starting}
		}
	}
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
