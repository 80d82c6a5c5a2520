// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/wait"
)

const (
	waitForEvent = "nvmlEventSetWait_v2"
	// eventWait is how long one call waits for an event. Each end of a call wakes the process,
	// once for every GPU, which is most of what an idle node costs; and an event is not older
	// than the last call, so that shorter waits tell better about which partition it is.
	eventWait = 10 * time.Second
	// eventMore is how long the call after an event waits, which tells whether there are more.
	eventMore = time.Millisecond
)

// eventWatch follows the events of one GPU.
type eventWatch struct {
	client *Client
	pci    string
	events chan<- gpu.Event
	// late has an event that came with a call that nobody waited for any more.
	late chan nvml.EventData
	// drained is when the driver last had no event to report: before the GPU was registered, or
	// when a call had waited for one in vain. more says that the last call found one.
	drained time.Time
	more    bool
	lost    bool // that has been reported
	problem logchange.Problem
}

// eventSet is what events are registered with, and the GPU that they are registered on.
type eventSet struct {
	nvml.EventSet
	on *handle
}

// errOtherHandle: the GPU has another handle now, on which nothing is registered.
var errOtherHandle = errors.New("the GPU was reset")

// run registers and waits until ctx ends, and again after every failure.
func (w *eventWatch) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errOtherHandle) {
			w.send(ctx, w.event(gpu.EventReset))
			continue
		}
		w.report(ctx, err)
		if wait.For(ctx, retryEvents) != nil {
			return
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
	set, err := w.register(ctx)
	if err != nil {
		return err
	}
	defer w.free(ctx, set)
	w.lost = false
	w.report(ctx, nil)
	for {
		err := w.wait(ctx, set)
		var out *gpu.PendingError
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &out):
			w.waitOut(ctx, out)
			continue
		case err == nil:
			continue // there may be more, which do not wait for what else is done with the GPU
		case !errors.Is(err, gpu.ErrTimeout):
			return err
		}
		if err := w.check(ctx, set); err != nil {
			return err
		}
	}
}

// queue is that of waiting for the GPU's events, which delays no other call on it. It is not observed.
func (w *eventWatch) queue(lib *library) queue {
	return queue{Queue: w.client.calls.Of(w.pci, "events"), lib: lib}
}

// register makes an event set and registers the GPU with it.
func (w *eventWatch) register(ctx context.Context) (eventSet, error) {
	return onGPU(ctx, &w.client.session, w.pci, func(r *reading) eventSet {
		// First, so that no event set is made for a GPU that does not answer.
		types := readSupportedEvents(r)
		if r.err != nil {
			return eventSet{}
		}
		set := eventSet{on: r.handle}
		if set.EventSet, r.err = get(ctx, w.queue(r.lib), "nvmlEventSetCreate", r.lib.EventSetCreate); r.err != nil {
			return eventSet{}
		}
		w.drained = time.Now()
		r.change("nvmlDeviceRegisterEvents", func() nvml.Return { return r.dev.RegisterEvents(types, set.EventSet) })
		if r.err != nil && !gpu.IsPending(r.err) { // or a call still works on the set
			w.free(ctx, set)
		}
		return set
	})
}

// supportedEvents are the types that are wanted and that the GPU supports.
func readSupportedEvents(r *reading) uint64 {
	const call = "nvmlDeviceGetSupportedEventTypes"
	types := must(r, call, r.dev.GetSupportedEventTypes)
	if types&nvml.EventTypeXidCriticalError == 0 {
		r.fail(call, gpu.ErrNotSupported, "the GPU does not report XIDs")
	}
	return types & eventTypes
}

// wait waits for one event and delivers it. When ctx ends the call goes on by itself.
func (w *eventWatch) wait(ctx context.Context, set eventSet) error {
	q := w.queue(set.on.lib)
	began, timeout := time.Now(), w.timeout(q.Limit())
	answer := make(chan error, 1)
	go func() {
		answer <- do(context.WithoutCancel(ctx), q, waitForEvent, func() nvml.Return {
			data, ret := set.Wait(uint32(timeout.Milliseconds()))
			if ret == nvml.SUCCESS {
				w.late <- data // has room: there is one call at a time
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
	w.deliver(ctx)
	w.more = err == nil
	if errors.Is(err, gpu.ErrTimeout) {
		w.drained = began.Add(timeout)
	}
	return err
}

// timeout returns how long the next call waits, in whole milliseconds as NVML wants them. A call
// counts as hung after the limit.
func (w *eventWatch) timeout(limit time.Duration) time.Duration {
	if w.more {
		// Events that come one after the other, each within a wait, must not keep each other from
		// having an age.
		return eventMore
	}
	return min(eventWait, limit/2).Truncate(time.Millisecond)
}

// deliver sends the event that the last call returned, if it did.
func (w *eventWatch) deliver(ctx context.Context) {
	select {
	case data := <-w.late:
		if kind, wanted := eventKinds[data.EventType]; wanted {
			event := eventOf(w.event(kind), data)
			event.NotBefore = w.drained
			w.send(ctx, event)
		}
	default:
	}
}

func (w *eventWatch) send(ctx context.Context, event gpu.Event) {
	select {
	case w.events <- event:
	case <-ctx.Done():
	}
}

// waitOut waits until a call that has not returned does. The event set stays as it is:
// what the driver has recorded meanwhile comes with the next calls.
func (w *eventWatch) waitOut(ctx context.Context, out *gpu.PendingError) {
	w.report(ctx, out)
	select {
	case <-out.Done:
		w.deliver(ctx)
		w.report(ctx, nil)
	case <-ctx.Done():
	}
}

// check fails if events are registered on something that is no longer the GPU, or no
// longer works. After a reset the GPU has another handle. It does not fail for a GPU that hangs: its events may
// still come.
func (w *eventWatch) check(ctx context.Context, set eventSet) error {
	_, err := onGPU(ctx, &w.client.session, w.pci, func(r *reading) any {
		_ = readSupportedEvents(r)
		if r.err == nil && r.dev != set.on.dev {
			r.err = errOtherHandle
		}
		return nil
	})
	if gpu.IsPending(err) {
		return nil
	}
	return err
}

// free drops an event set. One that is lost with its session is left to the library, as is the one of a receiver
// that ends: a call may wait with it.
func (w *eventWatch) free(ctx context.Context, set eventSet) {
	if ctx.Err() != nil {
		return
	}
	if err := do(ctx, w.queue(set.on.lib), "nvmlEventSetFree", set.Free); err != nil {
		klog.FromContext(ctx).V(4).Info("Event set was not freed", "pciAddress", w.pci, "reason", err)
	}
}
