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
// A call into NVML cannot be cancelled. Every method looks at its context
// before each call and returns when it is done, but a call that hangs in the
// kernel driver hangs the method; callers that must not hang run it in a
// goroutine that they can leave behind.
package nvml

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
)

// Options say where the driver is.
type Options struct {
	Roots host.Roots
	// LibraryPath names the library instead of a search under Roots.Driver. A
	// name without a slash is left to the dynamic linker.
	LibraryPath string
}

// Client is one NVML session. All methods may be called concurrently; NVML
// itself is thread-safe. Calls that change one GPU must be ordered by the
// caller.
type Client struct {
	roots       host.Roots
	libraryPath string
	load        func(path string) nvml.Interface

	// opening is held through the initialisation, which takes from 10 ms to
	// seconds. mu is not, so that the other methods never wait for it.
	opening sync.Mutex

	mu      sync.Mutex
	lib     nvml.Interface
	has     features
	handles map[string]*handle // by PCI address
}

// New makes a client and touches nothing yet.
func New(o Options) *Client {
	return &Client{
		roots:       o.Roots.Complete(),
		libraryPath: o.LibraryPath,
		load: func(path string) nvml.Interface {
			return nvml.New(nvml.WithLibraryPath(path))
		},
	}
}

// Open loads the library and starts the session, which then lives until Close:
// starting one costs up to two seconds where no other process keeps the driver
// awake. A second Open does nothing.
//
// The error wraps gpu.ErrDriverNotLoaded while there is no library or no kernel
// driver behind it; try again later. It wraps ErrRestartRequired when another
// driver has come since this process loaded the library; only a new process
// helps.
func (c *Client) Open(ctx context.Context) error {
	c.opening.Lock()
	defer c.opening.Unlock()
	if _, err := c.session(); err == nil {
		return nil
	}

	path, err := c.findLibrary()
	if err != nil {
		return err
	}
	if err := checkBound(path); err != nil {
		return err
	}
	lib := c.load(path)
	// NO_GPUS: a machine whose GPUs have all fallen off the bus is a machine
	// with broken GPUs, not one without a driver.
	err = do(ctx, "nvmlInitWithFlags", "", func() nvml.Return {
		return lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS)
	})
	if err != nil {
		return fmt.Errorf("open NVML library %s: %w", path, explainInit(err))
	}
	bind(path)

	has, err := lookUp(lib.Extensions())
	if err != nil {
		_ = lib.Shutdown()
		return fmt.Errorf("open NVML library %s: %w", path, err)
	}
	klog.FromContext(ctx).V(2).Info("NVML session opened", "library", path)

	c.mu.Lock()
	defer c.mu.Unlock()
	c.lib, c.has, c.handles = lib, has, map[string]*handle{}
	return nil
}

// Close ends the session. It does not wait for calls in progress, which then
// fail with gpu.ErrDriverNotLoaded. Open may follow.
func (c *Client) Close() {
	c.mu.Lock()
	lib := c.lib
	c.lib, c.handles = nil, nil
	c.mu.Unlock()
	if lib != nil {
		_ = lib.Shutdown() // there is nothing to be done about a failure
	}
}

func (c *Client) findLibrary() (string, error) {
	if c.libraryPath != "" {
		return c.libraryPath, nil
	}
	path, err := c.roots.LibraryPath()
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: %w", gpu.ErrDriverNotLoaded, err)
	}
	return path, err
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
