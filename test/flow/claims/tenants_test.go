// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestErrorsNameNoOtherTenant: what is in the way of a claim, the kubelet is told without the claims, pods, processes and UIDs of other
// namespaces, and the log has them. The kubelet puts it into an event of the pod.
func TestErrorsNameNoOtherTenant(t *testing.T) {
	// Not in parallel: its program, in a pod without a claim, has a node open that the GPUs of other machines have, too.
	n := harness.NewNode(t, "h100x4")
	p := n.Start(t)
	p.Ready(t)
	var secrets []string
	victim := func(d harness.Device) *drapb.Claim {
		c := n.Allocate(t, []harness.Device{d})
		stored := n.API.Claim(c.GetNamespace(), c.GetName())
		n.API.DeleteClaim(c.GetNamespace(), c.GetName())
		stored.Namespace, stored.Name, c.Namespace, c.Name = "victim", "secret", "victim", "secret"
		n.API.SetClaim(stored)
		secrets = append(secrets, c.GetUid())
		p.MustPrepare(t, c)
		return c
	}
	victim(harness.Device{GPU: 0})
	for range 4 {
		victim(harness.Device{GPU: 1, Kind: harness.TimeSlice})
	}
	ended := victim(harness.Device{GPU: 2})
	program, err := n.StartReady(t.Context(), t, n.Container(t, p.MustPrepare(t, ended)...), "hold", "--memory=1Gi")
	if err != nil {
		t.Fatal(err)
	}
	pod := uuid.NewUUID()
	program.InPod(t, pod)
	p.MustUnprepare(t, ended)
	n.DamageRecords(t, victim(harness.Device{GPU: 3}).GetUid(), harness.CutOff)
	secrets = append(secrets, "victim", "secret", string(pod), "cuda-client")

	var claims []*drapb.Claim
	want := []string{
		"prepared for a claim of another namespace", "all are taken, one of them by a claim of another namespace",
		"for a claim of another namespace and is in use: a process of a pod that is not named here", "(what the driver's log names)",
	}
	for gpu := range want {
		d := harness.Device{GPU: gpu}
		if gpu == 1 {
			d.Kind = harness.TimeSlice
		}
		claims = append(claims, n.Allocate(t, []harness.Device{d}))
	}
	for i, answer := range p.Prepare(t, claims...) {
		got := answer.GetError()
		if !strings.Contains(got, want[i]) {
			t.Errorf("GPU %d: error %q, want %q", i, got, want[i])
		}
		for _, secret := range secrets {
			if strings.Contains(got, secret) {
				t.Errorf("GPU %d: the error names %s: %s", i, secret, got)
			}
		}
	}
	for _, secret := range secrets {
		p.WantLog(t, secret)
	}
	program.Stop()
}
