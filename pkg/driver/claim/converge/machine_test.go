// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/claim/spec"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/policy"
)

const (
	pciA = "0000:1b:00.0"
	pciB = "0000:3b:00.0"
	boot = "boot-1"
)

var errKilled = errors.New("the process was killed")

// everything is due.
func everything(*rules.Task) bool { return true }

// machine is what outlives a process that is killed: GPUs, the MPS supervisor, CDI specs and the disk.
type machine struct {
	t    *testing.T
	root string

	mu        sync.Mutex
	now       time.Duration
	modes     map[string]bool
	instances map[string][]gpu.Instance
	nextID    int
	exclusive map[string]bool
	sessions  map[string]mps.Spec
	intervals map[string]sharing.Interval
	// noMode is what the driver says of compute modes.
	noMode bool
	specs  map[types.UID][]cdi.Device
	users  map[string]string
	// listed is called once, when the CDI specs were listed.
	listed func()
	// fail is asked before each effect.
	fail func(effect string) error
	// struck is the effect that failed.
	struck  string
	effects []string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	root, err := os.MkdirTemp("/dev/shm", "partage-converge-")
	if err != nil {
		root = t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	m := &machine{
		t: t, root: root, nextID: 7, modes: map[string]bool{}, instances: map[string][]gpu.Instance{}, exclusive: map[string]bool{},
		sessions: map[string]mps.Spec{}, intervals: map[string]sharing.Interval{}, specs: map[types.UID][]cdi.Device{}, users: map[string]string{},
	}
	m.put("proc/devices", "Character devices:\n195 nvidia\n508 nvidia-caps\n")
	for minor, address := range []string{pciA, pciB} {
		m.put("proc/driver/nvidia/gpus/"+address+"/information", fmt.Sprintf("Device Minor: \t %d\n", minor))
		path := filepath.Join(root, "dev", fmt.Sprintf("nvidia%d", minor))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink("/dev/null", path)); err != nil {
			t.Fatal(err)
		}
		for id := range 40 {
			folder := fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi%d/", minor, id)
			m.put(folder+"access", fmt.Sprintf("DeviceFileMinor: %d\n", 100+10*id))
			m.put(folder+"ci0/access", fmt.Sprintf("DeviceFileMinor: %d\n", 101+10*id))
		}
	}
	return m
}

func (m *machine) put(path, content string) {
	full := filepath.Join(m.root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, []byte(content), 0o600)); err != nil {
		m.t.Fatal(err)
	}
}

// engine is a new process.
func (m *machine) engine() *Engine {
	m.t.Helper()
	store, err := record.Open(m.root, boot, disk{m})
	if err != nil {
		m.t.Fatal(err)
	}
	locks, err := lock.New(m.root, call.New(0))
	if err != nil {
		m.t.Fatal(err)
	}
	roots := host.Roots{Driver: m.root, Dev: m.root, Proc: filepath.Join(m.root, "proc"), HostDriver: "/", HostDev: "/host"}
	return &Engine{
		Store: store, Locks: locks, Partitions: hardware{m}, Sharing: hardware{m}, Users: hardware{m},
		Specs:     &spec.Specs{CDI: hardware{m}, Roots: roots, Hook: "/hook", LimitsDir: filepath.Join(m.root, "limits"), Unmount: os.RemoveAll},
		Warn:      func(context.Context, record.Ref, string, string) {},
		Shareable: func(string) bool { return true }, Recheck: func(types.UID) {},
		Clock: m.clock, GPU: func(pciAddress string) *gpu.GPU { return &gpu.GPU{UUID: "GPU-" + pciAddress} }, GPUs: func() []string { return []string{pciA, pciB} },
	}
}

func (m *machine) clock() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now++
	return m.now
}

// effect does something that outlives the process.
func (m *machine) effect(name string, do func() error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		if err := m.fail(name); err != nil {
			return err
		}
	}
	m.effects = append(m.effects, name)
	return do()
}

// strike makes a new process that fails at its nth effect, and dies with it where dies says so.
func (m *machine) strike(n int, dies bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	count, over := 0, false
	m.effects = nil
	m.struck = ""
	m.fail = func(effect string) error {
		count++
		if count == n || over {
			over = dies
			m.struck = cmp.Or(m.struck, effect)
			return errKilled
		}
		return nil
	}
}

func (m *machine) heal() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = nil
}

// left is everything that claims have left, except for tombstones.
func (m *machine) left() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []string
	for address, instances := range m.instances {
		for _, i := range instances {
			all = append(all, fmt.Sprintf("instance %d of %s complete=%t", i.Placement.Start, address, len(i.Compute) == 1))
		}
	}
	for id, s := range m.sessions {
		all = append(all, fmt.Sprintf("session %s %d%%", id, s.ThreadPercentage))
	}
	for address, on := range m.modes {
		if on {
			all = append(all, "MIG mode of "+address)
		}
	}
	for address, on := range m.exclusive {
		if on {
			all = append(all, "exclusive mode of "+address)
		}
	}
	for address, interval := range m.intervals {
		all = append(all, "interval "+string(interval)+" of "+address)
	}
	for uid := range m.specs {
		all = append(all, "spec of "+string(uid))
	}
	store, err := record.Open(m.root, boot, record.OS{})
	if err != nil {
		m.t.Fatal(err)
	}
	records := store.Snapshot()
	for _, r := range records.Records {
		all = append(all, "record of "+string(r.Claim.UID))
	}
	for _, g := range records.Guards {
		all = append(all, "guard "+g.Path)
	}
	slices.Sort(all)
	return all
}

func (m *machine) hasSpec(uid types.UID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, found := m.specs[uid]
	return found
}

// disk are the files of records.
type disk struct{ *machine }

func (d disk) Replace(path string, data []byte) error {
	return d.effect("replace", func() error { return record.OS{}.Replace(path, data) })
}

func (d disk) WriteHead(path string, data []byte) error {
	return d.effect("write head", func() error { return record.OS{}.WriteHead(path, data) })
}

func (d disk) Remove(path string) error {
	return d.effect("remove", func() error { return record.OS{}.Remove(path) })
}

// hardware is the machine as an engine reaches it.
type hardware struct{ *machine }

func (h hardware) State(_ context.Context, pciAddress string) (gpu.MIGState, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := gpu.MIGState{Enabled: h.modes[pciAddress], Instances: slices.Clone(h.instances[pciAddress])}
	for i := range state.Instances {
		state.Instances[i].Compute = slices.Clone(state.Instances[i].Compute)
	}
	return state, nil
}

func (h hardware) SetMode(_ context.Context, pciAddress string, on bool) error {
	return h.effect("mode", func() error {
		if len(h.instances[pciAddress]) > 0 {
			return &partition.RefusedError{Err: gpu.ErrInUse}
		}
		h.modes[pciAddress] = on
		return nil
	})
}

func (h hardware) CreateInstance(_ context.Context, at partition.Address) (id int, err error) {
	err = h.effect("create instance", func() error {
		switch {
		case !h.modes[at.PCIAddress]:
			return &partition.RefusedError{Err: gpu.ErrNotSupported}
		case h.users[at.PCIAddress] != "" && len(h.instances[at.PCIAddress]) == 0:
			return &partition.RefusedError{Err: fmt.Errorf("held by somebody: %w", gpu.ErrInUse)}
		case partition.Instance(gpu.MIGState{Instances: h.instances[at.PCIAddress]}, at) != nil:
			return &partition.RefusedError{Err: gpu.ErrNoRoom}
		}
		id = h.nextID
		h.nextID++
		h.instances[at.PCIAddress] = append(h.instances[at.PCIAddress], gpu.Instance{ID: id, ProfileID: at.ProfileID, Placement: at.Placement})
		return nil
	})
	return id, err
}

func (hardware) Holders(context.Context, string) string                   { return "somebody" }
func (hardware) Processes(context.Context, string) ([]gpu.Process, error) { return nil, nil }

func (h hardware) index(pciAddress string, id int) int {
	return slices.IndexFunc(h.instances[pciAddress], func(i gpu.Instance) bool { return i.ID == id })
}

func (h hardware) CreateCompute(_ context.Context, pciAddress string, id int) (live partition.Live, err error) {
	err = h.effect("create compute", func() error {
		at := h.index(pciAddress, id)
		if at < 0 {
			return gpu.ErrNotFound
		}
		i := &h.instances[pciAddress][at]
		i.Compute = []gpu.ComputeInstance{{UUID: fmt.Sprintf("MIG-%s-%d", pciAddress, i.Placement.Start)}}
		live = partition.Live{InstanceID: id, UUID: i.Compute[0].UUID}
		return nil
	})
	return live, err
}

func (h hardware) DestroyCompute(_ context.Context, pciAddress string, id, _ int) error {
	return h.effect("destroy compute", func() error {
		if at := h.index(pciAddress, id); at >= 0 {
			h.instances[pciAddress][at].Compute = nil
		}
		return nil
	})
}

func (h hardware) DestroyInstance(_ context.Context, pciAddress string, id int) error {
	return h.effect("destroy instance", func() error {
		at := h.index(pciAddress, id)
		if at >= 0 && len(h.instances[pciAddress][at].Compute) > 0 {
			return gpu.ErrInUse
		}
		if at >= 0 {
			h.instances[pciAddress] = slices.Delete(h.instances[pciAddress], at, at+1)
		}
		return nil
	})
}

func (hardware) FabricPending(context.Context, string) (string, error) { return "", nil }

func (h hardware) Sessions(context.Context) (map[string]mps.Status, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := map[string]mps.Status{}
	for id, s := range h.sessions {
		all[id] = mps.Status{Spec: s, Phase: mps.Running, PipeDir: "/mps/" + id, ShmDir: "/shm/" + id}
	}
	return all, nil
}

func (h hardware) Ensure(_ context.Context, spec mps.Spec, devices []sharing.Device) (mps.Status, error) {
	return mps.Status{PipeDir: "/mps/" + spec.ID, ShmDir: "/shm/" + spec.ID}, h.effect("start session", func() error {
		for _, d := range devices {
			if !h.exclusive[d.PCIAddress] && !h.modes[d.PCIAddress] {
				return errors.New("the compute mode is not EXCLUSIVE_PROCESS")
			}
		}
		h.sessions[spec.ID] = spec
		return nil
	})
}

func (h hardware) End(_ context.Context, id string) error {
	return h.effect("stop session", func() error { delete(h.sessions, id); return nil })
}

func (h hardware) Mode(_ context.Context, d sharing.Device) (gpu.ComputeMode, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.noMode {
		return "", gpu.ErrNotSupported
	}
	if h.exclusive[d.PCIAddress] {
		return gpu.ComputeExclusiveProcess, nil
	}
	return gpu.ComputeDefault, nil
}

func (h hardware) SetExclusive(_ context.Context, d sharing.Device, exclusive bool) error {
	return h.effect("compute mode", func() error { h.exclusive[d.PCIAddress] = exclusive; return nil })
}

func (h hardware) SetInterval(_ context.Context, d sharing.Device, interval sharing.Interval) error {
	return h.effect("interval", func() error {
		h.intervals[d.PCIAddress] = interval
		if interval == policy.IntervalDefault {
			delete(h.intervals, d.PCIAddress)
		}
		return nil
	})
}

func (h hardware) Users(_ context.Context, pciAddress string, _ []*record.Record, _ *record.Record) (string, map[int]string, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.users[pciAddress], nil, ""
}

func (h hardware) Write(_ context.Context, uid types.UID, devices []cdi.Device) (map[string]string, error) {
	ids := map[string]string{}
	for _, d := range devices {
		ids[d.Name] = "k8s.gpu.nvidia.com/claim=" + string(uid) + "-" + d.Name
	}
	return ids, h.effect("write spec", func() error { h.specs[uid] = devices; return nil })
}

func (h hardware) Matches(context.Context, types.UID, []cdi.Device) (bool, error) { return true, nil }

func (h hardware) Remove(uid types.UID) error {
	return h.effect("remove spec", func() error { delete(h.specs, uid); return nil })
}

func (h hardware) List() ([]types.UID, error) {
	h.mu.Lock()
	listed := h.listed
	h.listed = nil
	h.mu.Unlock()
	if listed != nil {
		listed()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.specs)), nil
}
