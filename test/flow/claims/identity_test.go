// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"fmt"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestPartitionOfSomebodyElse checks that a claim does not get a partition that somebody has made in the place of its own
// after that was seen to be gone, and that its release leaves it there.
func TestPartitionOfSomebodyElse(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, c)
	n.RunSMI(t, "mig -i 0 -dci")
	n.RunSMI(t, "mig -i 0 -dgi")
	// The CDI spec goes with the compute instance already, while the partition may be made whole again.
	p.Until(t, "the record to say that it is lost", func(context.Context) error {
		switch r, err := n.Record(c.GetUid()); {
		case err != nil:
			return err
		case r == nil || r.Marks != "x" || hasSpec(t, n, c):
			return fmt.Errorf("it says %+v, and there is a CDI spec: %t", r, hasSpec(t, n, c))
		}
		return nil
	})
	n.RunSMI(t, "mig -i 0 -cgi 1g.10gb:4 -C")
	if _, err := p.TryPrepare(t.Context(), c, harness.RefusalTimeout); err == nil {
		t.Error("the claim gets a partition that somebody else has made, after its own was seen to be gone")
	}
	p.MustUnprepare(t, c)
	n.WantInstances(t, 0, harness.Place{Profile: "1g.10gb", Start: 4})
}
