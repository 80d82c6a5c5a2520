// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// observe stores a claim with admin access to these devices.
func (n *node) observe(devices ...string) *drapb.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, device := range devices {
		results = append(results, resourceapi.DeviceRequestAllocationResult{Device: device, AdminAccess: ptr.To(true)})
	}
	return n.store(results, nil)
}

// wantGPUs fails unless the GPUs are what they were, counters of calls aside.
func (n *node) wantGPUs(t testing.TB, when string, want []machine.GPU) {
	t.Helper()
	if diff := cmp.Diff(want, n.machine(t).GPUs); diff != "" {
		t.Errorf("%s: admin access changed a GPU (-before +after):\n%s", when, diff)
	}
}

// rounds counts how often the driver asks for a claim, which it does whenever it
// reconciles.
func (n *node) rounds(claim *drapb.Claim) *atomic.Int64 {
	var asked atomic.Int64
	n.api.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/resourceclaims/"+claim.GetName()) {
			asked.Add(1)
		}
		return nil
	})
	return &asked
}

// TestAdminAccess: a claim with admin access to devices that others use sees
// them, and nothing that becomes of it changes anything.
func TestAdminAccess(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x3")
	p := n.start(t, frequent...)
	p.ready(t)
	n.smi(t, "-i 2 -mig 1")
	n.smi(t, "mig -i 2 -cgi 2g.20gb:2 -C")
	static := n.static(t, p, 2, place{"2g.20gb", 2})
	part, whole := n.device(t, 0, "1g.10gb", 4), n.device(t, 1, "", 0)
	users := []*drapb.Claim{n.allocate([]string{part}), n.allocate([]string{whole}), n.allocate([]string{static})}
	for _, user := range users {
		p.mustPrepare(t, user)
	}
	before := n.machine(t).GPUs

	// The undivided GPU 0 too, although it is divided, and GPU 2.
	admin := n.observe(part, whole, static, n.device(t, 0, "", 0), n.device(t, 2, "", 0))
	ids := p.mustPrepare(t, admin)
	n.wantGPUs(t, "prepare", before)
	if got := len(ids); got != 5 {
		t.Fatalf("5 devices have %d CDI ids", got)
	}
	g := n.machine(t).GPUs[0]
	want, err := n.wantNodes(&g, place{"1g.10gb", 4}.find(&g))
	if err != nil {
		t.Fatal(err)
	}
	got, err := n.specNodes(admin.GetUid(), ids[0])
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("device nodes of an observed partition: %v (-want +got):\n%s", err, diff)
	}
	p.mustPrepare(t, admin)
	p.kill()
	p = n.start(t, frequent...)
	p.ready(t)
	p.mustPrepare(t, admin)
	n.wantGPUs(t, "a crash", before)
	p.mustUnprepare(t, admin)
	n.wantGPUs(t, "unprepare", before)

	// Nor does it keep what it observes.
	second := n.observe(part, whole, static)
	p.mustPrepare(t, second)
	p.mustUnprepare(t, users...)
	n.wantInstances(t, 0)
	n.wantInstances(t, 2, place{"2g.20gb", 2})
	p.mustUnprepare(t, second)
	n.wantInstances(t, 2, place{"2g.20gb", 2})
	if left := append(n.journal(t), n.cdiSpecs(t)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestAdminAccessToNothing: a partition is not made to be observed.
func TestAdminAccessToNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	p := n.start(t)
	p.ready(t)
	before := n.machine(t).GPUs
	admin := n.observe(n.device(t, 0, "1g.10gb", 4))
	if got := p.prepare(t, admin)[0].GetError(); got == "" {
		t.Error("a partition that does not exist was prepared for observation")
	}
	p.mustUnprepare(t, admin)
	n.wantGPUs(t, "a refusal", before)
	n.wantClean(t)
}

// TestAdminAccessOrphaned: an observing claim that does not exist any more is
// released like any other, and what it observed stays.
func TestAdminAccessOrphaned(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t, eager...)
	p.ready(t)
	part := n.device(t, 0, "1g.10gb", 4)
	user := n.allocate([]string{part})
	p.mustPrepare(t, user)
	before := n.machine(t).GPUs
	admin := n.observe(part)
	p.mustPrepare(t, admin)
	n.api.DeleteClaim(admin.GetNamespace(), admin.GetName())
	p.until(t, "the release of the observing claim", func(context.Context) error { return n.checkNoFiles(admin.GetUid()) })
	n.wantGPUs(t, "the release", before)
	n.wantClaims(t, typesUID(user.GetUid()))
	p.mustUnprepare(t, user)
	n.wantClean(t)
}
