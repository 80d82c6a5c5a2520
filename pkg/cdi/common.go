// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/host"
)

// void keeps the older NVIDIA runtime, where it is a node's default, from adding
// every GPU to a container that asks for none by variable.
const void = "NVIDIA_VISIBLE_DEVICES=void"

// requiredNodes are those without which no CUDA program runs. nvcdi leaves out
// what is missing and only logs it.
var requiredNodes = []string{"/dev/nvidiactl", "/dev/nvidia-uvm"}

// requiredLibraries likewise; the driver's version follows.
var requiredLibraries = []string{"libcuda.so.", "libnvidia-ml.so."}

// commonEdits finds out what every container needs and keeps it until the
// driver changes: it walks the driver's folders, which takes milliseconds at
// best.
type commonEdits struct {
	roots    host.Roots
	discover func(ctx context.Context, version string) (*specs.ContainerEdits, error)

	mu      sync.Mutex
	version string // of the kernel driver, empty while not known
	cached  *specs.ContainerEdits
	key     driverKey
}

// driverKey changes when a driver is installed over or mounted in place of
// another.
type driverKey struct {
	version string
	library string
	device  uint64
	inode   uint64
	seconds int64
}

func newCommonEdits(roots host.Roots, hookPath string) *commonEdits {
	return &commonEdits{
		roots: roots,
		discover: func(ctx context.Context, version string) (*specs.ContainerEdits, error) {
			return discover(ctx, roots, hookPath, version)
		},
	}
}

func (c *commonEdits) setVersion(version string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version = version
}

// get returns edits that the caller may do with as it likes.
func (c *commonEdits) get(ctx context.Context) (specs.ContainerEdits, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key, err := c.driver()
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	if c.cached == nil || c.key != key {
		found, err := c.discover(ctx, key.version)
		if err != nil {
			return specs.ContainerEdits{}, fmt.Errorf("find the NVIDIA driver's files in %s: %w", c.roots.Driver, err)
		}
		edits := clone(found)
		c.arrange(&edits)
		if err := c.complete(&edits, key.version); err != nil {
			return specs.ContainerEdits{}, err
		}
		c.cached, c.key = &edits, key
	}
	return clone(c.cached), nil
}

func (c *commonEdits) driver() (driverKey, error) {
	library, err := c.roots.LibraryPath()
	if err != nil {
		return driverKey{}, err
	}
	library, err = filepath.EvalSymlinks(library)
	if err != nil {
		return driverKey{}, fmt.Errorf("NVML library: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(library, &st); err != nil {
		return driverKey{}, fmt.Errorf("NVML library %s: %w", library, err)
	}
	key := driverKey{version: c.version, library: library, device: st.Dev, inode: st.Ino, seconds: st.Mtim.Sec}
	if key.version == "" {
		_, key.version, _ = strings.Cut(filepath.Base(library), "libnvidia-ml.so.")
	}
	return key, nil
}

// arrange gives the edits a fixed order, this project's host paths, and explicit
// device types.
func (c *commonEdits) arrange(e *specs.ContainerEdits) {
	for _, node := range e.DeviceNodes {
		node.Type = "c"
		node.HostPath = rebase(cmp.Or(node.HostPath, node.Path), c.roots.Dev, c.roots.HostDev)
		if node.HostPath == node.Path {
			node.HostPath = ""
		}
	}
	for _, mount := range e.Mounts {
		mount.HostPath = rebase(mount.HostPath, c.roots.Driver, c.roots.HostDriver)
	}
	slices.SortFunc(e.DeviceNodes, func(a, b *specs.DeviceNode) int { return cmp.Compare(a.Path, b.Path) })
	slices.SortFunc(e.Mounts, func(a, b *specs.Mount) int { return cmp.Compare(a.ContainerPath, b.ContainerPath) })

	// The order of hooks matters and is nvcdi's.
	env := slices.DeleteFunc(e.Env, func(v string) bool { return strings.HasPrefix(v, "NVIDIA_VISIBLE_DEVICES=") })
	e.Env = slices.Compact(slices.Sorted(slices.Values(append(env, void))))
}

// rebase swaps the root that this process sees for the runtime's. Paths outside
// of it stay.
func rebase(file, from, to string) string {
	relative, err := filepath.Rel(from, file)
	if err != nil || relative == ".." || strings.HasPrefix(relative, "../") {
		return file
	}
	return filepath.Join(to, relative)
}

// complete refuses edits with which containers would start and find no GPU.
func (c *commonEdits) complete(e *specs.ContainerEdits, version string) error {
	var missing []error
	for _, want := range requiredNodes {
		if slices.ContainsFunc(e.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == want }) {
			continue
		}
		err := fmt.Errorf("the device node %s is missing in %s", want, c.roots.Dev)
		if want == "/dev/nvidia-uvm" {
			err = fmt.Errorf("%w: load the nvidia-uvm kernel module (nvidia-modprobe -u -c=0)", err)
		}
		missing = append(missing, err)
	}
	for _, want := range requiredLibraries {
		want += version
		if !slices.ContainsFunc(e.Mounts, func(m *specs.Mount) bool { return path.Base(m.ContainerPath) == want }) {
			missing = append(missing, fmt.Errorf("the library %s is missing in driver root %s", want, c.roots.Driver))
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the NVIDIA driver is incomplete on this node: %w", errors.Join(missing...))
	}
	return nil
}

// discover asks nvcdi. IPC discovery is off because it would mount the host's
// /tmp/nvidia-mps, and with it an MPS daemon that is none of the claim's.
func discover(ctx context.Context, roots host.Roots, hookPath, version string) (*specs.ContainerEdits, error) {
	if _, err := os.Stat(roots.Driver); err != nil {
		return nil, err
	}
	lib, err := nvcdi.New(
		nvcdi.WithLogger(toolkitLogger{klog.FromContext(ctx)}),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(knownVersion{version: version}),
		nvcdi.WithDriverRoot(roots.Driver),
		nvcdi.WithDevRoot(roots.Dev),
		nvcdi.WithNVIDIACDIHookPath(hookPath),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableIPCDiscoverer, nvcdi.FeatureDisableNvsandboxUtils),
	)
	if err != nil {
		return nil, err
	}
	edits, err := lib.GetCommonEdits()
	if err != nil {
		return nil, err
	}
	return edits.ContainerEdits, nil
}

// knownVersion answers the one thing that nvcdi asks of NVML. NVML itself must not
// be asked here: nvcdi would start it on all GPUs, and one that hangs would hold
// up the claims of all others, without end.
type knownVersion struct {
	nvml.Interface
	version string
}

func (v knownVersion) Init() nvml.Return                             { return nvml.SUCCESS }
func (v knownVersion) Shutdown() nvml.Return                         { return nvml.SUCCESS }
func (v knownVersion) SystemGetDriverVersion() (string, nvml.Return) { return v.version, nvml.SUCCESS }

// toolkitLogger passes on what nvcdi has to say. It warns about every optional
// file that a driver does not have.
type toolkitLogger struct{ log klog.Logger }

func (l toolkitLogger) Tracef(format string, args ...any) { l.print(7, format, args) }
func (l toolkitLogger) Debugf(format string, args ...any) { l.print(6, format, args) }
func (l toolkitLogger) Infof(format string, args ...any)  { l.print(5, format, args) }
func (l toolkitLogger) Warningf(format string, args ...any) {
	l.print(5, format, args)
}
func (l toolkitLogger) Errorf(format string, args ...any) { l.print(2, format, args) }

func (l toolkitLogger) print(level int, format string, args []any) {
	if l.log.V(level).Enabled() {
		l.log.V(level).Info("nvcdi: " + fmt.Sprintf(format, args...))
	}
}
