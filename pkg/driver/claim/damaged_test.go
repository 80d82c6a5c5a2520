// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
)

// rehead changes the head of a record, so that it is one that somebody could have written.
func rehead(text, from, to string) string {
	head, body, _ := strings.Cut(text, "\n")
	head = strings.Replace(head[:len(head)-8], from, to, 1)
	return fmt.Sprintf("%s%08x\n%s", head, crc32.ChecksumIEEE([]byte(head)), body)
}

// rebody makes the head of a record say that its body is whole.
func rebody(text string) string {
	head, body, _ := strings.Cut(text, "\n")
	at := strings.Index(head, "body=")
	return rehead(text, head[at:at+13], fmt.Sprintf("body=%08x", crc32.ChecksumIEEE([]byte(body))))
}

// damage makes the body of a record unreadable. Its GPUs are known.
func damage(t *testing.T, m *Manager, uid string) {
	t.Helper()
	write(t, recordPath(m, types.UID(uid)), strings.Replace(recordText(t, m, types.UID(uid)), "devices", "deviecs", 1))
}

// guards are the files that cannot be read.
func (b *box) guards() []string {
	b.t.Helper()
	var paths []string
	for _, g := range b.store().Snapshot().Guards {
		paths = append(paths, filepath.Base(g.Path))
	}
	return paths
}

// A record cannot be read: other claims go on, what the claim has is nobody else's, and the claim has it again when the
// kubelet asks.
func TestDamagedRecord(t *testing.T) {
	const share = sliceA1 + "-mps"
	for name, damage := range map[string]func(string) string{
		"empty":         func(string) string { return "" },
		"cut off":       func(text string) string { return text[:20] },
		"half":          func(text string) string { return text[:len(text)/2] },
		"zeros":         func(text string) string { return strings.Repeat("\x00", len(text)) },
		"other claim":   func(text string) string { return rebody(strings.Replace(text, `"u1"`, `"u9"`, 1)) },
		"other version": func(text string) string { return rehead(text, "claim-record/1", "claim-record/2") },
	} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", sliceA0))
			write(t, m.store.Path("u1"), damage(recordText(t, m, "u1")))

			mustPrepare(t, m, newClaim("u2", sliceA4))
			// The place of the claim is not given away, nor is it taken for a partition of somebody else's.
			wantError(t, runPrepare(t.Context(), m, newClaim("u3", sliceA0)), "was not made by this driver", "records/u1.boot-1")
			// Whole GPUs and shares that the record may be about wait.
			for _, device := range []string{share, wholeA} {
				start := time.Now()
				if _, err := m.Prepare(t.Context(), newClaim("u3", device)); device == share && (!errors.Is(err, rules.ErrGuarded) || time.Since(start) < roomTime) || err == nil {
					t.Errorf("%s after %s: %v", device, time.Since(start), err)
				}
			}
			for range 2 {
				status := survey(t.Context(), m)
				said := fmt.Sprintf("%+v", status.Conditions)
				if len(status.Static) != 0 || !strings.Contains(said, "records/u1.boot-1") || !strings.Contains(said, "occupied") {
					t.Errorf("people are told: %+v", status)
				}
				mustReconcile(t, m)
			}
			b.wantStatements(m, []string{"u1 DamagedClaimRecord", "records/u1.boot-1", "drain the node"})

			// What the claim had follows from the allocation, so that it is found again.
			live, _ := b.look(addressA0)
			mustPrepare(t, m, newClaim("u1", sliceA0))
			if now, _ := b.look(addressA0); now != live || b.count(pciA) != 2 {
				t.Errorf("instances: %v", b.state())
			}
			b.wantGuards(0)
			mustUnprepare(t, m, "u1")
			mustUnprepare(t, m, "u2")
			b.wantStatements(m)
			b.wantNothing()
		})
	}
}

// A claim whose record cannot be read is released: the pod ends. What it may have is not known, so that it stays, and so
// does the file, until nothing is there that it could be about.
func TestDamagedRecordIsUnprepared(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustPrepare(t, m, newClaim("other", sliceA4))
	damage(t, m, "u1")
	for range 2 {
		mustUnprepare(t, m, "u1")
		mustReconcile(t, m)
		b.wantNoSpec("u1")
		b.wantAt(addressA0, true, "it may be in use")
		b.wantGuards(1)
	}
	b.removeForeign(addressA0) // an administrator, as the message says
	mustReconcile(t, m)
	b.wantGuards(0)
	b.endAll(m, "other")
}

// A damaged record of a whole GPU's claim says nothing about partitions of others, and goes with the claim.
func TestDamagedRecordOfWholeGPU(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", wholeC))
	damage(t, m, "u1")
	b.makeForeign(addressA4)
	if s := survey(t.Context(), m); len(s.Static) != 1 || len(s.Conditions) != 1 || s.Conditions[0].PCIAddress != pciC {
		t.Errorf("got %+v", s)
	}
	mustUnprepare(t, m, "u1")
	mustReconcile(t, m)
	b.wantGuards(0)
}

// TestPrepareAfterDamagedRecord: the next claim does not wait for a round where nothing is left of one whose record could not be read.
func TestPrepareAfterDamagedRecord(t *testing.T) {
	for _, device := range []string{wholeA, mpsA, sliceA0} {
		runOnNode(t, device, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", wholeA))
			damage(t, m, "u1")
			mustUnprepare(t, m, "u1")
			start := time.Now()
			mustPrepare(t, m, newClaim("u2", device))
			wantWithin(t, start, 0)
			b.endAll(m, "u2")
		})
	}
}

// TestDamagedRecordWithUnknownMode: a GPU that could not be discovered has no UUID, by which its compute mode is asked for. What
// may be left of the claim was not looked at, so that the record stays.
func TestDamagedRecordWithUnknownMode(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsA))
	damage(t, m, "u1")
	b.locked(func() { clear(b.sessions) }) // the supervisor was started anew; the compute mode stays
	m = b.bareManager()
	m.SetInventory(inventoryOf(t, testNode().Without(pciA), device.Terms{Policy: testPolicy()}))
	mustUnprepare(t, m, "u1")
	for range 2 {
		_ = m.cleanUp(t.Context()) // what is left is said by the guards
	}
	if len(b.hardware()) == 0 || len(b.guards()) == 0 {
		t.Errorf("left on the hardware is %v, guarded by %v", b.hardware(), b.guards())
	}
}

// TestDamagedRecordBesideLostGPU: what a record that cannot be read may be about is cleared GPU by GPU, as that of any other. One
// that is lost keeps nothing else, and the file goes with the last, if it says which that is.
func TestDamagedRecordBesideLostGPU(t *testing.T) {
	for name, damage := range map[string]func(t *testing.T, m *Manager, uid string){
		"body": damage,
		"head": func(t *testing.T, m *Manager, uid string) { t.Helper(); write(t, m.store.Path(types.UID(uid)), "") },
	} {
		t.Run(name, func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuLong))
			damage(t, m, "u1")
			b.breakDown(pciC, gpu.ErrLost)
			_ = m.Unprepare(t.Context(), "u1")
			for _, m := range []*Manager{m, b.manager()} { // another process knows it, too
				_ = m.cleanUp(t.Context())
				if left := b.hardware(); !slices.Equal(left, []string{"interval Long of GPU-c"}) {
					t.Errorf("left: %v", left)
				}
				mustPrepare(t, m, newClaim("u2", wholeA))
				for _, c := range survey(t.Context(), m).Conditions {
					if c.PCIAddress != pciC {
						t.Errorf("said of GPUs that are clear: %+v", c)
					}
				}
				mustUnprepare(t, m, "u2")
			}
			b.wantGuards(1) // the GPU that is lost may have something of it
			b.breakDown(pciC, nil)
			mustReconcile(t, m)
			if files := b.guards(); len(files) > 0 && name == "body" || len(b.hardware()) > 0 {
				t.Errorf("left: %v, %v", files, b.hardware())
			}
			mustPrepare(t, m, newClaim("u2", wholeC))
			mustUnprepare(t, m, "u2")
		})
	}
}

// cancelled is the context of a call that asks once, and waits for nothing: it is for synthetic time.
func cancelled(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// TestDamagedRecordAfterReboot: the record of an earlier boot, which a preparation leaves, does not keep what cannot be read of this one.
func TestDamagedRecordAfterReboot(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", wholeC))
	b.boot("boot-2")
	m = b.manager()
	mustPrepare(t, m, newClaim("u1", wholeC))
	damage(t, m, "u1")
	mustUnprepare(t, m, "u1")
	mustReconcile(t, m)
	b.wantGuards(0)
	mustPrepare(t, m, newClaim("u2", wholeC))
}

// TestDamagedRecordOfSessionBesideLostGPU: a session on two GPUs ends without one that is lost.
func TestDamagedRecordOfSessionBesideLostGPU(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS))
	damage(t, m, "u1")
	b.breakDown(pciC, gpu.ErrLost)
	_ = m.Unprepare(t.Context(), "u1")
	_ = m.cleanUp(t.Context())
	mustPrepare(t, m, newClaim("u2", wholeA))
}

// TestDamagedRecordWithoutSupervisor checks that sessions do not count as gone while the supervisor does not answer.
func TestDamagedRecordWithoutSupervisor(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", mpsA))
		damage(t, m, "u1")
		mustUnprepare(t, m, "u1")
		b.hooks(func(e string) error {
			if e == "stop session" {
				b.away(true)
				return errFault
			}
			return nil
		}, nil)
		_ = m.cleanUp(t.Context())
		b.hooks(nil, nil)
		_ = m.cleanUp(t.Context())
		wantError(t, runPrepare(cancelled(t), m, newClaim("u2", wholeA)), "device "+wholeA)
		b.away(false)
		mustReconcile(t, m)
		mustPrepare(t, m, newClaim("u2", wholeA))
	})
}

// One bad record does not stop the others.
func TestReconcileGoesOn(t *testing.T) {
	b := newBox(t)
	for uid, device := range map[string]string{"u1": sliceA0, "u2": sliceB0} {
		b.kill(t, "create compute instance", uid, device)
	}
	m := b.manager()
	write(t, m.store.Path("u0"), "{")
	for range 2 {
		mustReconcile(t, m)
		b.wantStatements(m, []string{"u0 DamagedClaimRecord", "records/u0.boot-1"})
	}
	b.wantState(t, "reconciled", []string{"guard of u0"})
}

// The claim is allocated anew, elsewhere. What is not known to be gone of what its unreadable record was about is not
// published as somebody else's partition.
func TestDamagedAndAllocatedElsewhere(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	damage(t, m, "u1")
	mustUnprepare(t, m, "u1")
	b.pass(time.Second)
	mustPrepare(t, m, newClaim("u1", sliceB0))
	if _, found := b.look(addressA0); found && len(b.guards()) == 0 {
		t.Error("nothing is known of a partition that was left")
	}
	if s := survey(t.Context(), m); len(s.Static) > 0 {
		t.Errorf("the partition that was left is published as somebody else's: %+v, guards %v", s.Static, b.guards())
	}
}

// A record of an older version that lacks newer fields is still the same claim: it must not be torn down under running pods.
func TestOldRecordIsRecognised(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	err := m.store.Update("u1", func(r *record.Record) error {
		r.Devices[0].DynamicMIG, r.Devices[0].CDIDevice, r.Devices[0].Partition.Profile = false, "", ""
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	b.hooks(nil, nil)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.wantWithoutEffects()
	mustUnprepare(t, m, "u1")
}

// TestDamagedRecordAgain: what is written after a release, by another version of the driver for example, is not about what was released.
func TestDamagedRecordAgain(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceA0, wholeC))
		damage(t, m, "u1")
		b.breakDown(pciC, gpu.ErrLost)
		b.removeForeign(addressA0)
		_ = m.Unprepare(t.Context(), "u1")
		_ = m.cleanUp(t.Context())
		write(t, m.store.Path("u1"), "") // it was prepared again
		b.makeForeign(addressA0)
		for range 2 {
			_ = m.cleanUp(t.Context())
			if s := survey(t.Context(), m); len(s.Static) > 0 {
				t.Errorf("what may be the claim's is published as somebody else's: %+v", s)
			}
			_ = m.Unprepare(t.Context(), "u1")
		}
		b.breakDown(pciC, nil)

		mustPrepare(t, m, newClaim("u2", wholeB))
		mustUnprepare(t, m, "u2")
		mustPrepare(t, m, newClaim("u2", wholeB))
		write(t, m.store.Path("u2"), "")
		_ = m.cleanUp(t.Context())
		wantError(t, runPrepare(cancelled(t), m, newClaim("u3", wholeB)), "device "+wholeB)
	})
}
