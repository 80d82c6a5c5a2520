// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/call"
	"github.com/partage-dev/partage/pkg/gpu"
)

// prefix is that of the names of all calls into the library.
const prefix = "nvml"

// queue is where calls wait for each other, and who observes them, if anybody does.
type queue struct {
	*call.Queue

	observe func(context.Context, Call)
}

// get makes one call of the library; see call.Do. What f works on must stay until it returns, which may be
// after get: see gpu.PendingError.
func get[T any](ctx context.Context, q queue, name string, f func() (T, nvml.Return)) (T, error) {
	type answer struct {
		value T
		took  time.Duration
	}
	a, err := call.Do(ctx, q.Queue, name, func() (answer, error) {
		began := time.Now()
		value, ret := f()
		return answer{value, time.Since(began)}, failure(name, q.PCIAddress(), ret)
	})
	if q.observe != nil {
		var out *gpu.PendingError
		if errors.As(err, &out) && out.Call == name {
			a.took = time.Since(out.Since)
		}
		q.observe(ctx, Call{Function: name, PCIAddress: q.PCIAddress(), Took: a.took, Answer: plain(a.value), Err: err})
	}
	return a.value, err
}

// do is get for a call that returns nothing but a code.
func do(ctx context.Context, q queue, name string, f func() nvml.Return) error {
	_, err := get(ctx, q, name, func() (struct{}, nvml.Return) { return struct{}{}, f() })
	return err
}

// driver is the queue of calls that are about no GPU.
func (s *session) driver() queue { return queue{s.calls.Of("", ""), s.observe} }

// queue is that of a GPU.
func (s *session) queue(pci string) queue { return queue{s.calls.GPU(pci), s.observe} }

// events is the queue of waiting for a GPU's events, which delays no other call on the GPU. It is not
// observed.
func (s *session) events(pci string) queue { return queue{Queue: s.calls.Of(pci, "events")} }

// Call is one call into the library, as Options.Observe gets it.
type Call struct {
	// Function is NVML's: "nvmlDeviceGetUUID".
	Function string
	// PCIAddress is empty for calls that are not about one GPU, or not known to be.
	PCIAddress string
	// Took is how long it took, or was out when nobody waited for it any more.
	Took time.Duration
	// Answer is what the bindings returned, for output; nil where that is nothing but a
	// code, or refers to memory of the library.
	Answer any
	// Err is what the caller got.
	Err error
}

// plain returns a value that consists of nothing but numbers, texts and lists of them, and
// nil for any other.
func plain(value any) any {
	if value == nil || !isPlain(reflect.TypeOf(value)) {
		return nil
	}
	return value
}

func isPlain(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.UnsafePointer, reflect.Interface, reflect.Func, reflect.Chan, reflect.Map:
		return false
	case reflect.Slice, reflect.Array:
		return isPlain(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if !isPlain(t.Field(i).Type) {
				return false
			}
		}
		return t.NumField() > 0
	default:
		return true
	}
}
