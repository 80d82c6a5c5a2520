// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

const xidType = nvml.EventTypeXidCriticalError

// happen adds XIDs, each on a whole GPU.
func (r *root) happen(gpu int, xids ...uint64) {
	r.t.Helper()
	r.update(func(m *machine.Machine) {
		for _, xid := range xids {
			state.AddEvent(m, machine.Event{GPU: gpu, Type: xidType, XID: xid, InstanceID: -1, ComputeID: -1})
		}
	})
}

func eventSet(t testing.TB, lib nvml.Interface, devices ...nvml.Device) nvml.EventSet {
	t.Helper()
	set := get(lib.EventSetCreate())(t, "EventSetCreate")
	for _, d := range devices {
		wants(t, "RegisterEvents", d.RegisterEvents(xidType, set), nvml.SUCCESS)
	}
	return set
}

// drain reads what a set has, without waiting.
func drain(t testing.TB, set nvml.EventSet) (xids []uint64) {
	t.Helper()
	for {
		data, ret := set.Wait(0)
		if ret == nvml.ERROR_TIMEOUT {
			return xids
		}
		wants(t, "EventSetWait", ret, nvml.SUCCESS)
		xids = append(xids, data.EventData)
	}
}

func expectXIDs(t testing.TB, what string, set nvml.EventSet, want ...uint64) {
	t.Helper()
	expect.Same(t, drain(t, set), want, what)
}

// Every set gets every event of its GPUs since they were registered, once and in order.
func TestEventSets(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	lib := r.open()
	r.happen(0, 1)
	both, second := eventSet(t, lib, device(t, lib, 0), device(t, lib, 1)), eventSet(t, lib, device(t, lib, 1))
	r.happen(0, 13)
	r.happen(1, 31, 43)
	expectXIDs(t, "both", both, 13, 31, 43)
	expectXIDs(t, "second", second, 31, 43)
	expectXIDs(t, "both again", both)
	late := eventSet(t, lib, device(t, lib, 0))
	r.happen(0, 48)
	expectXIDs(t, "late", late, 48)

	data := get(both.Wait(0))(t, "EventSetWait")
	if data.Device != device(t, lib, 0) || data.EventType != xidType || data.GpuInstanceId != ^uint32(0) || data.ComputeInstanceId != ^uint32(0) {
		t.Errorf("event %+v", data)
	}
	wants(t, "Free", both.Free(), nvml.SUCCESS)
	wants(t, "Free twice", both.Free(), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "wait with a set that was freed", code(both.Wait(0)), nvml.ERROR_INVALID_ARGUMENT)
}

// Who does not read loses the oldest.
func TestEventsAreForgotten(t *testing.T) {
	const kept = 64
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	set := eventSet(t, lib, device(t, lib, 0))
	var want []uint64
	for xid := range uint64(kept + 10) {
		r.happen(0, xid)
		if xid >= 10 {
			want = append(want, xid)
		}
	}
	expectXIDs(t, "the last", set, want...)
	expect.Equal(t, len(r.machine().Events), kept, "events are kept")
}

func TestEventRegistration(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	r.update(func(m *machine.Machine) { m.GPUs[0].NoEvents, m.GPUs[1].ECC = true, 1 })
	lib := r.open()
	none, d := device(t, lib, 0), device(t, lib, 1)
	expect.Equal(t, get(none.GetSupportedEventTypes())(t, "GetSupportedEventTypes"), 0)
	types := get(d.GetSupportedEventTypes())(t, "GetSupportedEventTypes")
	if want := uint64(xidType | nvml.EventTypeDoubleBitEccError | nvml.EventTypeGpuUnavailableError | nvml.EventTypeGpuRecoveryAction); types&want != want {
		t.Errorf("types %#x lack some of %#x", types, want)
	}
	set := eventSet(t, lib)
	wants(t, "register what is not supported", none.RegisterEvents(xidType, set), nvml.ERROR_NOT_SUPPORTED)
	wants(t, "register a type that there is not", d.RegisterEvents(1<<40, set), nvml.ERROR_INVALID_ARGUMENT)
	wants(t, "register with a set that was freed", func() nvml.Return {
		gone := eventSet(t, lib)
		wants(t, "Free", gone.Free(), nvml.SUCCESS)
		return d.RegisterEvents(xidType, gone)
	}(), nvml.ERROR_INVALID_ARGUMENT)
	// Types add up; those that were not registered are not told.
	wants(t, "register", d.RegisterEvents(xidType, set), nvml.SUCCESS)
	wants(t, "register more", d.RegisterEvents(nvml.EventTypeDoubleBitEccError, set), nvml.SUCCESS)
	r.update(func(m *machine.Machine) {
		for _, kind := range []uint64{nvml.EventTypeSingleBitEccError, nvml.EventTypeDoubleBitEccError} {
			state.AddEvent(m, machine.Event{GPU: 1, Type: kind, InstanceID: -1, ComputeID: -1})
		}
	})
	expect.Equal(t, get(set.Wait(0))(t, "EventSetWait").EventType, nvml.EventTypeDoubleBitEccError)
	expectXIDs(t, "rest", set)
}

// A wait ends when something happens, when its time is up, and when the library is shut
// down; other calls go on meanwhile.
func TestEventWait(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	d := device(t, lib, 0)
	set := eventSet(t, lib, d)
	start := time.Now()
	wants(t, "wait for nothing", code(set.Wait(50)), nvml.ERROR_TIMEOUT)
	if took := time.Since(start); took < 50*time.Millisecond {
		t.Errorf("waited for %s", took)
	}
	const forever = 10 * 60 * 1000
	answers := make(chan nvml.Return)
	waiting := func() {
		before := r.calls("nvmlEventSetWait_v2")
		go func() {
			_, ret := set.Wait(forever)
			answers <- ret
		}()
		for r.calls("nvmlEventSetWait_v2") == before {
			wants(t, "GetUUID", code(d.GetUUID()), nvml.SUCCESS) // is not kept waiting
		}
	}
	waiting()
	r.happen(0, 13)
	wants(t, "wait for an event", <-answers, nvml.SUCCESS)
	for range 50 { // whatever the wait is at when it comes
		set, d = eventSet(t, lib, device(t, lib, 0)), device(t, lib, 0)
		waiting()
		wants(t, "Shutdown", lib.Shutdown(), nvml.SUCCESS)
		wants(t, "wait over a shutdown", <-answers, nvml.ERROR_UNINITIALIZED)
		wants(t, "Init", lib.Init(), nvml.SUCCESS)
	}
}

func (r *root) calls(function string) uint64 {
	r.t.Helper()
	calls := must.Get(r.file().Calls())(r.t)
	return calls[function]
}

// What happened before a GPU was lost is told first. After a reset nothing is, until the
// GPU is registered again by its new handle.
func TestEventsOfLostGPU(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	lib := r.open()
	d := device(t, lib, 0)
	set := eventSet(t, lib, d, device(t, lib, 1))
	r.happen(0, 79)
	r.update(func(m *machine.Machine) { m.GPUs[0].Failure = int(nvml.ERROR_GPU_IS_LOST) })
	expect.Equal(t, get(set.Wait(1000))(t, "EventSetWait").EventData, 79)
	wants(t, "wait on a lost GPU", code(set.Wait(1000)), nvml.ERROR_GPU_IS_LOST)
	wants(t, "register a lost GPU", d.RegisterEvents(xidType, set), nvml.ERROR_GPU_IS_LOST)

	r.update(func(m *machine.Machine) {
		expect.Do(t, m.ResetGPU(0))
	})
	wants(t, "GetUUID by the old handle", code(d.GetUUID()), nvml.ERROR_INVALID_ARGUMENT)
	r.happen(0, 13)
	r.happen(1, 31)
	expectXIDs(t, "after the reset", set, 31)
	fresh := device(t, lib, 0)
	if fresh == d {
		t.Error("the GPU has the handle from before the reset")
	}
	wants(t, "register again", fresh.RegisterEvents(xidType, set), nvml.SUCCESS)
	r.happen(0, 14)
	expectXIDs(t, "after registering again", set, 14)
}

// Without the capability to configure MIG, events of instances are not told.
func TestEventsOfInstances(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	lib := r.open()
	d := device(t, lib, 0)
	enable(t, d)
	createAt(t, d, id3g, place(0, 4))
	set := eventSet(t, lib, d)
	happen := func() {
		r.update(func(m *machine.Machine) {
			state.AddEvent(m, machine.Event{Type: xidType, XID: 94, InstanceID: 1, ComputeID: 0})
			state.AddEvent(m, machine.Event{Type: xidType, XID: 95, InstanceID: -1, ComputeID: -1})
		})
	}
	happen()
	data, ret := set.Wait(0)
	if wants(t, "EventSetWait", ret, nvml.SUCCESS); data.GpuInstanceId != 1 || data.ComputeInstanceId != 0 {
		t.Errorf("event %+v", data)
	}
	expectXIDs(t, "rest", set, 95)
	must.Do(t, os.Remove(filepath.Join(r.dir, "dev/nvidia-caps/nvidia-cap1")))
	happen()
	expectXIDs(t, "without the capability", set, 95)
}
