// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// hasSpec reports whether there is a CDI spec of a claim.
func hasSpec(t *testing.T, n *harness.Node, c *drapb.Claim) bool {
	t.Helper()
	return slices.ContainsFunc(n.CDISpecs(t), func(name string) bool { return strings.Contains(name, c.GetUid()) })
}

// TestReleaseOnUnreadableRecord checks that a pod can end although what the driver has written down about its claim cannot
// be read any more, and that no container can get its devices from then on.
func TestReleaseOnUnreadableRecord(t *testing.T) {
	for name, damage := range map[string]func(string) error{"EIO": harness.Unreadable, "cut off": harness.CutOff, "folder": harness.IsFolder} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			p := n.Start(t)
			p.Ready(t)
			c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			p.MustPrepare(t, c)
			n.DamageRecords(t, c.GetUid(), damage)
			if err := p.Release(t.Context(), c); err != nil {
				t.Errorf("the pod cannot end, because the record of its claim cannot be read: %v", err)
			}
			if hasSpec(t, n, c) {
				t.Error("the CDI spec of a claim that is released is still there")
			}
		})
	}
}

// TestUnreadableRecordGuards checks that nothing of a GPU is given out that a claim has whose record cannot be read: its pod
// may be running.
func TestUnreadableRecordGuards(t *testing.T) {
	for name, damage := range map[string]func(string) error{"EIO": harness.Unreadable, "cut off": harness.CutOff} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x3")
			n.StartSupervisor(t)
			p := n.Start(t)
			p.Ready(t)
			var claims []*drapb.Claim
			held := []harness.Device{{GPU: 0}, {GPU: 1, Kind: harness.MPS}, {GPU: 2, Kind: harness.TimeSlice}}
			for _, d := range held {
				c := n.Allocate(t, []harness.Device{d})
				p.MustPrepare(t, c)
				claims = append(claims, c)
			}
			for _, c := range claims {
				n.DamageRecords(t, c.GetUid(), damage)
			}
			var others []harness.Device
			for gpu, has := range held {
				for _, d := range []harness.Device{{GPU: gpu}, {GPU: gpu, Kind: harness.MPS}, {GPU: gpu, Kind: harness.TimeSlice}, harness.Partition(gpu, "1g.10gb", 4)} {
					// Whoever shares a GPU may have others beside it.
					if d.Kind == "" || d.Kind != has.Kind {
						others = append(others, d)
					}
				}
			}
			wantGuarded(t, n, p, others...)
		})
	}
}

// wantGuarded asks for all of these at the same time.
func wantGuarded(t *testing.T, n *harness.Node, p *harness.Driver, devices ...harness.Device) {
	t.Helper()
	var wg sync.WaitGroup
	for _, d := range devices {
		next, name := n.Allocate(t, []harness.Device{d}), d.Name(n.Address(t, d.GPU))
		wg.Go(func() {
			if _, err := p.TryPrepare(t.Context(), next, harness.RefusalTimeout); err == nil {
				t.Errorf("%s is given out while a pod may have the GPU, whose record cannot be read", name)
			}
			_ = p.TryUnprepare(t.Context(), next, harness.ReleaseTimeout)
		})
	}
	wg.Wait()
}

// TestUnreadableRecordOfSharer checks that shares stay as they are when another one of the GPU is released, although the
// record of the one that stays cannot be read.
func TestUnreadableRecordOfSharer(t *testing.T) {
	for kind, check := range map[harness.ShareKind]func(*testing.T, *harness.Node){
		harness.MPS: func(t *testing.T, n *harness.Node) {
			t.Helper()
			if mode := n.Machine(t).GPUs[0].ComputeMode; mode != harness.ExclusiveProcess {
				t.Errorf("the MPS session of a running pod is ended: its GPU has compute mode %d", mode)
			}
		},
		harness.TimeSlice: func(t *testing.T, n *harness.Node) {
			t.Helper()
			if slice := n.Machine(t).GPUs[0].TimeSlice; slice != harness.LongSlice {
				t.Errorf("the time slice of a running pod is reset: %d", slice)
			}
		},
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			n.StartSupervisor(t)
			p := n.Start(t, n.Policy(t, "default:\n  timeslice: {clients: 3, interval: Long}\n"))
			p.Ready(t)
			goes, stays := n.Allocate(t, []harness.Device{{Kind: kind}}), n.Allocate(t, []harness.Device{{Kind: kind}})
			p.MustPrepare(t, goes)
			p.MustPrepare(t, stays)
			n.DamageRecords(t, stays.GetUid(), harness.CutOff)
			p.MustUnprepare(t, goes)
			check(t, n)
		})
	}
}

// TestUnreadableRecordOfPartition checks that the partition of a claim whose record cannot be read stays, that nothing is given
// out that overlaps with it, and that other GPUs are not concerned where the record says as much.
func TestUnreadableRecordOfPartition(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Frequent...)
	p.Ready(t)
	c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	beside := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(1, "1g.10gb", 4)}))
	p.MustPrepare(t, c)
	p.MustPrepare(t, beside)
	n.DamageRecords(t, c.GetUid(), harness.CutBody)
	wantGuarded(t, n, p, harness.Device{}, harness.Device{Kind: harness.TimeSlice}, harness.Partition(0, "7g.80gb", 0), harness.Partition(0, "1g.10gb", 4))
	n.WantInstances(t, 0, harness.Place{Profile: "1g.10gb", Start: 4})
	p.MustUnprepare(t, beside)
	n.WantInstances(t, 1)
	p.MustPrepare(t, beside)
	p.MustUnprepare(t, beside)
	n.WantInstances(t, 1)
}

// TestUnknownRecordAfterReboot checks that a record that the driver does not understand, as that of a later version before a
// downgrade, is in nobody's way after a reboot, when nothing of its claim exists any more.
func TestUnknownRecordAfterReboot(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	p.Ready(t)
	c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, c)
	p.Kill()
	n.DamageRecords(t, c.GetUid(), func(path string) error {
		text, err := os.ReadFile(path)
		later := bytes.Replace(text, []byte(`"mig"`), []byte(`"mig-of-tomorrow"`), 1)
		if err == nil && bytes.Equal(text, later) {
			err = errors.New("nothing in it can be made that of a later version")
		}
		return errors.Join(err, os.WriteFile(path, later, 0o600))
	})
	n.Reboot(t)
	p = n.Start(t)
	p.Ready(t)
	if err := p.Release(t.Context(), c); err != nil {
		t.Errorf("the pod cannot end after a reboot: %v", err)
	}
	if _, err := p.TryPrepare(t.Context(), c, harness.KubeletTimeout); err != nil {
		t.Errorf("nor can its claim be prepared again: %v", err)
	}
}
