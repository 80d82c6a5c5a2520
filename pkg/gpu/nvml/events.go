// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// retryEvents is how long after a failure to register for events the next attempt is, and how often GPUs are
// looked for that were found after the others.
const retryEvents = 2 * time.Second

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
				w := &eventWatch{client: c, pci: pci, events: events, late: make(chan nvml.EventData, 1)}
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
// storms and are counted: see Health.
const eventTypes = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError |
	nvml.EventTypeGpuUnavailableError | nvml.EventTypeGpuRecoveryAction

var eventKinds = map[uint64]gpu.EventKind{
	nvml.EventTypeXidCriticalError:    gpu.EventXID,
	nvml.EventTypeDoubleBitEccError:   gpu.EventUncorrectedECC,
	nvml.EventTypeGpuUnavailableError: gpu.EventLost,
	nvml.EventTypeGpuRecoveryAction:   gpu.EventRecoveryAction,
}

// eventOf completes an event that is about all of the GPU with what the driver says.
func eventOf(event gpu.Event, data nvml.EventData) gpu.Event {
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
