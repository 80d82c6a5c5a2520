// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/wait"
)

const (
	// retryEvents is how long after a failure to register for events the next attempt is, and how often GPUs are
	// looked for that were found after the others.
	retryEvents = 2 * time.Second

	waitForEvent = "nvmlEventSetWait_v2"
	// eventWait is how long one call waits for an event. Each end of a call wakes the process,
	// once for every GPU, which is most of what an idle node costs; and an event is not older
	// than the last call, so that shorter waits tell better about which partition it is.
	eventWait = 10 * time.Second
	// eventMore is how long the call after an event waits, which tells whether there are more. Events that come one
	// after the other, each within a wait, must not keep each other from having an age.
	eventMore = time.Millisecond
)

// Unmonitored returns why the events of a GPU are not received, or nil if they are, or if
// that is not known yet. The error wraps gpu.ErrNotSupported if the GPU or the driver
// reports none, gpu.ErrLost or gpu.ErrResetRequired if the GPU needs an administrator, and is
// a *gpu.PendingError if waiting for events does not return; it is nil again as soon as events are
// received. It makes no call of the library.
func (c *Client) Unmonitored(pciAddress string) error {
	reason, _ := c.unmonitored.Load(pciAddress)
	err, _ := reason.(error)
	return err
}

// Events returns what the driver reports about GPUs, until ctx ends; then it closes the
// channel. There must be one caller at a time. Nothing is reported of what
// happened before.
//
// It follows the GPUs that Discover has found, also through a reset and into another
// session. Each of them has an event set of its own, so that one which hangs keeps back
// nothing of the others, and costs a thread that waits. A GPU that cannot be followed is
// tried again every two seconds; see Unmonitored. A receiver that is slow loses nothing that
// the driver keeps.
//
// That a GPU is lost is an event as soon as waiting or a call that checks it says so, once
// until the GPU is well again, and perhaps after one that the driver reports.
func (c *Client) Events(ctx context.Context) <-chan gpu.Event {
	events := make(chan gpu.Event)
	go func() {
		defer close(events)
		var following sync.WaitGroup
		defer following.Wait()
		followed := map[string]bool{}
		for ctx.Err() == nil {
			for _, pci := range c.found() {
				if followed[pci] {
					continue
				}
				followed[pci] = true
				w := &eventWatch{client: c, pci: pci, events: events}
				following.Go(func() { w.run(ctx) })
			}
			_ = wait.For(ctx, retryEvents) // the loop ends with ctx
		}
	}()
	return events
}

// found are the addresses of the GPUs that were found in this session.
func (s *session) found() []string {
	lib, err := s.library()
	if err != nil {
		return nil
	}
	lib.mu.Lock()
	defer lib.mu.Unlock()
	return slices.Sorted(maps.Values(lib.addresses))
}

// eventTypes are those of the driver that Events is about. Corrected memory errors come in
// storms, and nothing has to be done about them.
const eventTypes = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError |
	nvml.EventTypeGpuUnavailableError | nvml.EventTypeGpuRecoveryAction

var eventKinds = map[uint64]gpu.EventKind{
	nvml.EventTypeXidCriticalError:    gpu.EventXID,
	nvml.EventTypeDoubleBitEccError:   gpu.EventUncorrectedECC,
	nvml.EventTypeGpuUnavailableError: gpu.EventLost,
	nvml.EventTypeGpuRecoveryAction:   gpu.EventRecoveryAction,
}

// eventWatch follows the events of one GPU.
type eventWatch struct {
	client *Client
	pci    string
	events chan<- gpu.Event
	// set is what events are registered with, and on what they are registered on.
	set nvml.EventSet
	on  *handle
	// drained is when the driver last had no event to report: before the GPU was registered, or
	// when a call had waited for one in vain.
	drained time.Time
	lost    bool // that has been reported
	problem logchange.Problem
}

// errOtherHandle: the GPU has another handle now, on which nothing is registered.
var errOtherHandle = errors.New("the GPU was reset")

// run registers and waits until ctx ends, and again after every failure.
func (w *eventWatch) run(ctx context.Context) {
	for ctx.Err() == nil {
		switch err := w.follow(ctx); {
		case ctx.Err() != nil:
		case errors.Is(err, errOtherHandle):
			w.send(ctx, w.event(gpu.EventReset))
		default:
			w.report(ctx, err)
			_ = wait.For(ctx, retryEvents) // the loop ends with ctx
		}
	}
}

// report says why no events are received, and that the GPU is lost, once.
func (w *eventWatch) report(ctx context.Context, err error) {
	w.client.unmonitored.Store(w.pci, err)
	w.problem.Log(ctx, err, "Events of a GPU are not received", "Events of a GPU are received again", "pciAddress", w.pci)
	if lost := errors.Is(err, gpu.ErrLost); lost && !w.lost {
		w.lost = true
		w.send(ctx, w.event(gpu.EventLost))
	}
}

// event is about all of the GPU.
func (w *eventWatch) event(kind gpu.EventKind) gpu.Event {
	now := time.Now()
	return gpu.Event{Time: now, NotBefore: now, PCIAddress: w.pci, Kind: kind, InstanceID: -1, ComputeInstanceID: -1}
}

// follow registers and delivers events until that fails.
func (w *eventWatch) follow(ctx context.Context) error {
	if err := w.register(ctx); err != nil {
		return err
	}
	defer w.free(ctx)
	w.lost = false
	w.report(ctx, nil)
	timeout := eventWait
	for {
		// There may be more after an event, which do not wait for what else is done with the GPU.
		switch err := w.wait(ctx, timeout); {
		case err == nil:
			timeout = eventMore
			continue
		case !errors.Is(err, gpu.ErrTimeout):
			return err
		}
		timeout = eventWait
		if err := w.check(ctx); err != nil {
			return err
		}
	}
}

// queue is that of waiting for the GPU's events, which delays no other call on it. It is not observed.
func (w *eventWatch) queue(lib *library) queue {
	return queue{Queue: w.client.calls.Of(w.pci, "events"), lib: lib}
}

// register makes an event set and registers the GPU with it.
func (w *eventWatch) register(ctx context.Context) error {
	return w.client.on(ctx, w.pci, func(r *reading) {
		// First, so that no event set is made for a GPU that does not answer.
		types := readSupportedEvents(r)
		set := must(r, "nvmlEventSetCreate", r.lib.EventSetCreate)
		if r.err != nil {
			return
		}
		w.set, w.on, w.drained = set, r.handle, time.Now()
		r.change("nvmlDeviceRegisterEvents", func() nvml.Return { return r.dev.RegisterEvents(types, set) })
		if r.err != nil && !gpu.IsPending(r.err) { // or a call still works on the set
			w.free(ctx)
		}
	})
}

// readSupportedEvents returns the types that are wanted and that the GPU supports.
func readSupportedEvents(r *reading) uint64 {
	const call = "nvmlDeviceGetSupportedEventTypes"
	types := must(r, call, r.dev.GetSupportedEventTypes)
	if types&nvml.EventTypeXidCriticalError == 0 {
		r.fail(call, gpu.ErrNotSupported, "the GPU does not report XIDs")
	}
	return types & eventTypes
}

// wait waits for one event and delivers it. When ctx ends the call goes on by itself. If the call does not return in
// time, wait waits on for it, and the event set stays as it is: what the driver has recorded meanwhile comes with the next calls.
func (w *eventWatch) wait(ctx context.Context, timeout time.Duration) error {
	// A call counts as hung after the limit. NVML wants whole milliseconds.
	timeout = min(timeout, w.client.calls.Limit()/2).Truncate(time.Millisecond)
	began := time.Now()
	var found nvml.EventData // the call's own until it has returned
	answer, set := make(chan error, 1), w.set
	go func() {
		answer <- do(context.WithoutCancel(ctx), w.queue(w.on.lib), waitForEvent, func() nvml.Return {
			data, ret := set.Wait(uint32(timeout.Milliseconds()))
			if ret == nvml.SUCCESS {
				found = data
			}
			return ret
		})
	}()
	var err error
	select {
	case err = <-answer:
	case <-ctx.Done():
		return ctx.Err()
	}
	var out *gpu.PendingError
	if errors.As(err, &out) {
		w.report(ctx, out)
		select {
		case <-out.Done:
		case <-ctx.Done():
			return ctx.Err()
		}
		w.report(ctx, nil)
		err = nil
	}
	if errors.Is(err, gpu.ErrTimeout) {
		w.drained = began.Add(timeout)
	}
	if kind, wanted := eventKinds[found.EventType]; wanted {
		w.send(ctx, eventOf(w.event(kind), found, w.drained))
	}
	return err
}

// eventOf completes an event that is about all of the GPU with what the driver says.
func eventOf(event gpu.Event, data nvml.EventData, notBefore time.Time) gpu.Event {
	event.NotBefore = notBefore
	if event.Kind == gpu.EventXID {
		event.XID = data.EventData
	}
	if data.GpuInstanceId != noInstance {
		event.InstanceID = int(data.GpuInstanceId)
		if data.ComputeInstanceId != noInstance {
			event.ComputeInstanceID = int(data.ComputeInstanceId)
		}
	}
	return event
}

func (w *eventWatch) send(ctx context.Context, event gpu.Event) {
	select {
	case w.events <- event:
	case <-ctx.Done():
	}
}

// check fails if events are registered on something that is no longer the GPU, or no
// longer works. After a reset the GPU has another handle. It does not fail for a GPU that hangs: its events may
// still come.
func (w *eventWatch) check(ctx context.Context) error {
	err := w.client.on(ctx, w.pci, func(r *reading) {
		_ = readSupportedEvents(r)
		if r.err == nil && r.dev != w.on.dev {
			r.err = errOtherHandle
		}
	})
	if gpu.IsPending(err) {
		return nil
	}
	return err
}

// free drops an event set. One that is lost with its session is left to the library, as is the one of a receiver
// that ends: a call may wait with it.
func (w *eventWatch) free(ctx context.Context) {
	if err := do(ctx, w.queue(w.on.lib), "nvmlEventSetFree", w.set.Free); err != nil {
		klog.FromContext(ctx).V(4).Info("Event set was not freed", "pciAddress", w.pci, "reason", err)
	}
}
