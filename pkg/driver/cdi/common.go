// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
)

// void keeps NVIDIA's older runtime, where that is the default of a node, from adding
// all GPUs to a container that does not set the variable.
const void = "NVIDIA_VISIBLE_DEVICES=void"

// controlNodes are those that nvcdi wants.
var controlNodes = [...]string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}

// requiredLibraries are those without which no CUDA program runs; the driver's version
// follows. nvcdi only logs that one is missing.
var requiredLibraries = []string{"libcuda.so.", "libnvidia-ml.so."}

// maxAge is how long common edits are kept at most, and so how late a change is noticed
// that is neither among the driver's libraries nor the control nodes.
const maxAge = time.Minute

// commonEdits finds what every container needs. A discovery walks the driver's folders,
// which takes milliseconds at best, so its result is kept; but never for long, and only
// if two discoveries agree: while a driver is being installed each finds more files, and
// nothing marks the last one.
type commonEdits struct {
	roots    host.Roots
	clock    clock.PassiveClock
	discover func(ctx context.Context, version string, dev host.DevRoot) (*specs.ContainerEdits, error)
	// queue is that of reads of the driver's folder, which may be on a network: they are made one after the other.
	queue *call.Queue

	// mu is not held during a read.
	mu      sync.Mutex
	version string // of the kernel driver, empty while not known
	cached  discovery
}

// discovery is what was found, and when.
type discovery struct {
	edits *specs.ContainerEdits
	key   driverKey
	at    time.Time
	// confirmed means that the discovery before found the same.
	confirmed bool
}

// driverKey changes when a driver is installed over or mounted in place of another,
// when a file comes to or goes from the folder of its libraries, and when its kernel
// modules are loaded again.
type driverKey struct {
	version string
	library file
	folder  file
	dev     host.DevRoot
	nodes   [len(controlNodes)]uint64 // device numbers
}

// file identifies a version of a file or folder. The time of its change is set by the
// kernel; installers may set that of the content.
type file struct {
	path          string
	device, inode uint64
	changed       unix.Timespec
}

func newCommonEdits(roots host.Roots, hookPath string, calls *call.Queues) *commonEdits {
	return &commonEdits{
		roots: roots,
		clock: clock.RealClock{},
		queue: calls.Of("", call.DriverFiles),
		discover: func(ctx context.Context, version string, dev host.DevRoot) (*specs.ContainerEdits, error) {
			return discover(ctx, roots, dev, hookPath, version)
		},
	}
}

func (c *commonEdits) setVersion(version string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version = version
}

// get returns edits that others have, too: nobody changes them.
func (c *commonEdits) get(ctx context.Context) (specs.ContainerEdits, error) {
	return call.Read(ctx, c.queue, "read the NVIDIA driver's files in "+c.roots.Driver, func() (specs.ContainerEdits, error) {
		// It may take effect for the next one, for whom ctx is not over.
		return c.edits(context.WithoutCancel(ctx))
	})
}

func (c *commonEdits) edits(ctx context.Context) (specs.ContainerEdits, error) {
	c.mu.Lock()
	version, last := c.version, c.cached
	c.mu.Unlock()
	// Taken before the discovery, so that a change during it makes another key.
	key, err := c.driverKey(version)
	if err != nil {
		return specs.ContainerEdits{}, err
	}
	now := c.clock.Now()
	if !last.confirmed || last.key != key || now.Sub(last.at) >= maxAge {
		edits, err := c.find(ctx, key)
		if err != nil {
			return specs.ContainerEdits{}, err
		}
		if last.key.dev != key.dev { // as when a driver container comes up
			klog.FromContext(ctx).Info("Containers get the device nodes of this folder now",
				"folder", key.dev.Folder(), "rootBefore", last.key.dev.OnHost)
		}
		same := last.key == key && reflect.DeepEqual(last.edits, edits)
		last = discovery{edits: edits, key: key, at: now, confirmed: same}
		c.mu.Lock()
		c.cached = last
		c.mu.Unlock()
	}
	return *last.edits, nil
}

// find returns what is there now, as it is to be in specs.
func (c *commonEdits) find(ctx context.Context, key driverKey) (*specs.ContainerEdits, error) {
	found, err := c.discover(ctx, key.version, key.dev)
	if err != nil {
		return nil, fmt.Errorf("find the NVIDIA driver's files in %s: %w", c.roots.Driver, err)
	}
	c.normalize(found, key.dev)
	if err := c.checkComplete(found, key); err != nil {
		return nil, err
	}
	return found, nil
}

func (c *commonEdits) driverKey(version string) (driverKey, error) {
	path, err := c.roots.LibraryPath()
	if err != nil {
		return driverKey{}, err
	}
	key := driverKey{version: version, dev: c.roots.DevRoot()}
	if key.library, err = stat(path); err != nil {
		return driverKey{}, fmt.Errorf("NVML library: %w", err)
	}
	if key.folder, err = stat(filepath.Dir(path)); err != nil {
		return driverKey{}, fmt.Errorf("folder of the NVML library: %w", err)
	}
	for i, node := range controlNodes {
		// A missing node has the number 0. checkComplete decides whether it is needed.
		if major, minor, err := c.roots.CharDevice(node); err == nil {
			key.nodes[i] = unix.Mkdev(uint32(major), uint32(minor))
		}
	}
	if key.version == "" {
		_, key.version, _ = strings.Cut(filepath.Base(path), "libnvidia-ml.so.")
	}
	return key, nil
}

func stat(path string) (file, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return file{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return file{path: path, device: st.Dev, inode: st.Ino, changed: st.Ctim}, nil
}

// normalize puts the edits into a fixed order, gives them the host's paths and explicit
// device types, and confines their hooks.
func (c *commonEdits) normalize(e *specs.ContainerEdits, dev host.DevRoot) {
	for _, node := range e.DeviceNodes {
		node.Type = "c"
		node.HostPath = rebase(cmp.Or(node.HostPath, node.Path), dev.Path, dev.OnHost)
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
	for _, hook := range e.Hooks {
		confine(hook)
	}
	env := slices.DeleteFunc(e.Env, func(v string) bool { return strings.HasPrefix(v, "NVIDIA_VISIBLE_DEVICES=") })
	e.Env = slices.Compact(slices.Sorted(slices.Values(append(env, void))))
}

// rebase replaces the root that this process sees with the runtime's. It leaves paths
// outside of the root alone.
func rebase(file, from, to string) string {
	relative, err := filepath.Rel(from, file)
	if err != nil || relative == ".." || strings.HasPrefix(relative, "../") {
		return file
	}
	return filepath.Join(to, relative)
}

// checkComplete refuses edits with which containers would start and find no GPU.
func (c *commonEdits) checkComplete(e *specs.ContainerEdits, key driverKey) error {
	var missing []error
	for _, want := range host.RequiredNodes() {
		if slices.ContainsFunc(e.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == want }) {
			continue
		}
		// It says where a node would be, and what makes it.
		_, err := c.roots.Node(want)
		if err == nil {
			err = fmt.Errorf("the device node %s is not in %s, where the others are", path.Base(want), key.dev.Folder())
		}
		missing = append(missing, err)
	}
	for _, want := range requiredLibraries {
		want += key.version
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
// /tmp/nvidia-mps, and with it an MPS daemon that has nothing to do with the claim.
func discover(ctx context.Context, roots host.Roots, dev host.DevRoot, hookPath, version string) (*specs.ContainerEdits, error) {
	if _, err := os.Stat(roots.Driver); err != nil {
		return nil, err
	}
	options := []nvcdi.Option{
		nvcdi.WithLogger(toolkitLogger{klog.FromContext(ctx)}),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(knownVersion{version: version}),
		nvcdi.WithDriverRoot(roots.Driver),
		nvcdi.WithDevRoot(dev.Path),
		nvcdi.WithNVIDIACDIHookPath(hookPath),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableIPCDiscoverer, nvcdi.FeatureDisableNvsandboxUtils),
	}
	if folder := roots.UnusualLibraryFolder(); folder != "" {
		options = append(options, nvcdi.WithLibrarySearchPaths([]string{filepath.Join(roots.Driver, folder)}))
	}
	lib, err := nvcdi.New(options...)
	if err != nil {
		return nil, err
	}
	edits, err := lib.GetCommonEdits()
	if err != nil {
		return nil, err
	}
	return edits.ContainerEdits, nil
}

// knownVersion is an NVML for nvcdi that answers the only question it asks. With the
// real one, nvcdi would initialize all GPUs, and one that hangs would block the claims
// of all others for ever.
type knownVersion struct {
	nvml.Interface
	version string
}

func (v knownVersion) Init() nvml.Return                             { return nvml.SUCCESS }
func (v knownVersion) Shutdown() nvml.Return                         { return nvml.SUCCESS }
func (v knownVersion) SystemGetDriverVersion() (string, nvml.Return) { return v.version, nvml.SUCCESS }

// toolkitLogger passes on the messages of nvcdi. Warnings are demoted: there is one for
// every optional file that a driver does not have.
type toolkitLogger struct{ log klog.Logger }

func (l toolkitLogger) Tracef(format string, args ...any)   { l.print(7, format, args) }
func (l toolkitLogger) Debugf(format string, args ...any)   { l.print(6, format, args) }
func (l toolkitLogger) Infof(format string, args ...any)    { l.print(5, format, args) }
func (l toolkitLogger) Warningf(format string, args ...any) { l.print(5, format, args) }
func (l toolkitLogger) Errorf(format string, args ...any)   { l.print(2, format, args) }

func (l toolkitLogger) print(level int, format string, args []any) {
	if l.log.V(level).Enabled() {
		l.log.V(level).Info("nvcdi: " + fmt.Sprintf(format, args...))
	}
}
