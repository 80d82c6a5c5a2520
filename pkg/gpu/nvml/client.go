// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package nvml reads and partitions GPUs through NVIDIA's management library.
// It is the only importer of the library's Go bindings, whose types never leave
// it.
//
// It needs driver R525 or newer. What is newer than that is looked up in the
// library before it is called, because a call of a symbol that the library
// lacks ends the process.
//
// # Calls that do not return
//
// A call into NVML cannot be cancelled, and one that waits in the kernel driver
// may never return. So every call is made in such a way that it can be left
// behind. When it has not returned after Options.CallLimit, the method returns an
// error that wraps gpu.ErrHung and in which errors.As finds the *gpu.HungError.
// When the context is done, no other call is made; the one under way still has its
// time, because to leave it behind would keep the GPU from others.
//
// Until that call returns, every other call on the same GPU fails at once with
// the same HungError. Calls on other GPUs are made as ever. When it returns, how
// long it took is logged, HungError.Done is closed, and the GPU can be used
// again. A change that was left behind may take effect at any time until then:
// an instance may appear that nobody knows the id of, one may go, MIG mode or a
// compute mode may switch. Whoever changes the GPU must wait for Done, and read its
// state afterwards.
//
// A method makes several calls, so it may take longer than the limit where each
// of them is slow. The limit bounds what one call that hangs adds.
package nvml

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
)

// defaultCallLimit is well above what the slowest calls take: about 4 s for a
// change of MIG mode, up to 10 s for finding a MIG device under load.
const defaultCallLimit = 25 * time.Second

// Options say where the driver is.
type Options struct {
	Roots host.Roots
	// LibraryPath names the library instead of a search under Roots.Driver. A
	// name without a slash is left to the dynamic linker.
	LibraryPath string
	// CallLimit is how long one call into the library may take before it is
	// left behind. 0 means 25 s.
	CallLimit time.Duration
}

// Client is one NVML session at a time. All methods may be called concurrently;
// NVML itself is thread-safe. Calls that change one GPU must be ordered by the
// caller.
type Client struct {
	roots       host.Roots
	libraryPath string
	callLimit   time.Duration
	load        func(path string) nvml.Interface

	// opening holds one value while a session is being opened, which takes
	// from 10 ms to seconds. mu is not held then, so that the other methods
	// never wait for it.
	opening chan struct{}

	mu      sync.Mutex
	lanes   map[string]*lane
	started nvml.Interface // initialised and not yet taken into use
	lib     nvml.Interface
	has     features
	// handles are by PCI address. addresses are by index, to know a GPU that
	// does not say any more which it is. Both are the session's.
	handles map[string]*handle
	// profiles is how many MIG profiles each GPU had, by PCI address.
	profiles  map[string]int
	addresses map[int]string
}

// New makes a client and touches nothing yet.
func New(o Options) *Client {
	return &Client{
		roots:       o.Roots.Complete(),
		libraryPath: o.LibraryPath,
		callLimit:   cmp.Or(o.CallLimit, defaultCallLimit),
		load: func(path string) nvml.Interface {
			return nvml.New(nvml.WithLibraryPath(path))
		},
		opening: make(chan struct{}, 1),
		lanes:   map[string]*lane{},
	}
}

// session returns the library, or an error when there is no session.
func (c *Client) session() (nvml.Interface, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lib == nil {
		return nil, fmt.Errorf("NVML is not open: %w", gpu.ErrDriverNotLoaded)
	}
	return c.lib, nil
}

// features returns what the open library can do beyond the minimum.
func (c *Client) features() features {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.has
}
