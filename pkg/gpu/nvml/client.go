// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package nvml reads and partitions GPUs through NVIDIA's management library.
// It is the only importer of the library's Go bindings, whose types never leave
// it.
//
// It needs driver R525 or newer. Functions that are newer are looked up in the
// library before they are called, because calling a function that the library
// lacks ends the process.
//
// # Calls that do not return
//
// A call into NVML cannot be cancelled, and one that waits in the kernel driver
// may never return. So every call can be left behind. If a call does not return
// within Options.CallLimit, the method returns an error that wraps gpu.ErrHung and
// in which errors.As finds the *gpu.HungError. When the context is done, no further
// call is made; the one in progress keeps its time, since leaving it behind would
// keep the GPU from others.
//
// Until the call returns, every other call on the same GPU fails at once with the
// same HungError. Calls on other GPUs are not affected, and neither is anything else by a call
// about what NVLinks lead to. When it returns, the time it
// took is logged, HungError.Done is closed, and the GPU can be used again. Until
// then a change that was left behind may take effect at any time: an instance may
// appear whose id is unknown, one may go, MIG mode or a compute mode may change. A
// caller that changes the GPU must wait for Done and read the GPU's state again.
//
// The file with the driver's parameters is read in the same way, and while that is out nothing but
// what it says is unknown.
//
// A method makes several calls, so it may take longer than the limit if each of
// them is slow. The limit bounds what one call that hangs adds.
package nvml

import (
	"cmp"
	"context"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/host"
)

// defaultCallLimit is well above what the slowest calls take: about 4 s to change
// MIG mode, up to 10 s to find a MIG device under load.
const defaultCallLimit = 25 * time.Second

// Options configure a Client.
type Options struct {
	Roots host.Roots
	// LibraryPath is the library. By default it is looked for under Roots.Driver. A
	// name without a slash is resolved by the dynamic linker.
	LibraryPath string
	// CallLimit is how long one call into the library may take before it is
	// left behind. 0 means 25 s.
	CallLimit time.Duration
	// Observe, if there is one, gets every call into the library when it has returned or
	// was left behind, with the context for which it was made. Calls are concurrent.
	Observe func(context.Context, Call)
}

// Client reads and partitions GPUs. All methods may be called concurrently; NVML
// itself is thread-safe. Calls that change one GPU must be ordered by the caller.
type Client struct {
	session
	// parameters is the lane of the driver's parameters, a file and none of the library's calls.
	parameters lane
	monitoring monitoring
	ids        idOwners
}

// New returns a client that has no session yet; see Open.
func New(o Options) *Client {
	limit := cmp.Or(o.CallLimit, defaultCallLimit)
	return &Client{parameters: lane{limit: limit}, session: session{
		roots:       o.Roots.Complete(),
		libraryPath: o.LibraryPath,
		load: func(path string) nvml.Interface {
			return nvml.New(nvml.WithLibraryPath(path))
		},
		lanes:   lanes{limit: limit, observe: o.Observe, byName: map[string]*lane{}},
		opening: make(chan struct{}, 1),
	}}
}
