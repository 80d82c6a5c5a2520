// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// LastSeen returns when what an event reports was observed last.
func LastSeen(e *corev1.Event) time.Time {
	seen := e.LastTimestamp.Time
	if e.Series != nil && e.Series.LastObservedTime.After(seen) {
		seen = e.Series.LastObservedTime.Time
	}
	for _, t := range []time.Time{e.EventTime.Time, e.CreationTimestamp.Time} {
		if seen.IsZero() {
			seen = t
		}
	}
	return seen
}
