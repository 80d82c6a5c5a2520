// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

func (b *box) FabricPending(_ context.Context, pciAddress string) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fabric[pciAddress], nil
}

// setFabric is the driver getting on with the registration of a GPU.
func (g *gpus) setFabric(pciAddress, state string) {
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.fabric[pciAddress] = state
}

// TestWaitForFabric: a whole GPU whose partitions are just gone, and a share of one, is handed out when
// the driver has registered it with the NVLink fabric, and another GPU does not wait. If that takes too long the
// error says of which GPU what was waited for, and the kubelet comes back.
func TestWaitForFabric(t *testing.T) {
	for name, claim := range map[string]string{"whole": wholeA, "share": mpsA} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				mustPrepare(t, m, newClaim("u0", sliceA0))
				mustUnprepare(t, m, "u0")
				b.setFabric(addressA0.PCIAddress, "In Progress")

				start := time.Now()
				_, err := m.Prepare(t.Context(), newClaim("u1", claim))
				wantError(t, err, addressA0.PCIAddress)
				wantError(t, err, "not registered with the NVLink fabric yet (In Progress)")
				if !errors.Is(err, gpu.ErrFabricPending) || time.Since(start) > roomTime+time.Second {
					t.Errorf("after %s: %v", time.Since(start), err)
				}
				b.wantNothing()

				done := make(chan error)
				go func() {
					_, err := m.Prepare(t.Context(), newClaim("u1", claim))
					done <- err
				}()
				synctest.Wait()
				mustPrepare(t, m, newClaim("u2", wholeB))
				b.setFabric(addressA0.PCIAddress, "")
				if err := <-done; err != nil {
					t.Error(err)
				}
				mustUnprepare(t, m, "u1")
				mustUnprepare(t, m, "u2")
				b.wantNothing()
			})
		})
	}
}

// TestFabricLostLater: a claim whose containers run is prepared again, as after a restart of the kubelet,
// while the GPU is not registered with its fabric, as during one of the fabric manager. After a reboot nothing
// runs, and it waits like a new one.
func TestFabricLostLater(t *testing.T) {
	for name, claim := range map[string]string{"whole": wholeA, "share": mpsA} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				mustPrepare(t, m, newClaim("u1", claim))
				b.setFabric(addressA0.PCIAddress, "In Progress")
				mustPrepare(t, m, newClaim("u1", claim))

				b.boot("boot-2")
				m = b.manager()
				if _, err := m.Prepare(t.Context(), newClaim("u1", claim)); !errors.Is(err, gpu.ErrFabricPending) {
					t.Errorf("after a reboot: %v", err)
				}
				b.setFabric(addressA0.PCIAddress, "")
				mustPrepare(t, m, newClaim("u1", claim))
				mustUnprepare(t, m, "u1")
				b.wantNothing()
			})
		})
	}
}
