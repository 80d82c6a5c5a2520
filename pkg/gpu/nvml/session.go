// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
)

const (
	initialise = "nvmlInitWithFlags"
	shutDown   = "nvmlShutdown"
)

// session is one session of the library at a time.
type session struct {
	roots   host.Roots
	calls   *call.Queues
	observe func(context.Context, Call)
	find    func() (path string, err error)
	load    func(path string) nvml.Interface

	mu  sync.Mutex
	lib *library // nil without a session
}

// library returns the library, or an error if there is no session.
func (s *session) library() (*library, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lib == nil {
		return nil, fmt.Errorf("NVML is not open: %w", gpu.ErrDriverNotLoaded)
	}
	return s.lib, nil
}

// driver is the queue of calls that are about no GPU.
func (s *session) driver(lib *library) queue { return queue{s.calls.Of("", ""), lib, s.observe} }

// reading makes calls in the queue of a GPU.
func (s *session) reading(ctx context.Context, h *handle) *reading {
	return &reading{handle: h, ctx: ctx, queue: queue{s.calls.GPU(h.pci), h.lib, s.observe}}
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
	if lib, err := s.library(); err == nil {
		_, dead := get(ctx, s.driver(lib), "nvmlDeviceGetCount_v2", lib.DeviceGetCount)
		if !errors.Is(dead, gpu.ErrDriverNotLoaded) {
			return dead
		}
		klog.FromContext(ctx).Info("NVML session is dead and will be replaced", "reason", dead)
		// A session that is gone cannot be shut down, which is no failure.
		if err := s.end(ctx, lib); gpu.IsPending(err) {
			return fmt.Errorf("replace the dead NVML session (%w): %w", dead, err)
		}
	}
	path, err := call.Read(ctx, s.calls.Of("", call.DriverFiles), "find the NVML library", func() (string, error) {
		path, err := s.find()
		return path, errors.Join(err, checkBound(path))
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", gpu.ErrDriverNotLoaded, err)
	}
	if err != nil {
		return err
	}
	_, err = observed(ctx, s.driver(nil), initialise, func() (any, error) { return nil, s.start(path) })
	if errors.Is(err, gpu.ErrVersionMismatch) {
		err = fmt.Errorf("%w; reload the kernel module, or install the library that belongs to it", err)
	}
	if err != nil {
		return fmt.Errorf("open NVML library %s: %w", path, err)
	}
	klog.FromContext(ctx).V(2).Info("NVML session opened", "library", path)
	return nil
}

// start initialises the library, if no earlier call has done that after its caller had given up.
func (s *session) start(path string) error {
	if _, err := s.library(); err == nil {
		return nil
	}
	lib := s.load(path)
	// NO_GPUS: a machine whose GPUs have all fallen off the bus is a
	// machine with broken GPUs, not one without a driver.
	ret := lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS)
	if ret != nvml.ERROR_LIBRARY_NOT_FOUND {
		version := libraryVersion(path)
		bound.CompareAndSwap(nil, &version)
	}
	if ret != nvml.SUCCESS {
		return failure(initialise, "", ret)
	}
	if err := checkVersion(lib); err != nil {
		return errors.Join(err, failure(shutDown, "", lib.Shutdown()))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lib = &library{Interface: lib, handles: map[string]*handle{}, addresses: map[int]string{}, profiles: map[string][]gpu.Profile{}}
	return nil
}

// Close ends the session, when the calls in progress have returned. While a call is out for which nobody
// waits any more, the session stays, for the next Open. Close takes no longer than a call may.
func (s *session) Close() {
	if lib, err := s.library(); err == nil {
		if err := s.end(context.Background(), lib); err != nil {
			klog.Background().Info("NVML is not shut down", "reason", err)
		}
	}
}

// end ends a session, unless somebody has. While a call is out the session stays: NVML counts its users, and initialises
// again only after the last of them has left.
func (s *session) end(ctx context.Context, lib *library) error {
	if out := s.calls.Pending(prefix); out != nil {
		return out
	}
	s.mu.Lock()
	ended := s.lib != lib
	if !ended {
		s.lib = nil
	}
	s.mu.Unlock()
	if ended {
		return nil
	}
	_, err := observed(ctx, s.driver(nil), shutDown, func() (any, error) {
		lib.using.Lock() // for ever
		return nil, failure(shutDown, "", lib.Shutdown())
	})
	return err
}

// library is the library in one session, and what belongs to the session.
type library struct {
	nvml.Interface

	// using is held by calls, so that nothing that they work on is freed, and for ever by the one
	// that shuts the library down.
	using sync.RWMutex

	mu      sync.Mutex
	handles map[string]*handle // by PCI address
	// addresses are by index, to identify a GPU that no longer answers.
	addresses map[int]string
	// profiles are the MIG profiles that each GPU had, by PCI address.
	profiles map[string][]gpu.Profile
}

// guarded makes a call if the session still lasts and the library has the function.
func guarded[T any](lib *library, function string, f func() (T, nvml.Return)) (none T, _ nvml.Return) {
	if !lib.using.TryRLock() {
		return none, nvml.ERROR_UNINITIALIZED
	}
	defer lib.using.RUnlock()
	if lib.Extensions().LookupSymbol(function) != nil {
		return none, nvml.ERROR_FUNCTION_NOT_FOUND
	}
	return f()
}

// ErrRestartRequired means that this process has loaded the library of another driver
// version than the installed one, and cannot load a second one.
var ErrRestartRequired = errors.New("the process must be restarted to use the installed driver")

// oldest is the first driver that has all that is needed to use a GPU.
const oldest = 525

func checkVersion(lib nvml.Interface) error {
	version, _ := lib.SystemGetDriverVersion() // whatever fails here fails again, and says so
	branch, _, _ := strings.Cut(version, ".")
	if number, err := strconv.Atoi(branch); err == nil && number < oldest {
		return fmt.Errorf("the driver is %s, R%d or newer is needed: %w", version, oldest, gpu.ErrNotSupported)
	}
	return nil
}

// bound is the version of the first library that this process loaded. The dynamic linker resolves
// each function of the bindings once, to that library, and never unloads it: a
// library that is loaded from another path later is never called (measured with
// glibc 2.36 and go-nvml 0.13.4). So a driver upgrade needs a new process.
var bound atomic.Pointer[string]

// checkBound fails if path is the library of another driver version than the bound
// one. Files without a version in their name pass.
func checkBound(path string) error {
	was, is := bound.Load(), libraryVersion(path)
	if was == nil || *was == "" || is == "" || *was == is {
		return nil
	}
	return fmt.Errorf("the NVML library is %s now, this process has loaded %s: %w", is, *was, ErrRestartRequired)
}

// libraryVersion returns "580.95.05" for libnvidia-ml.so.580.95.05, following links,
// and "" if the name has no version.
func libraryVersion(path string) string {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	_, version, _ := strings.Cut(filepath.Base(path), ".so.")
	if !strings.Contains(version, ".") {
		return "" // ".so.1" is the name of the interface
	}
	return version
}
