// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/quote"
)

// ClaimEvent is an event about a claim, which each pod that uses the claim gets as well.
type ClaimEvent struct {
	Claim claim.Ref
	// Type and Reason are those of the event.
	Type, Reason string
	// Devices are those of the claim that it is about; none if the text names them.
	Devices []string
	// Text says what has happened and what to do.
	Text string
}

// message names the claims, if any.
func (n *ClaimEvent) message(claims []string) string {
	var about []string
	if len(n.Devices) > 0 {
		about = append(about, plural("device", n.Devices))
	}
	if len(claims) > 0 {
		about = append(about, plural("claim", claims))
	}
	if len(about) == 0 {
		return n.Text
	}
	subject := strings.Join(about, " of ")
	return strings.ToUpper(subject[:1]) + subject[1:] + ": " + n.Text
}

func plural(noun string, names []string) string {
	if len(names) > 1 {
		noun += "s"
	}
	return noun + " " + quote.Names(names)
}

// podEvent is an event about one pod.
type podEvent struct {
	ClaimEvent
	pod    corev1.ObjectReference
	claims []string
	// first is the report that it was first made of.
	first *report
}

// writeClaimEvents makes events about claims that still exist, and about their pods: what
// is the same for several claims of a pod is one event. All claims are in one namespace.
func (e *Events) writeClaimEvents(ctx context.Context, namespace string, batch []*report) {
	var all []*podEvent
	var failed error
	for _, r := range batch {
		var pods []corev1.ObjectReference
		var gone bool
		err := failed
		// It would be the same for the others.
		if failed == nil {
			pods, gone, err = e.podsOf(ctx, r.users.Claim)
		}
		if err != nil && !isFinal(err) {
			failed = err
			e.users.settle(ctx, namespace, r, writtenEvent{}, err)
			continue
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "The pods of a claim are not known, so that only the claim gets an event", "claim", r.users.Claim)
		}
		e.users.settle(ctx, namespace, r, writtenEvent{}, nil)
		if gone || ctx.Err() != nil {
			continue
		}
		about := e.newReport(aboutClaim(r.users.Claim), r.users.Type, r.users.Reason, r.users.message(nil))
		about.observedLike(r)
		e.users.add(ctx, namespace, about)
		for _, pod := range pods {
			all = join(all, pod, r)
		}
	}
	for _, p := range all {
		about := e.newReport(p.pod, p.Type, p.Reason, p.message(p.claims))
		about.observedLike(p.first)
		e.users.add(ctx, namespace, about)
	}
}

// join adds the event of a claim to those of its pod.
func join(all []*podEvent, pod corev1.ObjectReference, r *report) []*podEvent {
	n := *r.users
	at := slices.IndexFunc(all, func(p *podEvent) bool {
		return p.pod == pod && p.Type == n.Type && p.Reason == n.Reason && p.Text == n.Text
	})
	if at < 0 {
		n.Devices = slices.Clone(n.Devices)
		return append(all, &podEvent{ClaimEvent: n, pod: pod, claims: []string{n.Claim.Name}, first: r})
	}
	p := all[at]
	p.claims = append(p.claims, n.Claim.Name)
	for _, d := range n.Devices {
		if !slices.Contains(p.Devices, d) {
			p.Devices = append(p.Devices, d)
		}
	}
	return all
}

// podsOf lists the pods for which a claim is reserved, and reports whether it is gone.
func (e *Events) podsOf(ctx context.Context, ref claim.Ref) (pods []corev1.ObjectReference, gone bool, err error) {
	found, err := e.cluster.Claim(ctx, ref)
	if err != nil {
		return nil, false, err
	}
	if found == nil {
		return nil, true, nil
	}
	for _, user := range found.Status.ReservedFor {
		if user.APIGroup == "" && user.Resource == "pods" {
			pods = append(pods, corev1.ObjectReference{
				APIVersion: "v1", Kind: "Pod", Namespace: ref.Namespace, Name: user.Name, UID: user.UID,
			})
		}
	}
	slices.SortFunc(pods, func(a, b corev1.ObjectReference) int { return cmp.Compare(a.Name, b.Name) })
	return pods, false, nil
}
