// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/knownfailures"
)

// seldom lets the driver look at the GPUs so seldom that it does not happen again in a test that has waited for it once,
// while it looks after its claims all the time.
var seldom = []string{"--poll-interval=8s", "--reconcile-interval=50ms", "--claim-check-interval=24h"}

// removed is a node where somebody has removed the partition of a claim, or reset its GPU, and the driver has seen that it is
// gone. Another claim is on GPU 1.
func removed(t *testing.T) (n *harness.Node, p *harness.Driver, c, beside *drapb.Claim) {
	t.Helper()
	n = harness.NewNode(t, "h100x2")
	p = n.Start(t, seldom...)
	p.Ready(t)
	c = n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	beside = n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
	p.MustPrepare(t, c)
	p.MustPrepare(t, beside)
	n.RunSMI(t, "mig -i 0 -dci")
	n.RunSMI(t, "mig -i 0 -dgi")
	// What it has seen since can be read from what it publishes of the other GPU.
	n.RunSMI(t, "mig -i 1 -cgi 1g.10gb:0 -C")
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 1, 0, 1))
	return n, p, c, beside
}

// wantSpecKept checks that a claim that was just prepared keeps its CDI spec while the driver looks after all claims.
func wantSpecKept(t *testing.T, n *harness.Node, p *harness.Driver, c, beside *drapb.Claim) {
	t.Helper()
	for range 3 {
		if !writesAgain(t, n, beside, harness.Patience) {
			t.Fatal("a CDI spec that is missing is not written again")
		}
		if !hasSpec(t, n, c) {
			t.Fatal("the claim was just prepared, and its CDI spec is taken away as if its partition were gone")
		}
	}
	p.MustUnprepare(t, c, beside)
}

// TestPreparedAgainAfterReset checks that a claim keeps its CDI spec that is prepared again after its partition was removed:
// the partition has the UUID that it had before.
func TestPreparedAgainAfterReset(t *testing.T) {
	t.Parallel()
	knownfailures.Expect(t)
	n, p, c, beside := removed(t)
	p.MustPrepare(t, c)
	wantSpecKept(t, n, p, c, beside)
}

// TestNextClaimAfterReset checks the same for the next claim in the place.
func TestNextClaimAfterReset(t *testing.T) {
	t.Parallel()
	n, p, c, beside := removed(t)
	p.MustUnprepare(t, c)
	next := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, next)
	wantSpecKept(t, n, p, next, beside)
}

// TestPartitionOfSomebodyElse checks that a claim does not get a partition that somebody has made in the place of its own
// after that was seen to be gone.
func TestPartitionOfSomebodyElse(t *testing.T) {
	t.Parallel()
	knownfailures.Expect(t)
	n, p, c, _ := removed(t)
	n.RunSMI(t, "mig -i 0 -cgi 1g.10gb:4 -C")
	if _, err := p.TryPrepare(t.Context(), c, harness.RefusalTimeout); err == nil {
		t.Error("the claim gets a partition that somebody else has made, after its own was seen to be gone")
	}
	p.MustUnprepare(t, c)
	n.WantInstances(t, 0, harness.Place{Profile: "1g.10gb", Start: 4})
}
