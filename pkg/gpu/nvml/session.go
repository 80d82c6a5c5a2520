// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/call"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
)

// session is one session of the library at a time.
type session struct {
	roots       host.Roots
	libraryPath string
	load        func(path string) nvml.Interface

	calls   *call.Queues
	observe func(context.Context, Call)

	// opening holds one value while a session is being opened, which takes
	// from 10 ms to seconds. mu is not held then, so that the other methods
	// never wait for it.
	opening chan struct{}

	mu      sync.Mutex
	started nvml.Interface // initialised and not yet taken into use
	lib     nvml.Interface
	// waits are the calls in progress that lib must not be shut down under.
	waits *sync.WaitGroup
	has   features
	// handles are by PCI address. addresses are by index, to identify a GPU that
	// no longer answers. Both belong to lib.
	handles   map[string]*handle
	addresses map[int]string
	// profiles is how many MIG profiles each GPU had, by PCI address.
	profiles map[string]int
}

// library returns the library, or an error if there is no session.
func (s *session) library() (nvml.Interface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lib == nil {
		return nil, fmt.Errorf("NVML is not open: %w", gpu.ErrDriverNotLoaded)
	}
	return s.lib, nil
}

// features returns what the open library can do beyond the minimum.
func (s *session) features() features {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.has
}

// Open loads the library and starts the session, which then lives until Close:
// starting one takes up to two seconds if no other process keeps the driver awake.
// If there is a session, Open checks it with one cheap call, and replaces it if the
// driver behind it is gone or was reloaded.
//
// The error wraps gpu.ErrDriverNotLoaded if there is no library or no kernel driver
// behind it, and gpu.ErrVersionMismatch if the two are of different versions; try
// again later. It wraps ErrRestartRequired if another driver was installed since
// this process loaded the library; only a new process helps. While the driver does not
// answer it is a *gpu.PendingError; the next Open goes on with the result of that call.
func (s *session) Open(ctx context.Context) error {
	select {
	case s.opening <- struct{}{}:
		defer func() { <-s.opening }()
	case <-ctx.Done():
		return fmt.Errorf("wait for another attempt to open NVML: %w", ctx.Err())
	}
	if lib, err := s.library(); err == nil {
		dead, err := s.verify(ctx, lib)
		if !dead || err != nil {
			return err
		}
	}

	path, err := s.findLibrary(ctx)
	if err != nil {
		return err
	}
	if err := checkBound(path); err != nil {
		return err
	}
	lib, err := s.start(ctx, path)
	if err != nil {
		return fmt.Errorf("open NVML library %s: %w", path, err)
	}
	has, err := lookUp(lib.Extensions())
	if err != nil {
		return fmt.Errorf("open NVML library %s: %w", path, errors.Join(err, s.shutDown(ctx, lib, nil)))
	}
	klog.FromContext(ctx).V(2).Info("NVML session opened", "library", path)

	s.mu.Lock()
	defer s.mu.Unlock()
	s.lib, s.waits, s.has = lib, new(sync.WaitGroup), has
	s.handles, s.addresses, s.profiles = map[string]*handle{}, map[int]string{}, map[string]int{}
	return nil
}

// verify makes a cheap call and ends the session if it is dead. While a call is out
// the session stays: NVML counts its users, and initialises again only after the last
// of them has left.
func (s *session) verify(ctx context.Context, lib nvml.Interface) (dead bool, err error) {
	_, err = get(ctx, s.driver(), "nvmlDeviceGetCount_v2", lib.DeviceGetCount)
	if !errors.Is(err, gpu.ErrDriverNotLoaded) {
		return false, err
	}
	if out := s.calls.Pending(prefix); out != nil {
		return true, fmt.Errorf("replace the dead NVML session (%w): %w", err, out)
	}
	klog.FromContext(ctx).Info("NVML session is dead and will be replaced", "reason", err)
	ended, waits := s.end()
	if ended == nil {
		return true, nil // closed meanwhile
	}
	// A session that is gone cannot be shut down, which is no failure.
	if err := s.shutDown(ctx, lib, waits); gpu.IsPending(err) {
		return true, err
	}
	return true, nil
}

// start initialises the library, or takes over an initialisation for which
// nobody waited any more and which has succeeded since: another one could take as long again.
func (s *session) start(ctx context.Context, path string) (nvml.Interface, error) {
	if lib := s.takeStarted(); lib != nil {
		return lib, nil
	}
	err := do(ctx, s.driver(), "nvmlInitWithFlags", func() nvml.Return {
		lib := s.load(path)
		// NO_GPUS: a machine whose GPUs have all fallen off the bus is a
		// machine with broken GPUs, not one without a driver.
		ret := lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS)
		if ret != nvml.ERROR_LIBRARY_NOT_FOUND {
			bind(path)
		}
		if ret == nvml.SUCCESS {
			s.setStarted(lib)
		}
		return ret
	})
	if errors.Is(err, gpu.ErrVersionMismatch) {
		return nil, fmt.Errorf("%w; reload the kernel module, or install the library that belongs to it", err)
	}
	if err != nil {
		return nil, err
	}
	if lib := s.takeStarted(); lib != nil {
		return lib, nil
	}
	return nil, fmt.Errorf("NVML was closed meanwhile: %w", gpu.ErrDriverNotLoaded)
}

func (s *session) setStarted(lib nvml.Interface) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = lib
}

func (s *session) takeStarted() nvml.Interface {
	s.mu.Lock()
	defer s.mu.Unlock()
	lib := s.started
	s.started = nil
	return lib
}

// Close ends the session. It does not wait for calls in progress, which then fail
// with gpu.ErrDriverNotLoaded. While a call is out for which nobody waits any more, the library
// is not shut down, and the next Open takes it over. Close takes no longer than a call may.
func (s *session) Close() {
	lib, waits := s.end()
	if lib == nil {
		lib = s.takeStarted()
	}
	if lib == nil {
		return
	}
	if out := s.calls.Pending(prefix); out != nil {
		klog.Background().Info("NVML is not shut down, because a call is out", "reason", out)
		s.setStarted(lib)
		return
	}
	_ = s.shutDown(context.Background(), lib, waits) // there is nothing to be done about a failure
}

// end forgets the session and returns its library, or nil if there was none, and what to
// wait for before it is shut down.
func (s *session) end() (nvml.Interface, *sync.WaitGroup) {
	s.mu.Lock()
	defer s.mu.Unlock()
	lib, waits := s.lib, s.waits
	s.lib, s.waits, s.handles, s.addresses, s.profiles = nil, nil, nil, nil, nil
	return lib, waits
}

// use makes a call that the library must not be shut down under, because what it works on
// would be freed. Without the session it is not made.
func use[T any](s *session, lib nvml.Interface, f func() (T, nvml.Return)) (T, nvml.Return) {
	s.mu.Lock()
	if s.lib != lib {
		s.mu.Unlock()
		var none T
		return none, nvml.ERROR_UNINITIALIZED
	}
	waits := s.waits
	waits.Add(1)
	s.mu.Unlock()
	defer waits.Done()
	return f()
}

func (s *session) shutDown(ctx context.Context, lib nvml.Interface, waits *sync.WaitGroup) error {
	return do(ctx, s.driver(), "nvmlShutdown", func() nvml.Return {
		if waits != nil {
			waits.Wait()
		}
		return lib.Shutdown()
	})
}

func (s *session) findLibrary(ctx context.Context) (string, error) {
	if s.libraryPath != "" {
		return s.libraryPath, nil
	}
	path, err := call.Look(ctx, s.calls.Of("", call.DriverFiles), "look for the NVML library", s.roots.LibraryPath)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w: %w", gpu.ErrDriverNotLoaded, err)
	}
	return path, err
}
