// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/doctor"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// lostServer notes what the driver has said last of the end of an MPS server, if a container still runs that had started before.
func lostServer(s *sight, events []corev1.Event) {
	var last *corev1.Event
	for i := range events {
		if e := &events[i]; e.Reason == "MPSServerLost" && (last == nil || fleet.LastSeen(e).After(fleet.LastSeen(last))) {
			last = e
		}
	}
	if last != nil && fleet.RunsSince(s.pod, fleet.LastSeen(last)) {
		s.note("Event %s, %s ago: %s", last.Reason, printer.Age(s.x.now.Sub(fleet.LastSeen(last))), last.Message)
	}
}

// untainted notes what the driver has said of the GPUs that the pod uses, and has not published as a taint yet. Who may not read events of
// nodes learns of it with the taint.
func untainted(s *sight) {
	if s.x.NodeEvents == nil {
		return
	}
	gpus := sets.New[*fleet.GPU]()
	for _, h := range s.x.model.Holdings {
		if h.Device == nil || gpus.Has(h.Device.GPU) || !slices.Contains(s.own, h.Claim) {
			continue
		}
		gpus.Insert(h.Device.GPU)
		if events, err := s.x.NodeEvents(h.Device.GPU.Node.Name); err == nil {
			s.Notes = append(s.Notes, doctor.Untainted(s.x.model, s.x.now, events, h.Device.GPU)...)
		}
	}
}
