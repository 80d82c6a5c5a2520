// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package nvml reads and partitions GPUs through NVIDIA's management library.
// It is the only importer of the library's Go bindings, whose types never leave
// it.
//
// It needs driver R525 or newer. Every function is looked up in the library before it is
// called, because calling one that the library lacks ends the process.
//
// # Calls that do not return
//
// Every call is made by package call, in the queue of its GPU or in that of none, so that any method may
// fail with a *gpu.PendingError, and calls on other GPUs are not affected. A change that has not returned may take effect at any time: an instance may appear whose id is unknown, one may go, MIG mode or a compute
// mode may change. A caller that changes the GPU must wait for PendingError.Done and read the GPU's state again.
//
// Waiting for events, asking what NVLinks lead to and reading the driver's parameters keep nothing else on the GPU waiting.
//
// A method makes several calls, so it may take longer than the limit if each of them is slow. The limit bounds what
// one call that hangs adds.
package nvml

import (
	"cmp"
	"context"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// Options configure a Client.
type Options struct {
	Roots host.Roots
	// Calls are the queues of the process, or nil for some of the client's own.
	Calls *call.Queues
	// Observe, if there is one, gets every call into the library when it has returned or
	// is waited for no longer, with the context for which it was made. Calls are concurrent.
	Observe func(context.Context, Call)
}

// Client reads and partitions GPUs. All methods may be called concurrently; NVML
// itself is thread-safe. Calls that change one GPU must be ordered by the caller.
type Client struct {
	session
	panics panics.Repeated
	ids    idOwners
	// unmonitored is why events of GPUs are not received, by PCI address: an error, or nil if they are.
	unmonitored sync.Map
}

// New returns a client that has no session yet; see Open.
func New(o Options) *Client {
	o.Calls = cmp.Or(o.Calls, call.New(0))
	o.Roots.Calls = cmp.Or(o.Roots.Calls, o.Calls)
	roots := o.Roots.Complete()
	return &Client{ids: idOwners{gpus: map[string]map[int]idOwner{}}, session: session{
		roots: roots, calls: o.Calls, observe: o.Observe,
		find: roots.LibraryPath,
		load: func(path string) nvml.Interface { return nvml.New(nvml.WithLibraryPath(path)) },
	}}
}
