// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"reflect"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/gpu"
)

// A GPU is reset, or somebody removes a partition, and the next partition gets the ids
// of the one that is gone. The CDI spec of the claim that had that must not come to name
// the other claim's, at no moment.

// loseAndReuse removes the partition of a claim. The next one gets the ids that the first
// of the GPU had.
func (b *box) loseAndReuse() {
	b.removeForeign(addressA0)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.nextID = 7
}

// wantOwnNodes fails if the specs of two claims name the same nodes.
func (b *box) wantOwnNodes(when string, one, other types.UID) {
	b.t.Helper()
	a, c := b.spec(one), b.spec(other)
	if len(a) > 0 && len(c) > 0 && reflect.DeepEqual(a[0].Nodes, c[0].Nodes) {
		b.t.Errorf("%s: the spec of %s names the partition of %s: %v", when, one, other, a[0].Nodes)
	}
}

func TestSpecOfLostPartition(t *testing.T) {
	for name, test := range map[string]func(b *box, m *Manager) *Manager{
		"before the next survey": func(_ *box, m *Manager) *Manager { return m },
		"after a restart": func(b *box, m *Manager) *Manager {
			survey(t.Context(), m)
			_ = m.cleanUp(t.Context())
			next := b.manager()
			_ = next.cleanUp(t.Context()) // before its first survey
			return next
		},
		"after a survey that failed": func(b *box, m *Manager) *Manager {
			survey(t.Context(), m)
			_ = m.cleanUp(t.Context())
			b.breakDown(pciA, gpu.ErrTimeout)
			survey(t.Context(), m)
			b.breakDown(pciA, nil)
			_ = m.cleanUp(t.Context())
			return m
		},
		"after a restart without a survey": func(b *box, _ *Manager) *Manager {
			next := b.manager()
			_ = next.cleanUp(t.Context())
			return next
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0))
			b.loseAndReuse()
			mustPrepare(t, m, newClaim("u2", sliceA4))
			b.wantOwnNodes("made", "u1", "u2")
			m = test(b, m)
			b.wantOwnNodes(name, "u1", "u2")
			if len(b.spec("u2")) == 0 {
				t.Error("the other claim has lost its spec")
			}
			mustUnprepare(t, m, "u1")
			mustUnprepare(t, m, "u2")
			b.wantNothing()
		})
	}
}

// A partition that is gone cannot be made again. The claim has no spec then.
func TestLostPartitionIsNotMadeAgain(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.loseAndReuse()
	b.hooks(failAt("create instance"), nil)
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
	wantError(t, err, "device "+sliceA0)
	b.hooks(nil, nil)
	mustPrepare(t, m, newClaim("u2", sliceA4))
	for range 3 {
		survey(t.Context(), m)
		wantError(t, m.cleanUp(t.Context()), "was removed by somebody else")
		b.wantOwnNodes("not made again", "u1", "u2")
	}
	mustUnprepare(t, m, "u1")
	mustUnprepare(t, m, "u2")
	b.wantNothing()
}

// Once it can be made again it is, and the claim is whole.
func TestLostPartitionIsMadeAgainLater(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	b.loseAndReuse()
	b.hooks(failAt("create compute instance"), nil)
	if _, err := m.Prepare(t.Context(), newClaim("u1", sliceA0)); err == nil {
		t.Error("no error")
	}
	b.hooks(nil, nil)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	if len(b.spec("u1")) != 1 {
		t.Error("the claim has no spec")
	}
	mustReconcile(t, m)
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// Who only observes a partition must not come to observe another claim's.
func TestObserverOutlivesPartition(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	mustPrepare(t, m, admin(newClaim("watch", sliceA0)))
	mustUnprepare(t, m, "u1")
	b.mu.Lock()
	b.nextID = 7
	b.mu.Unlock()
	mustPrepare(t, m, newClaim("u2", sliceA4))
	b.wantOwnNodes("made", "watch", "u2")
	survey(t.Context(), m)
	_ = m.cleanUp(t.Context())
	b.wantOwnNodes("reconciled", "watch", "u2")
	if len(b.spec("watch")) > 0 {
		t.Error("the observer has a spec, and the partition is gone")
	}
	mustUnprepare(t, m, "watch")
	mustUnprepare(t, m, "u2")
	b.wantNothing()
}

// A partition of one group is lost, and its ids are used again, while another group of the
// claim is still being made.
func TestPartitionLostWhileOtherGroupsAreMade(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	made := make(chan struct{})
	b.hooks(nil, func(effect string) error {
		if effect == "create compute instance" {
			close(made)
			b.hooks(nil, nil)
		}
		return nil
	})
	b.beforeEffect(func(pciAddress, effect string) error {
		if pciAddress != pciB || effect != "create compute instance" {
			return nil
		}
		<-made
		b.loseAndReuse()
		b.beforeEffect(nil)
		mustPrepare(t, b.manager(), newClaim("u2", sliceA4))
		return nil
	})
	mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0)) // it is made again
	b.wantOwnNodes("prepared", "u1", "u2")
	if len(b.spec("u1")) != 2 || b.count(pciA) != 2 {
		t.Errorf("left: %v", b.state())
	}
	mustUnprepare(t, m, "u2")
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}
