// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// enoughFor says for how many of the pods that wait alike the end of claims is enough, unless it is for all.
func (h *helper) enoughFor(ctx context.Context, claims []string) string {
	if h.s.pod == nil {
		return ""
	}
	wish, _ := h.s.x.wish(h.s.pod)
	atLeast, alike := "", h.s.x.waiting()[wish].Len()
	if h.s.x.model.Hides(fleet.ResourcePods) {
		atLeast = "at least "
	}
	var ended []*resourceapi.ResourceClaim
	for _, one := range h.s.InTheWay {
		if slices.Contains(claims, one.Namespace+"/"+one.Claim) {
			ended = append(ended, one.claim)
		}
	}
	_, fit, known := h.s.fill(ctx, queue{planner: h.s.x.planner.Without(ended...), apart: true}, alike)
	if !known || fit == 0 || fit >= alike {
		return ""
	}
	return fmt.Sprintf(", which is enough for %d of %s%d that wait alike", fit, atLeast, alike)
}

// count finds who waits by what they ask for: pods that the scheduler looks at, or claims that several of these share.
func (x *Explainer) count() map[string]sets.Set[string] {
	all := map[string]sets.Set[string]{}
	for _, p := range x.model.Pods {
		if p.Spec.NodeName == "" && p.DeletionTimestamp == nil && len(p.Spec.SchedulingGates) == 0 && !fleet.Ended(p) {
			wish, who := x.wish(p)
			if all[wish] == nil {
				all[wish] = sets.New[string]()
			}
			all[wish].Insert(who)
		}
	}
	return all
}

// wish is what a pod asks for, in a form that is the same for pods that ask for the same, and who asks: the pod, or those who name its claims.
func (x *Explainer) wish(pod *corev1.Pod) (wish, who string) {
	var specs []resourceapi.ResourceClaimSpec
	own := string(pod.UID)
	for _, c := range allocation.ClaimsOf(x.model.Snapshot, pod) {
		if c.Claim == nil {
			continue
		}
		if specs = append(specs, c.Claim.Spec); c.Template == "" {
			who, own = who+" "+c.Claim.Namespace+"/"+c.Claim.Name, ""
		}
	}
	if c := x.planner.Cluster.ExtendedClaim(pod, nil); c != nil {
		specs = append(specs, c.Spec)
	}
	text, _ := json.Marshal(specs) // these types can be encoded
	return string(text), who + own
}

// alike are explanations that say the same, but for the names of pods and of the claims that were made for them.
type alike []*Explanation

// together puts those together that are alike, in the order of the first of each.
func together(all []*Explanation, f printer.Format) []alike {
	var out []alike
	at := map[string]int{}
	for _, e := range all {
		key := e.impersonal(f)
		if _, has := at[key]; !has {
			at[key], out = len(out), append(out, nil)
		}
		out[at[key]] = append(out[at[key]], e)
	}
	return out
}

// impersonal is the text of an explanation without the names that belong to its pod alone.
func (e *Explanation) impersonal(f printer.Format) string {
	var text bytes.Buffer
	(&page{text: &text, format: f}).explanation(e, nil)
	var names []string
	for i, name := range e.personal {
		names = append(names, name, fmt.Sprintf("\x00%d\x00", i))
	}
	return e.Subject.Namespace + " " + strings.NewReplacer(names...).Replace(text.String())
}

// others names the other pods.
func (a alike) others(wide bool) string {
	var names []string
	for _, e := range a[1:] {
		names = append(names, e.Subject.Name)
	}
	most := mostLines
	if wide {
		most = len(names)
	}
	return fmt.Sprintf("So it is with %d more %s: %s.", len(names), plural(len(names), "pod", "pods"), printer.Some(names, most))
}
