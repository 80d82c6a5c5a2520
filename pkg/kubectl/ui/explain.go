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

	"github.com/partage-dev/partage/pkg/kubectl/explain"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// Explain prepares for explaining pods over what is known of the cluster.
type Explain func(context.Context, *fleet.Model) func(*corev1.Pod) view.Explanation

// ByAllocator explains as kubectl gpu explain does, with the same words.
func ByAllocator(ctx context.Context, m *fleet.Model) func(*corev1.Pod) view.Explanation {
	x := explain.New(ctx, m.Snapshot, m.Driver, time.Now())
	return func(pod *corev1.Pod) view.Explanation {
		e := x.Pod(ctx, pod)
		var text bytes.Buffer
		if err := explain.View(e).Render(&text, printer.Format{Unicode: true}); err != nil {
			return view.Explanation{Verdict: fmt.Sprintf("The explanation cannot be shown: %v", err)}
		}
		return view.Explanation{Verdict: verdict(e), Text: text.String()}
	}
}

// verdict is an explanation in one line.
func verdict(e *explain.Explanation) string {
	switch {
	case e.Verdict == explain.Allocatable:
		return "It can be allocated now; the scheduler will try again."
	case len(e.Reasons) > 0:
		return e.Reasons[0].Text
	default:
		return cmp.Or(string(e.Verdict), "Unknown")
	}
}
