// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
)

// podEvent is what a pod is told of some of its claims.
type podEvent struct {
	Event
	pod    corev1.ObjectReference
	claims []string
}

// tellUsers tells claims and their pods.
func (r *Recorder) tellUsers(ctx context.Context, namespace string, all []Event) {
	pauses, began := pauses, time.Now()
	found := map[claim.Ref]*resourceapi.ResourceClaim{}
	var try func()
	try = func() {
		err := r.find(ctx, all, found)
		switch {
		case err != nil && !isFinal(err) && time.Since(began) < eventTTL && r.users.later(ctx, namespace, &pauses, try):
			return
		case err != nil:
			klog.FromContext(ctx).Error(err, "The pods of claims are not known, so that only the claims get events")
		}
		var ofPods []*podEvent
		for _, e := range all {
			r.users.tell(ctx, r.event(aboutClaim(e.Claim), &e, e.Message()))
			for _, pod := range podsOf(found[e.Claim]) {
				ofPods = joinPods(ofPods, pod, &e)
			}
		}
		for _, e := range ofPods {
			r.users.tell(ctx, r.event(e.pod, &e.Event, e.Message(e.claims...)))
		}
	}
	r.users.add(ctx, namespace, try)
}

// find reads the claims of events that were not found before. One that does not exist is nil.
func (r *Recorder) find(ctx context.Context, all []Event, found map[claim.Ref]*resourceapi.ResourceClaim) error {
	for _, e := range all {
		if _, known := found[e.Claim]; known {
			continue
		}
		c, err := r.options.Claim(ctx, e.Claim)
		if err != nil {
			return err
		}
		found[e.Claim] = c
	}
	return nil
}

// podsOf lists the pods for which a claim is reserved.
func podsOf(c *resourceapi.ResourceClaim) (pods []corev1.ObjectReference) {
	if c == nil {
		return nil
	}
	for _, user := range c.Status.ReservedFor {
		if user.APIGroup == "" && user.Resource == "pods" {
			pods = append(pods, corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: c.Namespace, Name: user.Name, UID: user.UID})
		}
	}
	slices.SortFunc(pods, func(a, b corev1.ObjectReference) int { return cmp.Compare(a.Name, b.Name) })
	return pods
}

// joinPods adds the event of a claim to those of its pods.
func joinPods(all []*podEvent, pod corev1.ObjectReference, e *Event) []*podEvent {
	at := slices.IndexFunc(all, func(p *podEvent) bool {
		return p.pod == pod && p.Type == e.Type && p.Reason == e.Reason && p.Text == e.Text
	})
	if at < 0 {
		one := &podEvent{Event: *e, pod: pod, claims: []string{e.Claim.Name}}
		one.Subjects = slices.Clone(e.Subjects)
		return append(all, one)
	}
	all[at].claims = append(all[at].claims, e.Claim.Name)
	all[at].add(e.Subjects)
	return all
}
