// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Open loads the library and starts the session, which then lives until Close:
// starting one costs up to two seconds where no other process keeps the driver
// awake. Where there is a session, Open makes sure with one cheap call that it
// works, and replaces it if the driver behind it is gone or was reloaded.
//
// The error wraps gpu.ErrDriverNotLoaded while there is no library or no kernel
// driver behind it, and gpu.ErrVersionMismatch while the two do not belong
// together; try again later. It wraps ErrRestartRequired when another driver
// has come since this process loaded the library; only a new process helps. It
// wraps gpu.ErrHung while the driver does not answer. Then the next Open goes
// on with what that call has come to.
func (c *Client) Open(ctx context.Context) error {
	select {
	case c.opening <- struct{}{}:
		defer func() { <-c.opening }()
	case <-ctx.Done():
		return fmt.Errorf("wait for another attempt to open NVML: %w", ctx.Err())
	}
	if lib, err := c.session(); err == nil {
		dead, err := c.verify(ctx, lib)
		if !dead || err != nil {
			return err
		}
	}

	path, err := c.findLibrary()
	if err != nil {
		return err
	}
	if err := checkBound(path); err != nil {
		return err
	}
	lib, err := c.start(ctx, path)
	if err != nil {
		return fmt.Errorf("open NVML library %s: %w", path, err)
	}
	has, err := lookUp(lib.Extensions())
	if err != nil {
		return fmt.Errorf("open NVML library %s: %w", path, errors.Join(err, c.shutDown(ctx, lib)))
	}
	klog.FromContext(ctx).V(2).Info("NVML session opened", "library", path)

	c.mu.Lock()
	defer c.mu.Unlock()
	c.lib, c.has = lib, has
	c.handles, c.addresses, c.profiles = map[string]*handle{}, map[int]string{}, map[string]int{}
	return nil
}

// verify asks the session for something cheap and ends it if it is dead. While
// a call is out it stays: NVML counts its users, and initialises anew only
// after the last of them has left.
func (c *Client) verify(ctx context.Context, lib nvml.Interface) (dead bool, err error) {
	_, err = get(ctx, c.system(), "nvmlDeviceGetCount_v2", lib.DeviceGetCount)
	if !errors.Is(err, gpu.ErrDriverNotLoaded) {
		return false, err
	}
	if hung := c.hung(); hung != nil {
		return true, fmt.Errorf("replace the dead NVML session (%w): %w", err, hung)
	}
	klog.FromContext(ctx).Info("NVML session is dead and will be replaced", "reason", err)
	if c.end() == nil {
		return true, nil // closed meanwhile
	}
	// A session that is gone cannot be shut down, which is no failure.
	if err := c.shutDown(ctx, lib); errors.Is(err, gpu.ErrHung) {
		return true, err
	}
	return true, nil
}

// start initialises the library, or takes over an initialisation that was left
// behind and has succeeded since: doing it again could take as long again.
func (c *Client) start(ctx context.Context, path string) (nvml.Interface, error) {
	if lib := c.takeStarted(); lib != nil {
		return lib, nil
	}
	err := do(ctx, c.system(), "nvmlInitWithFlags", func() nvml.Return {
		lib := c.load(path)
		// NO_GPUS: a machine whose GPUs have all fallen off the bus is a
		// machine with broken GPUs, not one without a driver.
		ret := lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS)
		if ret != nvml.ERROR_LIBRARY_NOT_FOUND {
			bind(path)
		}
		if ret == nvml.SUCCESS {
			c.setStarted(lib)
		}
		return ret
	})
	if errors.Is(err, gpu.ErrVersionMismatch) {
		return nil, fmt.Errorf("%w; reload the kernel module, or install the library that belongs to it", err)
	}
	if err != nil {
		return nil, err
	}
	if lib := c.takeStarted(); lib != nil {
		return lib, nil
	}
	return nil, fmt.Errorf("NVML was closed meanwhile: %w", gpu.ErrDriverNotLoaded)
}

func (c *Client) setStarted(lib nvml.Interface) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.started = lib
}

func (c *Client) takeStarted() nvml.Interface {
	c.mu.Lock()
	defer c.mu.Unlock()
	lib := c.started
	c.started = nil
	return lib
}

// Close ends the session. It does not wait for calls in progress, which then
// fail with gpu.ErrDriverNotLoaded. While a call that was left behind is out,
// the library is not shut down, and an Open that follows takes it over. Close
// returns within Options.CallLimit.
func (c *Client) Close() {
	lib := c.end()
	if lib == nil {
		lib = c.takeStarted()
	}
	if lib == nil {
		return
	}
	if hung := c.hung(); hung != nil {
		klog.Background().Info("NVML is not shut down, because a call is out", "reason", hung)
		c.setStarted(lib)
		return
	}
	_ = c.shutDown(context.Background(), lib) // there is nothing to be done about a failure
}

// end makes the client one without a session, and returns the library that it
// had, or nil.
func (c *Client) end() nvml.Interface {
	c.mu.Lock()
	defer c.mu.Unlock()
	lib := c.lib
	c.lib, c.handles, c.addresses, c.profiles = nil, nil, nil, nil
	return lib
}

func (c *Client) shutDown(ctx context.Context, lib nvml.Interface) error {
	return do(ctx, c.system(), "nvmlShutdown", lib.Shutdown)
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
