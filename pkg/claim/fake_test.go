// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/partition"
)

// box is a machine: what outlives a plugin that is killed. It is hardware, CDI
// folder and file system at once, and the place where tests break things.
type box struct {
	t    testing.TB
	root string

	mu        sync.Mutex
	instances map[partition.Address]*instance
	enabled   map[string]bool
	nextID    int
	specs     map[types.UID][]cdi.Device
	effects   []string
	// before and after are called around each effect, with no lock held. An
	// error of before keeps the effect from happening; an error of after hides
	// that it has. Either may panic: that is how a plugin is killed.
	before, after func(effect string) error
}

type instance struct {
	partition.Live
	complete bool
}

// killed is what a test panics with to end a plugin.
type killed struct{}

// memoryDir is a temporary folder in memory where there is such: thousands of
// fsyncs on a busy disk take minutes and show nothing.
func memoryDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "partage-claim-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func newBox(t testing.TB) *box {
	t.Helper()
	b := &box{
		t: t, root: memoryDir(t), nextID: 7,
		instances: map[partition.Address]*instance{}, enabled: map[string]bool{}, specs: map[types.UID][]cdi.Device{},
	}
	b.put("proc/devices", "Character devices:\n195 nvidia\n508 nvidia-caps\n")
	b.boot("boot-1")
	for minor := range 3 {
		// Device nodes of NVIDIA's take root to make, so that they are all links to
		// one that is there on every Linux machine, 1:3.
		path := filepath.Join(b.root, "dev", "nvidia"+strconv.Itoa(minor))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink("/dev/null", path)); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func (b *box) put(path, content string) {
	full := filepath.Join(b.root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, []byte(content), 0o644)); err != nil {
		b.t.Fatal(err)
	}
}

// boot starts the machine anew: instances, MIG mode and specs are gone.
func (b *box) boot(id string) {
	b.put("proc/sys/kernel/random/boot_id", id+"\n")
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.instances)
	clear(b.enabled)
	clear(b.specs)
	if err := os.RemoveAll(b.capabilities("")); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) capabilities(path string) string {
	return filepath.Join(b.root, "proc/driver/nvidia/capabilities", path)
}

func (b *box) roots() host.Roots {
	return host.Roots{Driver: b.root, Dev: b.root, Proc: filepath.Join(b.root, "proc"), Sys: filepath.Join(b.root, "sys"),
		HostDriver: "/", HostDev: "/host"}
}

func (b *box) dataDir() string { return filepath.Join(b.root, "data") }

// manager starts a plugin on the machine.
func (b *box) manager() *Manager {
	b.t.Helper()
	m := b.bareManager()
	m.SetInventory(testInventory(b.t))
	return m
}

// bareManager starts a plugin that has found no GPUs yet.
func (b *box) bareManager() *Manager {
	b.t.Helper()
	m, err := NewManager(Options{
		DriverName: driverName, PoolName: poolName, DataDir: b.dataDir(), Roots: b.roots(), Partitions: b, CDI: b,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	m.journal.replace = func(path string, data []byte, mode fs.FileMode) error {
		return b.effect("write "+stateIn(data), func() error { return host.ReplaceFile(path, data, mode) })
	}
	m.journal.remove = func(path string) error {
		return b.effect("delete record", func() error { return host.RemoveFile(path) })
	}
	return m
}

func stateIn(data []byte) string {
	for _, s := range []State{Preparing, Prepared, Unpreparing} {
		if strings.Contains(string(data), `"state": "`+string(s)+`"`) {
			return string(s)
		}
	}
	return "unknown state"
}

// effect does something that outlives the plugin.
func (b *box) effect(name string, do func() error) error {
	b.mu.Lock()
	before, after := b.before, b.after
	b.mu.Unlock()
	if before != nil {
		if err := before(name); err != nil {
			return err
		}
	}
	b.mu.Lock()
	b.effects = append(b.effects, name)
	err := do()
	b.mu.Unlock()
	if err == nil && after != nil {
		return after(name)
	}
	return err
}

func (b *box) hooks(before, after func(effect string) error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.before, b.after, b.effects = before, after, nil
}

func (b *box) Find(_ context.Context, at partition.Address) (partition.Live, bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := b.instances[at]; i != nil && i.complete {
		return i.Live, true, nil
	}
	return partition.Live{}, false, nil
}

func (b *box) Create(_ context.Context, at partition.Address, dynamic bool) (partition.Live, error) {
	b.mu.Lock()
	on := b.enabled[at.PCIAddress]
	i := b.instances[at]
	b.mu.Unlock()
	if !on {
		if !dynamic {
			return partition.Live{}, gpu.ErrNotSupported
		}
		if err := b.effect("mode on", func() error { b.enabled[at.PCIAddress] = true; return nil }); err != nil {
			return partition.Live{}, err
		}
	}
	if i == nil {
		if err := b.effect("create instance", func() error { return b.place(at) }); err != nil {
			return partition.Live{}, err
		}
	}
	b.mu.Lock()
	i = b.instances[at]
	complete := i.complete
	b.mu.Unlock()
	if !complete {
		if err := b.effect("create compute instance", func() error { return b.complete(at, i) }); err != nil {
			return partition.Live{}, err
		}
	}
	return i.Live, nil
}

func (b *box) place(at partition.Address) error {
	for other := range b.instances {
		if other.PCIAddress == at.PCIAddress && other.Placement.Overlaps(at.Placement) {
			return gpu.ErrNoRoom
		}
	}
	b.instances[at] = &instance{Live: partition.Live{InstanceID: b.nextID}}
	b.nextID++
	return nil
}

func (b *box) complete(at partition.Address, i *instance) error {
	i.complete = true
	i.UUID = fmt.Sprintf("MIG-%d", b.nextID)
	b.nextID++
	b.put(b.capability(at, i, "access"), "DeviceFileMinor: "+strconv.Itoa(100+10*i.InstanceID)+"\n")
	b.put(b.capability(at, i, "ci0/access"), "DeviceFileMinor: "+strconv.Itoa(101+10*i.InstanceID)+"\n")
	return nil
}

func (b *box) capability(at partition.Address, i *instance, file string) string {
	minor := slices.IndexFunc([]string{pciB, pciC, pciA}, func(pci string) bool { return pci == at.PCIAddress })
	return fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi%d/%s", minor, i.InstanceID, file)
}

func (b *box) Destroy(_ context.Context, at partition.Address, dynamic bool) error {
	b.mu.Lock()
	i, on := b.instances[at], b.enabled[at.PCIAddress]
	b.mu.Unlock()
	if i != nil {
		err := b.effect("destroy instance", func() error {
			delete(b.instances, at)
			return os.RemoveAll(filepath.Join(b.root, filepath.Dir(b.capability(at, i, "access"))))
		})
		if err != nil {
			return err
		}
	}
	if dynamic && on && b.count(at.PCIAddress) == 0 {
		return b.effect("mode off", func() error { b.enabled[at.PCIAddress] = false; return nil })
	}
	return nil
}

func (b *box) count(pciAddress string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for at := range b.instances {
		if at.PCIAddress == pciAddress {
			n++
		}
	}
	return n
}

func (b *box) EnsureWhole(_ context.Context, pciAddress string, _ bool) error {
	if b.count(pciAddress) > 0 {
		return gpu.ErrInUse
	}
	return b.effect("ensure whole", func() error { b.enabled[pciAddress] = false; return nil })
}

func (b *box) Write(_ context.Context, uid types.UID, devices []cdi.Device) (map[string]string, error) {
	ids := map[string]string{}
	for _, d := range devices {
		ids[d.Name] = "k8s.gpu.nvidia.com/claim=" + string(uid) + "-" + d.Name
	}
	err := b.effect("write spec", func() error { b.specs[uid] = devices; return nil })
	if err != nil {
		return nil, err
	}
	return ids, nil
}

func (b *box) Remove(uid types.UID) error {
	return b.effect("remove spec", func() error { delete(b.specs, uid); return nil })
}

// state is everything that a claim leaves anywhere.
func (b *box) state() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []string
	for at, i := range b.instances {
		all = append(all, fmt.Sprintf("instance %s complete=%v", at, i.complete))
	}
	for pciAddress, on := range b.enabled {
		if on {
			all = append(all, "MIG mode of "+pciAddress)
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(b.specs)) {
		all = append(all, "spec of "+string(uid))
	}
	for _, folder := range []string{"claims", "locks"} {
		entries, err := os.ReadDir(filepath.Join(b.dataDir(), folder))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			b.t.Fatal(err)
		}
		for _, entry := range entries {
			if !strings.HasPrefix(entry.Name(), "gpu-") {
				all = append(all, folder+"/"+entry.Name())
			}
		}
	}
	slices.Sort(all)
	return all
}

func (b *box) wantNothing() {
	b.t.Helper()
	if left := b.state(); len(left) > 0 {
		b.t.Errorf("left behind: %v", left)
	}
}

// kill runs f and tells whether it was killed.
func kill(f func()) (was bool) {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(killed); !ok {
				panic(r)
			}
			was = true
		}
	}()
	f()
	return false
}
