// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/policy/xid"
)

// receive hands an event to the GPU's own goroutine. Nothing here may wait for a GPU. A program
// that fails in a loop makes events faster than their partitions can be found: an event that equals
// one in the queue, apart from its time, replaces it.
func (m *Monitor) receive(ctx context.Context, e gpu.Event) {
	m.o.ObserveEvent(e)
	kind := e
	kind.Time, kind.NotBefore = time.Time{}, time.Time{}
	m.mu.Lock()
	w := m.watches[e.PCIAddress]
	joins, full := false, false
	if w != nil {
		_, joins = w.waiting[kind]
		full = !joins && len(w.waiting) == queueLength
		if !full {
			w.waiting[kind] = e
		}
	}
	m.mu.Unlock()
	if joins {
		return
	}
	klog.FromContext(ctx).Info("Event of a GPU", "pciAddress", e.PCIAddress, "kind", e.Kind, "xid", e.XID,
		"instance", e.InstanceID, "computeInstance", e.ComputeInstanceID)
	switch {
	case full:
		// It is applied without finding out its partition.
		m.apply(ctx, e, nil)
	case w != nil:
		w.events <- kind // has room for all that wait
	}
}

func (m *Monitor) handleEvents(ctx context.Context, w *watch) {
	for {
		select {
		case <-ctx.Done():
			return
		case kind := <-w.events:
			m.mu.Lock()
			e := w.waiting[kind]
			delete(w.waiting, kind)
			m.mu.Unlock()
			m.handle(ctx, w, e)
		}
	}
}

func (m *Monitor) handle(ctx context.Context, w *watch, e gpu.Event) {
	var err error
	defer m.panics.Recover(ctx, &err)
	m.apply(ctx, e, m.place(ctx, e))
	// The next reading shows the recovery action that it needs, and errors of memory.
	w.read()
}

// read asks for a reading.
func (w *watch) read() {
	select {
	case w.readNow <- struct{}{}:
	default:
	}
}

// place finds the partition that an event is about. It is nil if the event is about the whole GPU, and
// if the partition is not known: the reading fails, the partition is gone, or another one may have had
// its instance ID when the event happened.
func (m *Monitor) place(ctx context.Context, e gpu.Event) *Place {
	if e.InstanceID < 0 || e.Kind == gpu.EventXID && xid.Lookup(e.XID).Scope == xid.WholeGPU {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, placeLimit)
	defer cancel()
	state, err := m.o.Hardware.MIGState(ctx, e.PCIAddress)
	if err != nil {
		klog.FromContext(ctx).Error(err, "The partition that an event is about is not known", "pciAddress", e.PCIAddress)
		return nil
	}
	for _, i := range state.Instances {
		switch {
		case i.ID != e.InstanceID:
			continue
		case i.IDSince.After(e.NotBefore):
			klog.FromContext(ctx).Info("An event may be about an earlier partition", "pciAddress", e.PCIAddress, "instance", i.ID,
				"notBefore", e.NotBefore, "idSince", i.IDSince)
			return nil
		case len(i.Compute) == 1 && (e.ComputeInstanceID < 0 || e.ComputeInstanceID == i.Compute[0].ID):
			return &Place{UUID: i.Compute[0].UUID, ProfileID: i.ProfileID, Placement: i.Placement}
		}
		// The parts of an instance that is divided are no devices.
		return nil
	}
	return nil
}

// apply hands an event to the judge, and reports it if it is an error of a program.
func (m *Monitor) apply(ctx context.Context, e gpu.Event, at *Place) {
	var program *ProgramError
	m.change(ctx, func(j *judge) {
		x := j.event(e, at, &m.reaction)
		if x.Scope == xid.Application && x.Under(&m.reaction) == policy.EffectIgnore {
			program = m.programError(e, at, x)
		}
	})
	if program != nil {
		m.o.Report(ctx, *program)
	}
}

// programError is the error to report, or nil: if the same was reported a short time ago, or if its
// partition is not known, so that users of other partitions might get it. The caller holds mu.
func (m *Monitor) programError(e gpu.Event, at *Place, x xid.XID) *ProgramError {
	if at == nil && e.InstanceID >= 0 {
		return nil
	}
	p := &ProgramError{PCIAddress: e.PCIAddress, Text: fmt.Sprintf("XID %d (%s). %s", x.Number, x.Name, x.Advice)}
	key := fmt.Sprint(e.PCIAddress, " ", x.Number)
	if at != nil {
		p.Place = &at.Placement
		key += at.UUID
	}
	for key, last := range m.reported {
		if e.Time.Sub(last) >= reportEvery {
			delete(m.reported, key)
		}
	}
	if _, again := m.reported[key]; again {
		return nil
	}
	m.reported[key] = e.Time
	return p
}
