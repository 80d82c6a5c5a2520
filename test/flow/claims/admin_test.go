// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// allocateForAdmin stores a claim with admin access to these devices.
func allocateForAdmin(n *harness.Node, devices ...string) *drapb.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, device := range devices {
		results = append(results, resourceapi.DeviceRequestAllocationResult{Device: device, AdminAccess: ptr.To(true)})
	}
	return n.Store(results, nil)
}

// wantGPUs fails unless the GPUs are unchanged, apart from counters of calls.
func wantGPUs(t testing.TB, n *harness.Node, when string, want []machine.GPU) {
	t.Helper()
	if diff := cmp.Diff(want, n.Machine(t).GPUs); diff != "" {
		t.Errorf("%s: admin access changed a GPU (-before +after):\n%s", when, diff)
	}
}

// countRequests counts how often the driver asks for a claim, which it does whenever it
// reconciles.
func countRequests(n *harness.Node, claim *drapb.Claim) *atomic.Int64 {
	var asked atomic.Int64
	n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/resourceclaims/"+claim.GetName()) {
			asked.Add(1)
		}
		return nil
	})
	return &asked
}

// TestAdminAccess checks that a claim with admin access to devices in use can observe
// them, and that neither its preparation nor its release changes anything.
func TestAdminAccess(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x3")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	n.RunSMI(t, "-i 2 -mig 1")
	n.RunSMI(t, "mig -i 2 -cgi 2g.20gb:2 -C")
	static := staticDevice(t, n, p, 2, harness.Place{Profile: "2g.20gb", Start: 2})
	part, whole := n.DeviceName(t, 0, "1g.10gb", 4), n.DeviceName(t, 1, "", 0)
	users := []*drapb.Claim{n.AllocateNamed([]string{part}), n.AllocateNamed([]string{whole}), n.AllocateNamed([]string{static})}
	for _, user := range users {
		p.MustPrepare(t, user)
	}
	before := n.Machine(t).GPUs

	// The undivided GPU 0 too, although it is divided, and GPU 2.
	admin := allocateForAdmin(n, part, whole, static, n.DeviceName(t, 0, "", 0), n.DeviceName(t, 2, "", 0))
	ids := p.MustPrepare(t, admin)
	wantGPUs(t, n, "prepare", before)
	if got := len(ids); got != 5 {
		t.Fatalf("5 devices have %d CDI ids", got)
	}
	g := n.Machine(t).GPUs[0]
	want, err := n.WantNodes(&g, harness.Place{Profile: "1g.10gb", Start: 4}.Find(&g))
	if err != nil {
		t.Fatal(err)
	}
	got, err := n.SpecNodes(admin.GetUid(), ids[0])
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("device nodes of an observed partition: %v (-want +got):\n%s", err, diff)
	}
	p.MustPrepare(t, admin)
	p.Kill()
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	p.MustPrepare(t, admin)
	wantGPUs(t, n, "a crash", before)
	p.MustUnprepare(t, admin)
	wantGPUs(t, n, "unprepare", before)

	// Nor does it keep the devices from being released.
	second := allocateForAdmin(n, part, whole, static)
	p.MustPrepare(t, second)
	p.MustUnprepare(t, users...)
	n.WantInstances(t, 0)
	n.WantInstances(t, 2, harness.Place{Profile: "2g.20gb", Start: 2})
	p.MustUnprepare(t, second)
	n.WantInstances(t, 2, harness.Place{Profile: "2g.20gb", Start: 2})
	if left := append(n.Records(t), n.CDISpecs(t)...); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestAdminAccessToNothing checks that no partition is created to be observed.
func TestAdminAccessToNothing(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	p.Ready(t)
	before := n.Machine(t).GPUs
	admin := allocateForAdmin(n, n.DeviceName(t, 0, "1g.10gb", 4))
	if got := p.Prepare(t, admin)[0].GetError(); got == "" {
		t.Error("a partition that does not exist was prepared for observation")
	}
	p.MustUnprepare(t, admin)
	wantGPUs(t, n, "a refusal", before)
	n.WantClean(t)
}

// TestAdminAccessOrphaned checks that an observing claim that no longer exists is
// released like any other, and that the devices it observed stay.
func TestAdminAccessOrphaned(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Eager...)
	p.Ready(t)
	part := n.DeviceName(t, 0, "1g.10gb", 4)
	user := n.AllocateNamed([]string{part})
	p.MustPrepare(t, user)
	before := n.Machine(t).GPUs
	admin := allocateForAdmin(n, part)
	p.MustPrepare(t, admin)
	n.API.DeleteClaim(admin.GetNamespace(), admin.GetName())
	p.Until(t, "the release of the observing claim", func(context.Context) error { return n.CheckNoFiles(admin.GetUid()) })
	wantGPUs(t, n, "the release", before)
	n.WantClaims(t, types.UID(user.GetUid()))
	p.MustUnprepare(t, user)
	n.WantClean(t)
}

// TestObserver checks that observers can be prepared whatever others have of their GPUs,
// that a container gets what it needs to see all partitions, and that a claim without
// admin access is refused with what it lacks.
func TestObserver(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t)
	p.Ready(t)
	users := []*drapb.Claim{n.AllocateNamed([]string{n.DeviceName(t, 0, "1g.10gb", 4)}), n.AllocateNamed([]string{n.DeviceName(t, 1, "", 0)})}
	for _, user := range users {
		p.MustPrepare(t, user)
	}
	before := n.Machine(t).GPUs
	observers := []string{n.DeviceName(t, 0, "", 0) + "-observer", n.DeviceName(t, 1, "", 0) + "-observer"}
	admins := []*drapb.Claim{allocateForAdmin(n, observers...), allocateForAdmin(n, observers...)}
	for _, admin := range admins {
		ids := p.MustPrepare(t, admin)
		if len(ids) != 2 {
			t.Fatalf("2 observers have the CDI ids %v", ids)
		}
		for gpu, id := range ids {
			nodes, err := n.SpecNodes(admin.GetUid(), id)
			if err != nil {
				t.Fatal(err)
			}
			g := n.Machine(t).GPUs[gpu]
			want, err := n.WantNodes(&g, nil)
			if err != nil {
				t.Fatal(err)
			}
			monitor := func(node harness.DeviceNode) bool { return node.Path == "/dev/nvidia-caps/nvidia-cap2" }
			if !slices.ContainsFunc(nodes, monitor) {
				t.Errorf("device nodes of an observer: %v, without mig/monitor", nodes)
			}
			if diff := cmp.Diff(want, slices.DeleteFunc(nodes, monitor)); diff != "" {
				t.Errorf("other device nodes of an observer (-want +got):\n%s", diff)
			}
		}
	}
	wantGPUs(t, n, "two observing claims", before)

	ordinary := n.AllocateNamed(observers[:1])
	if got := p.Prepare(t, ordinary)[0].GetError(); !strings.Contains(got, observers[0]) || !strings.Contains(got, "adminAccess: true") {
		t.Errorf("an observer without admin access: %q", got)
	}
	p.MustUnprepare(t, ordinary)
	p.MustUnprepare(t, users...)
	p.MustUnprepare(t, admins...)
	n.WantClean(t)
}
