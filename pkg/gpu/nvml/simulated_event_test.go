// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/util/wait"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	fatal "github.com/partage-dev/partage/test/must"
)

// patience is how long a test waits for what has to happen, on a machine of any load.
const patience = time.Minute

// listener receives events in the background.
type listener struct {
	t      *testing.T
	client *Client
	file   *state.File
	events <-chan gpu.Event
}

// listen discovers the GPUs of a machine and receives their events.
func listen(t *testing.T, m *machine.Machine, o Options) *listener {
	t.Helper()
	c, file := simulateClosed(t, m, o)
	fatal.Do(t, c.Open(t.Context()))
	fatal.Get(c.Discover(t.Context()))(t)
	ctx, stop := context.WithCancel(t.Context())
	l := &listener{t: t, client: c, file: file, events: c.Events(ctx)}
	t.Cleanup(func() {
		stop()
		for range l.events { // until it is closed
		}
	})
	return l
}

// until waits until Unmonitored says what is wanted of a GPU.
func (l *listener) until(pci string, what string, wanted func(error) bool) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	err := wait.Until(ctx, func() (bool, error) { return wanted(l.client.Unmonitored(pci)), nil })
	if err != nil {
		l.t.Fatalf("GPU %s is not %s in %s: %v", pci, what, patience, l.client.Unmonitored(pci))
	}
}

// monitored waits until events of the GPUs are received.
func (l *listener) monitored(addresses ...string) {
	l.t.Helper()
	for _, pci := range addresses {
		l.until(pci, "monitored", func(error) bool {
			reason, known := l.client.unmonitored.Load(pci)
			return known && reason == nil
		})
	}
}

func (l *listener) update(change func(m *machine.Machine)) {
	l.t.Helper()
	update(l.t, l.file, change)
}

// happen adds events.
func (l *listener) happen(events ...machine.Event) {
	l.t.Helper()
	l.update(func(m *machine.Machine) {
		for _, e := range events {
			state.AddEvent(m, e)
		}
	})
}

func xid(index int, number uint64) machine.Event {
	return machine.Event{GPU: index, Type: nvml.EventTypeXidCriticalError, XID: number, InstanceID: -1, ComputeID: -1}
}

// expect receives as many events as are wanted, and compares them.
func (l *listener) expect(want ...gpu.Event) (got []gpu.Event) {
	l.t.Helper()
	deadline := time.After(patience)
	for len(got) < len(want) {
		select {
		case e := <-l.events:
			if since := time.Since(e.Time); since < 0 || since > patience || e.NotBefore.IsZero() || e.NotBefore.After(e.Time) {
				l.t.Errorf("event is of %s, and not from before %s", e.Time, e.NotBefore)
			}
			got = append(got, e)
		case <-deadline:
			l.t.Fatalf("no more events than %v in %s, want %v", got, patience, want)
		}
	}
	if diff := gocmp.Diff(want, got, cmpopts.IgnoreFields(gpu.Event{}, "Time", "NotBefore")); diff != "" {
		l.t.Fatalf("events (-want +got):\n%s", diff)
	}
	return got
}

func whole(pci string, kind gpu.EventKind, xid uint64) gpu.Event {
	return gpu.Event{PCIAddress: pci, Kind: kind, XID: xid, InstanceID: -1, ComputeInstanceID: -1}
}

// Every kind of event comes with the GPU and the instances that it is on, in order, and
// nothing comes that happened before or that nobody wants.
func TestSimulatedEvents(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx2")
	m.GPUs[1].MIG.Current, m.GPUs[1].MIG.Pending = true, true
	state.AddEvent(m, xid(0, 13))
	first, second := m.GPUs[0].PCIAddress, m.GPUs[1].PCIAddress
	l := listen(t, m, Options{})
	l.monitored(first, second)

	corrected, ofInstance, ofCompute := xid(1, 0), xid(1, 31), xid(1, 94)
	corrected.Type = nvml.EventTypeSingleBitEccError
	ofInstance.InstanceID = 9
	ofCompute.InstanceID, ofCompute.ComputeID = 9, 0
	uncorrected, action, gone := xid(1, 0), xid(1, 0), xid(1, 0)
	uncorrected.Type, action.Type, gone.Type = nvml.EventTypeDoubleBitEccError, nvml.EventTypeGpuRecoveryAction, nvml.EventTypeGpuUnavailableError
	l.happen(corrected, ofInstance, ofCompute, uncorrected, action, gone, xid(1, 999))
	l.expect(
		gpu.Event{PCIAddress: second, Kind: gpu.EventXID, XID: 31, InstanceID: 9, ComputeInstanceID: -1},
		gpu.Event{PCIAddress: second, Kind: gpu.EventXID, XID: 94, InstanceID: 9, ComputeInstanceID: 0},
		whole(second, gpu.EventUncorrectedECC, 0), whole(second, gpu.EventRecoveryAction, 0), whole(second, gpu.EventLost, 0),
		whole(second, gpu.EventXID, 999),
	)
	l.happen(xid(0, 48))
	l.expect(whole(first, gpu.EventXID, 48))
}

// A GPU that reports nothing is said to be so, and is found once it does.
func TestSimulatedEventsUnsupported(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx2")
	m.GPUs[0].NoEvents = true
	first, second := m.GPUs[0].PCIAddress, m.GPUs[1].PCIAddress
	l := listen(t, m, Options{})
	l.monitored(second)
	l.until(first, "unsupported", func(err error) bool { return errors.Is(err, gpu.ErrNotSupported) })
	l.happen(xid(0, 13), xid(1, 13))
	l.expect(whole(second, gpu.EventXID, 13))

	l.update(func(m *machine.Machine) { m.GPUs[0].NoEvents = false })
	l.monitored(first)
	l.happen(xid(0, 14))
	l.expect(whole(first, gpu.EventXID, 14))
}

// A lost GPU says why first, then that it is lost, once. After the reset its events come
// again. Those of the other GPU never stop.
func TestSimulatedEventsOfLostGPU(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx2")
	first, second := m.GPUs[0].PCIAddress, m.GPUs[1].PCIAddress
	l := listen(t, m, Options{})
	l.monitored(first, second)

	l.update(func(m *machine.Machine) {
		state.AddEvent(m, xid(0, 79))
		m.GPUs[0].Failure = int(nvml.ERROR_GPU_IS_LOST)
	})
	l.expect(whole(first, gpu.EventXID, 79), whole(first, gpu.EventLost, 0))
	l.until(first, "lost", func(err error) bool { return errors.Is(err, gpu.ErrLost) })
	l.happen(xid(1, 13))
	l.expect(whole(second, gpu.EventXID, 13))

	l.update(func(m *machine.Machine) {
		expect.Do(t, m.ResetGPU(0))
	})
	l.monitored(first)
	l.happen(xid(0, 14))
	l.expect(whole(first, gpu.EventXID, 14))
}

// A reset that nobody announces ends registrations in silence. It is noticed by the handle.
func TestSimulatedEventsAfterReset(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	pci := m.GPUs[0].PCIAddress
	l := listen(t, m, Options{})
	l.monitored(pci)
	l.update(func(m *machine.Machine) { m.GPUs[0].Reset() })

	l.expect(whole(pci, gpu.EventReset, 0))
	// The number of sets that were made says that there is a new registration.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := wait.Until(ctx, func() (bool, error) {
		calls, err := l.file.Calls()
		return calls["nvmlDeviceRegisterEvents"] >= 2, err
	})
	fatal.Do(t, err, "the GPU is not registered again")
	l.monitored(pci)
	l.happen(xid(0, 14))
	l.expect(whole(pci, gpu.EventXID, 14))
}

// Waiting for events of one GPU hangs. Those of the other come; the GPU itself can be
// used, and what happened meanwhile comes afterwards.
func TestSimulatedEventsHang(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx2")
	first, second := m.GPUs[0].PCIAddress, m.GPUs[1].PCIAddress
	l := listen(t, m, Options{Calls: call.New(2 * time.Second)})
	l.monitored(first, second)

	fault := addFault(t, l.file, machine.Fault{Function: waitForEvent, GPU: 0, Hang: true, Effect: machine.Proceed})
	l.until(first, "hung", gpu.IsPending)
	happened := time.Now()
	l.happen(xid(0, 95), xid(1, 13))
	l.expect(whole(second, gpu.EventXID, 13))
	expect.Do(t, l.client.Unmonitored(second), "the other GPU")
	expect.Do(t, expect.Err(l.client.MIGState(t.Context(), first)), "the GPU whose events hang cannot be used")

	released := time.Now()
	removeFault(t, l.file, fault)
	// It may be from any time since the last call that returned.
	if e := l.expect(whole(first, gpu.EventXID, 95))[0]; !e.NotBefore.Before(happened) || e.Time.Before(released) {
		t.Errorf("the event is from %s to %s, it happened after %s and was received after %s", e.NotBefore, e.Time, happened, released)
	}
	l.monitored(first)
	// What the driver has to report from now on is younger.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := wait.Until(ctx, func() (bool, error) {
		l.happen(xid(0, 13))
		return l.expect(whole(first, gpu.EventXID, 13))[0].NotBefore.After(released), nil
	})
	expect.Do(t, err, "events are never younger than a call that hung")
}

// Everything else on a GPU hangs. Its events come all the same.
func TestSimulatedEventsOfHungGPU(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	pci := m.GPUs[0].PCIAddress
	l := listen(t, m, Options{Calls: call.New(2 * time.Second)})
	l.monitored(pci)
	addFault(t, l.file, machine.Fault{Function: "nvmlDeviceGetMemoryInfo", GPU: 0, Hang: true, Effect: machine.Proceed})
	_, err := l.client.MIGState(t.Context(), pci)
	var hung *gpu.PendingError
	if !errors.As(err, &hung) {
		t.Fatalf("the GPU does not hang: %v", err)
	}
	l.happen(xid(0, 119))
	l.expect(whole(pci, gpu.EventXID, 119))
	l.update(func(m *machine.Machine) { m.Faults = nil })
	<-hung.Done // NVML is not shut down before, and the next test needs that
}

// A call on a GPU has been out for so short a time that nobody knows whether it hangs. What the driver reports of the GPU
// meanwhile does not wait for it.
func TestSimulatedEventsWhileCallIsOut(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	pci := m.GPUs[0].PCIAddress
	l := listen(t, m, Options{Calls: call.New(2 * patience)})
	l.monitored(pci)
	fault := addFault(t, l.file, machine.Fault{Function: "nvmlDeviceGetMemoryInfo", GPU: 0, Hang: true, Effect: machine.Proceed})
	answer := make(chan error, 1)
	go func() {
		_, err := l.client.MIGState(t.Context(), pci)
		answer <- err
	}()
	waitUntilStruck(t, l.file, fault, answer)
	l.happen(xid(0, 119), xid(0, 154))
	l.expect(whole(pci, gpu.EventXID, 119), whole(pci, gpu.EventXID, 154))
	removeFault(t, l.file, fault)
	expect.Do(t, <-answer)
}

// Events go on in the next session.
func TestSimulatedEventsOfNextSession(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	pci := m.GPUs[0].PCIAddress
	l := listen(t, m, Options{})
	l.monitored(pci)
	l.client.Close()
	l.until(pci, "without a session", func(err error) bool { return errors.Is(err, gpu.ErrDriverNotLoaded) })
	fatal.Do(t, l.client.Open(t.Context()))
	l.monitored(pci)
	l.happen(xid(0, 13))
	l.expect(whole(pci, gpu.EventXID, 13))
}
