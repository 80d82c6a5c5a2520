// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/spec"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/users"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

// box is a machine in a cluster: what outlives a plugin that is killed. It is
// CDI folder, file system and API server at once, and the place where tests break
// things. Its GPUs are in hardware_test.go.
type box struct {
	t    testing.TB
	root string
	gpus
	shares
	slow slowness

	mu    sync.Mutex
	specs map[types.UID][]cdi.Device
	// gone are the claims that do not exist any more, deallocated those that have no
	// devices.
	gone, deallocated map[types.UID]bool
	clusterErr        error
	// warnings are the events, "uid reason: message".
	warnings []string
	// now is the clock of all plugins.
	now time.Duration
	// dead says that the plugin was killed: nothing that it does has an effect
	// any more. The next plugin lives again.
	dead    bool
	effects []string
	// before and after are called around each effect, with no lock held. An
	// error of before keeps the effect from happening; an error of after hides
	// that it has.
	before, after func(effect string) error
}

var errKilled = errors.New("the plugin was killed")

// memoryDir is a temporary folder in memory where there is such: a busy disk makes
// thousands of tests slow and shows nothing.
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
	b := &box{t: t, root: memoryDir(t), specs: map[types.UID][]cdi.Device{}, gone: map[types.UID]bool{}, deallocated: map[types.UID]bool{}}
	b.gpus = newGPUs(b)
	b.shares = newShares()
	b.slow.turn = make(chan bool, 1)
	b.put("proc/devices", "Character devices:\n195 nvidia\n508 nvidia-caps\n")
	b.boot("boot-1")
	for minor, address := range []string{pciB, pciC, pciA} {
		b.put("proc/driver/nvidia/gpus/"+address+"/information", fmt.Sprintf("Model: \t x\nDevice Minor: \t %d\n", minor))
		// Device nodes of NVIDIA's take root to make, so that they are all links to
		// one that is there on every Linux machine, 1:3.
		path := filepath.Join(b.root, "dev", "nvidia"+strconv.Itoa(minor))
		must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink("/dev/null", path)))
	}
	return b
}

func (b *box) put(path, content string) {
	full := filepath.Join(b.root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.WriteFile(full, []byte(content), 0o644)); err != nil {
		b.t.Fatal(err)
	}
}

// boot starts the machine anew: instances, MIG mode, specs and what is in memory are gone. Somebody
// else makes the foreign partitions again, as a script of the machine would.
func (b *box) boot(id string) {
	b.put("proc/sys/kernel/random/boot_id", id+"\n")
	mounted, err := filepath.Glob(filepath.Join(b.dataDir(), "limits/*/*"))
	for _, path := range mounted {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil {
		b.t.Fatal(err)
	}
	b.locked(func() { clear(b.specs); b.shares = newShares() })
	b.reset()
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
	m.SetInventory(testInventory(b.t).With(b.foreignStatus()))
	return m
}

// bareManager starts a plugin that has found no GPUs yet.
func (b *box) bareManager() *Manager {
	b.t.Helper()
	m, err := NewManager(b.options())
	if err != nil {
		b.t.Fatal(err)
	}
	b.locked(func() { b.dead = false })
	return m
}

func (b *box) options() Options {
	p := process{b, call.New(1)} // nobody waits for a call that does not return
	partitions := partition.New(slowGPUs{p}, holders{})
	return Options{
		DriverName: driverName, PoolName: poolName, DataDir: b.dataDir(), Roots: b.roots(), Partitions: partitions,
		Sharing: slowSharing{p}, Specs: b.containers(), Users: p.users(partitions.Processes), Calls: p.calls,
		Pods:    func(context.Context, Ref) (string, error) { return "", nil },
		Cluster: b, Events: b,
		files: boxFiles{b}, clock: b.clock,
	}
}

// users finds those of the GPUs: the processes that tests let run are outside of pods.
func (b process) users(list func(context.Context, string) ([]gpu.Process, error)) *users.Users {
	return &users.Users{
		Finder: &holder.Finder{Roots: b.roots(), Proc: filepath.Join(b.root, "proc")},
		List:   list,
		Servers: func(ctx context.Context) ([]int, error) {
			sessions, err := slowSharing{b}.Sessions(ctx)
			var servers []int
			for id := range sessions {
				servers = append(servers, sessions[id].Servers...)
			}
			return servers, err
		},
		Clock: b.clock,
	}
}

// boxFiles are the files of records.
type boxFiles struct{ *box }

func (f boxFiles) Replace(path string, data []byte) error {
	return f.effect("write "+stateIn(data), func() error { return record.OS{}.Replace(path, data) })
}

func (f boxFiles) WriteHead(path string, data []byte) error {
	return f.effect("mark "+stateIn(data), func() error { return record.OS{}.WriteHead(path, data) })
}

func (f boxFiles) Remove(path string) error {
	return f.effect("delete record", func() error { return record.OS{}.Remove(path) })
}

// containers get CDI specs, and the folders of an interposer library, without mounts.
func (b *box) containers() spec.Specs {
	return spec.Specs{
		CDI: slowFolder{b}, Hook: "/data/partage-hook", Interposer: "/opt/limits/libvgpu.so",
		Mount: func(path string, _ int64) error {
			return b.effect("mount limits", func() error { return os.MkdirAll(path, 0o755) })
		},
		Unmount: func(path string) error {
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return b.effect("remove limits", func() error { return os.RemoveAll(path) })
		},
	}
}

// stateIn is the state that the head of a record says, "released" for one that says only when the claim was.
func stateIn(data []byte) string {
	_, state, _ := strings.Cut(string(data), " state=")
	state, _, _ = strings.Cut(state, " ")
	return cmp.Or(state, "unknown state")
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
	if b.dead {
		b.mu.Unlock()
		return errKilled
	}
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

// seen are the effects since the hooks were set.
func (b *box) seen() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.effects)
}

// die is what a hook does to kill the plugin.
func (b *box) die() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dead = true
	return errKilled
}

// killed tells whether the last plugin was killed.
func (b *box) killed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dead
}

// killAt makes a hook that kills the plugin at an effect.
func (b *box) killAt(effect string) func(string) error {
	return func(e string) error {
		if e == effect {
			return b.die()
		}
		return nil
	}
}

// clock never tells the same time twice: a release is younger than what it releases.
func (b *box) clock() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now++
	return b.now
}

func (b *box) pass(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now += d
}

// Claim implements Cluster: a claim that was not deleted has what its record says, unless
// it was deallocated.
func (b *box) Claim(_ context.Context, ref Ref) (*resourceapi.ResourceClaim, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.clusterErr != nil || b.gone[ref.UID] {
		return nil, b.clusterErr
	}
	claim := newClaim(string(ref.UID))
	r, err := b.store().Read(ref.UID)
	if err != nil || r == nil || b.deallocated[ref.UID] {
		claim.Status.Allocation = nil
		return claim, nil // without a record nobody asks
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: d.Requests[0], Driver: driverName, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID})
	}
	return claim, nil
}

// store is that of another process.
func (b *box) store() *record.Store {
	b.t.Helper()
	boot, err := b.roots().BootID()
	if err != nil {
		b.t.Fatal(err)
	}
	store, err := record.Open(b.dataDir(), boot, record.OS{})
	if err != nil {
		b.t.Fatal(err)
	}
	return store
}

func (b *box) deleteClaim(uid types.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone[uid] = true
}

func (b *box) Warn(_ context.Context, claim Ref, reason, message string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.warnings = append(b.warnings, string(claim.UID)+" "+reason+": "+message)
}

// wantStatements fails unless a survey says exactly these of claims, each given by the parts that it contains.
func (b *box) wantStatements(m *Manager, want ...[]string) {
	b.t.Helper()
	survey(b.t.Context(), m)
	var said []string
	for _, s := range m.Statements() {
		said = append(said, string(s.Claim.UID)+" "+s.Reason+": "+s.Device+": "+s.Text)
	}
	slices.Sort(said)
	wantParts(b.t, slices.Compact(said), want)
}

// wantWarnings fails unless there were exactly these events, each given by the
// parts that it contains, and forgets them.
func (b *box) wantWarnings(want ...[]string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	slices.Sort(b.warnings) // claims are independent
	wantParts(b.t, b.warnings, want)
	b.warnings = nil
}

func wantParts(t testing.TB, got []string, want [][]string) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("got %q, want %q", got, want)
	}
	for i := range min(len(want), len(got)) {
		for _, part := range want[i] {
			if !strings.Contains(got[i], part) {
				t.Errorf("%q does not contain %q", got[i], part)
			}
		}
	}
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

// Matches implements spec.CDI.
func (b *box) Matches(_ context.Context, uid types.UID, devices []cdi.Device) (bool, error) {
	return reflect.DeepEqual(b.spec(uid), devices), nil
}

func (b *box) Remove(uid types.UID) error {
	return b.effect("remove spec", func() error { delete(b.specs, uid); return nil })
}

// List implements spec.CDI.
func (b *box) List() ([]types.UID, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.specs)), nil
}

func (b *box) spec(uid types.UID) []cdi.Device {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.specs[uid]
}

// state is everything that a claim leaves anywhere, except for when it was released.
func (b *box) state() []string {
	all := b.hardware()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(b.specs)) {
		all = append(all, "spec of "+string(uid))
	}
	if entries, err := os.ReadDir(filepath.Join(b.dataDir(), "limits")); err == nil {
		for _, entry := range entries {
			if entry.IsDir() {
				all = append(all, "limits of "+entry.Name())
			}
		}
	}
	records := b.store().Snapshot()
	for _, r := range slices.Concat(records.Records, records.Earlier) {
		all = append(all, "record of "+string(r.Claim.UID))
	}
	for i := range records.Guards {
		all = append(all, "guard of "+string(records.Guards[i].Claim.UID))
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

// foreignStatus is what a survey would say about the foreign partitions.
func (b *box) foreignStatus() device.Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	var status device.Status
	for _, at := range b.foreign {
		if live, found := partition.Lookup(b.stateOf(at.PCIAddress), at); found {
			status.Static = append(status.Static, device.Static{
				PCIAddress: at.PCIAddress, ProfileID: at.ProfileID, Placement: at.Placement, UUID: live.UUID,
			})
		}
	}
	return status
}

// holders describes who holds what in these tests.
type holders struct{}

func (holders) Describe(context.Context, string, int, []gpu.Process) string { return "somebody" }

// locked changes a machine while nobody else does.
func (b *box) locked(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

// occupy lets a process run on a partition.
func (b *box) occupy(at partition.Address) {
	live, _ := b.look(at)
	b.run(at.PCIAddress, gpu.Process{PID: 1, InstanceID: live.InstanceID})
}

// endAll releases claims, which are all that have something.
func (b *box) endAll(m *Manager, uids ...types.UID) {
	b.t.Helper()
	for _, uid := range uids {
		if err := m.Unprepare(b.t.Context(), uid); err != nil {
			b.t.Errorf("unprepare %s: %v", uid, err)
		}
	}
	b.wantNothing()
}

func (b *box) wantAt(at partition.Address, want bool, otherwise string) {
	b.t.Helper()
	if _, found := b.look(at); found != want {
		b.t.Errorf("%s: %v", otherwise, b.state())
	}
}

func (b *box) wantNoSpec(uid types.UID) {
	b.t.Helper()
	if spec := b.spec(uid); len(spec) > 0 {
		b.t.Errorf("claim %s has a CDI spec: %+v", uid, spec)
	}
}

// wantRecord fails unless the record of a claim has this state, or there is none.
func (b *box) wantRecord(uid types.UID, state record.State) {
	b.t.Helper()
	r, err := b.store().Read(uid)
	if err != nil || r == nil != (state == "") || r != nil && r.State != state {
		b.t.Errorf("claim %s has the record %+v, %v, want %q", uid, r, err, state)
	}
}

// wantGuards fails unless so many files cannot be read.
func (b *box) wantGuards(want int) {
	b.t.Helper()
	if guards := b.guards(); len(guards) != want {
		b.t.Errorf("there are %v: %v", guards, b.state())
	}
}

// lockGPU takes the lock of a GPU, as a claim at work does.
func (b *box) lockGPU(m *Manager, pciAddress string) (release func()) {
	b.t.Helper()
	release, err := m.locks.GPUs(b.t.Context(), []string{pciAddress})
	if err != nil || release == nil {
		b.t.Fatalf("GPU %s is not free: %v", pciAddress, err)
	}
	return release
}
