// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/expect"
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
	expect.Same(t, n.Machine(t).GPUs, want, when, "admin access changed a GPU")
}

// TestAdminAccess checks that claims with admin access can observe devices in use and whole GPUs, that a container gets what
// it needs to see all partitions, and that neither preparation nor release, nor a crash in between, changes anything.
func TestAdminAccess(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x3", harness.Frequent...)
	n.RunSMI(t, "-i 2 -mig 1")
	n.RunSMI(t, "mig -i 2 -cgi 2g.20gb:2 -C")
	at := harness.Place{Profile: "2g.20gb", Start: 2}
	static := staticDevice(t, n, p, 2, at)
	partition := harness.Partition(0, "1g.10gb", 4)
	part, whole := n.DeviceName(t, 0, "1g.10gb", 4), n.DeviceName(t, 1, "", 0)
	users := []*drapb.Claim{n.AllocateNamed([]string{part}), n.AllocateNamed([]string{whole}), n.AllocateNamed([]string{static})}
	for _, user := range users {
		p.MustPrepare(t, user)
	}
	before := n.Machine(t).GPUs

	// The undivided GPU 0 too, although it is divided, and GPU 2.
	admin := allocateForAdmin(n, part, whole, static, n.DeviceName(t, 0, "", 0), n.DeviceName(t, 2, "", 0), whole+"-observer")
	ids := p.MustPrepare(t, admin)
	if len(ids) != 6 {
		t.Fatalf("6 devices have the CDI ids %v", ids)
	}
	n.WantDevice(t, admin, ids[0], partition)
	monitor := func(node harness.DeviceNode) bool { return node.Path == "/dev/nvidia-caps/nvidia-cap2" }
	if nodes, err := n.SpecNodes(admin.GetUid(), ids[5]); err != nil || !slices.ContainsFunc(nodes, monitor) {
		t.Errorf("device nodes of an observer: %v, %v, without mig/monitor", nodes, err)
	}
	p.MustPrepare(t, admin)
	p.Kill()
	p = n.Run(t, harness.Frequent...)
	p.MustPrepare(t, admin)
	wantGPUs(t, n, "prepare and a crash", before)
	p.MustUnprepare(t, admin)
	wantGPUs(t, n, "unprepare", before)

	// Nor does it keep the devices from being released.
	second := allocateForAdmin(n, part, whole, static)
	p.MustPrepare(t, second)
	p.MustUnprepare(t, users...)
	n.WantInstances(t, 0)
	p.MustUnprepare(t, second)
	n.WantInstances(t, 2, at)
	expect.Len(t, append(n.Records(t), n.CDISpecs(t)...), 0, "left")
}
