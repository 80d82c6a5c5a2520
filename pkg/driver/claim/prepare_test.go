// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/claimtest"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

var (
	addressA0 = partition.Address{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}
	addressA4 = partition.Address{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}}
)

func mustPrepare(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) []LiveDevice {
	t.Helper()
	prepared, err := m.Prepare(t.Context(), claim)
	if err != nil {
		t.Fatalf("prepare %s: %v", claim.Name, err)
	}
	return prepared
}

// told is what the kubelet learns of devices.
func told(devices []LiveDevice) []LiveDevice {
	for i, d := range devices {
		devices[i] = LiveDevice{Requests: d.Requests, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID, CDIDevice: d.CDIDevice}
	}
	return devices
}

func mustUnprepare(t *testing.T, m *Manager, uid types.UID) {
	t.Helper()
	if err := m.Unprepare(t.Context(), uid); err != nil {
		t.Fatalf("unprepare %s: %v", uid, err)
	}
}

func mustReconcile(t *testing.T, m *Manager) {
	t.Helper()
	expect.Is(t, reconcile(t, m), nil)
}

// reconcile asks the API server about all claims, whenever their turn would be, and then
// cleans up.
func reconcile(t *testing.T, m *Manager) error {
	t.Helper()
	var errs []error
	m.orphans.next()
	for _, r := range m.store.Snapshot().All() {
		if r.State == record.Prepared {
			_, err := m.orphans.check(t.Context(), r)
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, m.cleanUp(t.Context()))...)
}

// cleanUp does everything that is due, and returns what is left.
func (m *Manager) cleanUp(ctx context.Context) error {
	_, err := m.Reconcile(ctx)
	return err
}

// cleanUpGPU is cleanUp for one of them.
func (m *Manager) cleanUpGPU(ctx context.Context, pciAddress string) error {
	return m.convergeGPU(ctx, pciAddress, func(*rules.Task) bool { return true }).left
}

// nothing is due.
func nothing(*rules.Task) bool { return false }

// survey is what Reconcile says without doing anything.
func survey(ctx context.Context, m *Manager) device.Status {
	status, _ := m.converge(ctx, nothing)
	return status
}

// claims are those that have a record.
func (m *Manager) claims() (uids []types.UID) {
	for _, r := range m.store.Snapshot().All() {
		uids = append(uids, r.Claim.UID)
	}
	return uids
}

// recordPath is the file of a claim's record, whose name is another where a file cannot be read.
func recordPath(m *Manager, uid types.UID) string {
	paths, _ := filepath.Glob(m.store.Path(uid) + "*")
	return slices.Max(append(paths, ""))
}

// recordText is what it says.
func recordText(t *testing.T, m *Manager, uid types.UID) string {
	t.Helper()
	data := must.Get(os.ReadFile(recordPath(m, uid)))(t)
	return string(data)
}

var wantError = claimtest.WantError

// wantWithin fails if more time has passed since then.
func wantWithin(t *testing.T, began time.Time, most time.Duration) {
	t.Helper()
	if waited := time.Since(began); waited > most {
		t.Errorf("waited for %s", waited)
	}
}

// goPrepare prepares a claim while the test goes on.
func goPrepare(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- runPrepare(t.Context(), m, claim) }()
	return done
}

func TestPrepare(t *testing.T) {
	b, m := newNode(t)
	claim := newClaim("u1", wholeC, sliceA4, sliceA0)
	want := []LiveDevice{
		{Requests: []string{"r2"}, Pool: poolName, Device: sliceA0, CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + sliceA0},
		{Requests: []string{"r1"}, Pool: poolName, Device: sliceA4, CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + sliceA4},
		{Requests: []string{"r0"}, Pool: poolName, Device: wholeC, CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + wholeC},
	}
	expect.Same(t, told(mustPrepare(t, m, claim)), want)
	node := func(path string, major, minor int64) cdi.Node {
		return cdi.Node{Path: path, HostPath: "/host" + path, Major: major, Minor: minor}
	}
	// All GPU nodes of the test machine are 1:3. Instances are numbered from 7,
	// and UUIDs use up numbers as well.
	wantSpec := []cdi.Device{
		{Name: sliceA0, Edits: cdi.Edits{Env: []string{"PARTAGE_GPU_a8b2f356=" + sliceA0}, Nodes: []cdi.Node{
			node("/dev/nvidia2", 1, 3), node("/dev/nvidia-caps/nvidia-cap170", 508, 170), node("/dev/nvidia-caps/nvidia-cap171", 508, 171),
		}}},
		{Name: sliceA4, Edits: cdi.Edits{Env: []string{"PARTAGE_GPU_f90e891d=" + sliceA4}, Nodes: []cdi.Node{
			node("/dev/nvidia2", 1, 3), node("/dev/nvidia-caps/nvidia-cap190", 508, 190), node("/dev/nvidia-caps/nvidia-cap191", 508, 191),
		}}},
		{Name: wholeC, Edits: cdi.Edits{Env: []string{"PARTAGE_GPU_e887e0ee=" + wholeC}, Nodes: []cdi.Node{node("/dev/nvidia1", 1, 3)}}},
	}
	expect.Same(t, b.specs["u1"], wantSpec)
	wantEffects := []string{
		"write preparing", "mode on", "create instance", "create compute instance", "create instance", "create compute instance",
		"write spec", "write prepared",
	}
	// What is intended on each GPU is written before it is done.
	effects := slices.DeleteFunc(slices.Clone(b.effects[1:]), func(e string) bool { return e == "mark preparing" })
	expect.Same(t, append(b.effects[:1:1], effects...), wantEffects)

	// Once more, and by another process: the same answer, and nothing is done but to note when.
	for name, again := range map[string]*Manager{"same": m, "other": b.manager()} {
		b.hooks(nil, nil)
		if diff := cmp.Diff(want, told(mustPrepare(t, again, claim))); diff != "" {
			t.Errorf("%s process, again: -want +got:\n%s", name, diff)
		}
		if diff := cmp.Diff([]string{"write spec", "mark prepared"}, b.effects); diff != "" {
			t.Errorf("%s process, effects again: -want +got:\n%s", name, diff)
		}
	}

	b.hooks(nil, nil)
	mustUnprepare(t, b.bareManager(), "u1") // the record alone is enough
	b.wantNothing()
	wantEffects = []string{"destroy compute instance", "destroy instance", "destroy compute instance", "destroy instance", "mode off"}
	expect.Same(t, b.onHardware(), wantEffects)
	first, last := b.effects[:2], b.effects[len(b.effects)-1:]
	if !slices.Equal(first, []string{"mark releasing", "remove spec"}) || !slices.Equal(last, []string{"mark released"}) {
		t.Errorf("effects of unprepare: %q", b.effects)
	}
	b.endAll(m, "u1", "never-heard-of")
}

// A claim that cannot be prepared as it is leaves nothing to clean up.
func TestPrepareRefuses(t *testing.T) {
	b, m := newNode(t)
	unallocated := newClaim("u1")
	unallocated.Status.Allocation = nil
	var refused *RefusedError
	for name, claim := range map[string]*resourceapi.ResourceClaim{
		"not allocated":         unallocated,
		"no such device":        newClaim("u1", sliceA0, "gpu-0000-ff-00-0"),
		"invalid configuration": configure(newClaim("u1", wholeA), fromClaim, gpuBad),
	} {
		if err := runPrepare(t.Context(), m, claim); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	wantError(t, runPrepare(t.Context(), m, newClaim("u1", "gpu-0000-ff-00-0")), "gpu-0000-ff-00-0")
	wantError(t, runPrepare(t.Context(), m, newClaim("../../u1", wholeA)), "claim UID")
	if err := m.Unprepare(t.Context(), "../u1"); err == nil {
		t.Error("a path was taken for a UID")
	}
	// Without an inventory it is not known whether it can.
	if err := runPrepare(t.Context(), b.bareManager(), newClaim("u1", wholeA)); !errors.Is(err, gpu.ErrDriverNotLoaded) || errors.As(err, &refused) {
		t.Errorf("without inventory: got %v", err)
	}
	if prepared, err := m.Prepare(t.Context(), newClaim("u1")); err != nil || prepared != nil {
		t.Errorf("of nothing of ours: %v, %v", prepared, err)
	}
	// A GPU without its device node.
	must.Do(t, os.Remove(filepath.Join(b.root, "dev/nvidia2")))
	wantError(t, runPrepare(t.Context(), m, newClaim("u1", sliceA0)), "device "+sliceA0, "nvidia2")
	b.wantNothing()
}

var errFault = errors.New("injected fault")

const always = 1 << 30

// failTimes makes a hook that fails at the first effects of this name.
func failTimes(effect string, times int32, err error) func(string) error {
	var count atomic.Int32 // the groups of a claim are prepared side by side
	return func(e string) error {
		if e == effect && count.Add(1) <= times {
			return err
		}
		return nil
	}
}

func TestNewManagerRefuses(t *testing.T) {
	b := newBox(t)
	good := b.options()
	for name, change := range map[string]func(*Options){
		"driver":   func(o *Options) { o.DriverName = "" },
		"pool":     func(o *Options) { o.PoolName = "" },
		"relative": func(o *Options) { o.DataDir = "data" },
		"hardware": func(o *Options) { o.Partitions = nil },
		"sharing":  func(o *Options) { o.Sharing = nil },
		"cdi":      func(o *Options) { o.Specs.CDI = nil },
		"calls":    func(o *Options) { o.Calls = nil },
		"users":    func(o *Options) { o.Users = nil },
		"events":   func(o *Options) { o.Events = nil },
		"cluster":  func(o *Options) { o.Cluster = nil },
		"pods":     func(o *Options) { o.Pods = nil },
	} {
		o := good
		change(&o)
		if _, err := NewManager(o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	write(t, filepath.Join(b.root, "file"), "")
	good.DataDir = filepath.Join(b.root, "file")
	if _, err := NewManager(good); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// A call that repeats the preparation of a claim on two GPUs ends early. The claim keeps its CDI spec, which containers of running pods need
// when they are started again.
func TestSpecOutlivesRepeatedPrepare(t *testing.T) {
	b, m := newNode(t)
	claim := newClaim("u1", sliceA0, sliceB0)
	mustPrepare(t, m, claim)
	ctx, cancel := context.WithCancel(t.Context())
	b.hooks(nil, func(string) error { cancel(); return nil })
	_ = runPrepare(ctx, m, claim)
	if len(b.spec("u1")) == 0 {
		t.Errorf("the claim lost its CDI spec: %v", b.seen())
	}
}

// An error of one GPU wraps context.Canceled, for example the supervisor's own, and the call is not canceled.
func TestCanceledElsewhere(t *testing.T) {
	b, m := newNode(t)
	b.hooks(failTimes("start session", always, fmt.Errorf("the supervisor is ending: %w", context.Canceled)), nil)
	wantError(t, runPrepare(t.Context(), m, newClaim("u1", mpsA, sliceB0)), "the supervisor is ending")
}

func TestRetry(t *testing.T) {
	unknown := fmt.Errorf("nvmlSomething: %w", gpu.ErrUnknown)
	failed := "device " + sliceA0 + ": create a partition with " + addressA0.String() + ": "
	for name, test := range map[string]struct {
		before   func(string) error
		deadline time.Duration
		want     string // nothing: success
		took     time.Duration
		left     bool
	}{
		"never fails":           {},
		"passes":                {before: failTimes("create instance", 3, unknown), took: 1700 * time.Millisecond},
		"timeout of the driver": {before: failTimes("create compute instance", 1, gpu.ErrTimeout), took: 200 * time.Millisecond},
		"does not pass": {
			before: failTimes("create instance", always, unknown),
			want:   "tried 6 times: " + failed + "nvmlSomething: unknown driver error", took: 7700 * time.Millisecond,
		},
		"no time": {
			before: failTimes("create instance", always, unknown), deadline: time.Second,
			want: "tried 3 times: ", took: 700 * time.Millisecond,
		},
		"takes long, and does not pass": { // the kubelet still hears why
			before: func(e string) error {
				if strings.HasPrefix(e, "create instance") {
					time.Sleep(8 * time.Second)
				}
				return failTimes("create instance", always, unknown)(e)
			},
			deadline: 45 * time.Second, want: "tried 4 times: " + failed + "nvmlSomething: unknown driver error", took: 33700 * time.Millisecond,
		},
		"another reason": {before: failTimes("create instance", always, gpu.ErrNoPermission), want: failed + "no permission"},
		"then another reason": {
			before: both(failTimes("mode on", 1, unknown), failTimes("create instance", 1, gpu.ErrNoPermission)),
			want:   "tried 2 times: " + failed + "no permission", took: 200 * time.Millisecond,
		},
		"cannot be undone": {
			before: both(failTimes("create compute instance", 1, gpu.ErrNoPermission), failTimes("destroy instance", 2, gpu.ErrNoPermission)),
			want:   "undo: device " + sliceA0, left: true,
		},
	} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			b.hooks(test.before, nil)
			if test.deadline == 0 {
				test.deadline = time.Hour
			}
			ctx, cancel := context.WithTimeout(t.Context(), test.deadline)
			defer cancel()
			start := time.Now()
			err := runPrepare(ctx, m, newClaim("u1", sliceA0))
			expect.Same(t, time.Since(start), test.took)
			b.hooks(nil, nil)
			if test.want == "" {
				expect.Is(t, err, nil)
				mustUnprepare(t, m, "u1")
			} else {
				wantError(t, err, test.want)
			}
			if test.left {
				mustReconcile(t, m)
			}
			if left := slices.DeleteFunc(b.state(), func(s string) bool { return strings.HasPrefix(s, "MIG mode of") }); len(left) > 0 {
				t.Errorf("left behind: %v", left) // the mode stays until a whole GPU is wanted
			}
		})
	}
}

func both(a, b func(string) error) func(string) error {
	return func(e string) error { return errors.Join(a(e), b(e)) }
}

// Waiting does not help against somebody else's partitions.
func TestNoRetryOnDividedGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		b.makeForeign(addressA0)
		start := time.Now()
		expect.Is(t, runPrepare(t.Context(), b.manager(), newClaim("u1", wholeA)), gpu.ErrInUse)
		wantWithin(t, start, 0)
	})
}

// Between two attempts the GPU is free for others.
func TestRetryLetsOthersWork(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		b.hooks(failTimes("create instance", 1, gpu.ErrUnknown), nil)
		done := goPrepare(t, m, newClaim("u1", sliceA0))
		synctest.Wait()
		start := time.Now()
		mustPrepare(t, m, newClaim("u2", sliceA4))
		wantWithin(t, start, 0)
		expect.Is(t, <-done, nil)
	})
}

// TestRetryJointly: what several GPUs of a claim need together is tried again as well.
func TestRetryJointly(t *testing.T) {
	for _, effect := range []string{"start session", "write spec"} {
		runOnNode(t, effect, func(t *testing.T, b *box, m *Manager) {
			b.hooks(failTimes(effect, 3, gpu.ErrUnknown), nil)
			start := time.Now()
			mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS))
			expect.Same(t, time.Since(start), 1700*time.Millisecond)
			b.endAll(m, "u1")
		})
	}
}

const (
	// roomTime is how long a claim waits for its place, poll how often it looks.
	roomTime = 15 * time.Second
	poll     = time.Second
)

func TestOverlap(t *testing.T) {
	for name, test := range map[string]struct {
		first, second string
		refused       bool
	}{
		"same partition":         {sliceA0, sliceA0, true},
		"placements overlap":     {halfA0, sliceA1, true},
		"partition of the whole": {wholeA, sliceA1, true},
		"whole of a partition":   {sliceA1, wholeA, true},
		"same whole":             {wholeC, wholeC, true},
		"beside":                 {halfA4, sliceA1, false},
		"other GPU":              {wholeA, sliceB0, false},
		// As schedulers before Kubernetes 1.36.2 allocate, see test/allocators.
		"whole of MPS shares":        {mpsA, wholeA, true},
		"partition of MPS shares":    {mpsA, sliceA1, true},
		"time slices of MPS shares":  {mpsA, turnsA, true},
		"whole of time slices":       {turnsA, wholeA, true},
		"partition of time slices":   {turnsA, sliceA1, true},
		"MPS shares of time slices":  {turnsA, mpsA, true},
		"partition of shares of it":  {mpsSliceA0, sliceA0, true},
		"whole of shares of a part":  {mpsSliceA0, wholeA, true},
		"MPS shares of the whole":    {wholeA, mpsA, true},
		"MPS shares of a part":       {sliceA1, mpsA, true},
		"another MPS share":          {mpsA, mpsA, false},
		"MPS shares beside the part": {mpsSliceA0, sliceA1, false},
	} {
		runInBubble(t, name, func(t *testing.T) { testOverlap(t, test.first, test.second, test.refused) })
	}
}

func testOverlap(t *testing.T, first, second string, refused bool) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("first", first))
	before := b.state()
	start := time.Now()
	_, err := b.manager().Prepare(t.Context(), newClaim("second", second))
	if !refused {
		if err != nil || time.Since(start) > 0 {
			t.Errorf("after %s: got %v", time.Since(start), err)
		}
		return
	}
	var overlap *rules.Verdict
	if !errors.As(err, &overlap) || !errors.Is(err, rules.ErrTaken) || overlap.Other != "first" {
		t.Errorf("got %v", err)
	}
	wantError(t, err, second, first, "default/claim-first", "prepared", "not released in time")
	wantRoomTime(t, start)
	b.wantState(t, "refused", before)
	mustUnprepare(t, m, "first")
	mustPrepare(t, m, newClaim("second", second))
	b.endAll(m, "second")
}

// wantRoomTime fails unless a claim has waited for its place for as long as claims do.
func wantRoomTime(t *testing.T, start time.Time) {
	t.Helper()
	if waited := time.Since(start); waited < roomTime || waited > roomTime+poll {
		t.Errorf("waited for %s", waited)
	}
}

// A device has only so many shares. Whoever gives one back makes room.
func TestTooManyShares(t *testing.T) {
	for _, device := range []string{mpsA, turnsA, mpsSliceA0} {
		runOnNode(t, device, func(t *testing.T, b *box, m *Manager) {
			for _, uid := range []string{"first", "second", "third"} {
				mustPrepare(t, m, newClaim(uid, device))
			}
			mustPrepare(t, m, newClaim("third", device)) // again
			before := b.state()
			start := time.Now()
			err := runPrepare(t.Context(), m, newClaim("two", device, device))
			expect.Is(t, err, rules.ErrTaken)
			wantError(t, err, device, "has 4 shares and all are taken", "default/claim-", "not released in time")
			wantRoomTime(t, start)
			b.wantState(t, "refused", before)

			prepared := goPrepare(t, m, newClaim("two", device, device))
			synctest.Wait()
			mustUnprepare(t, b.manager(), "second")
			expect.Is(t, <-prepared, nil)
			b.endAll(m, "first", "third", "two")
		})
	}
}

// The policy has fewer shares than claims had before the machine was started anew: they
// all have theirs again, and nobody else gets one.
func TestFewerSharesAfterReboot(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		uids := []string{"u1", "u2", "u3"}
		for _, uid := range uids {
			mustPrepare(t, m, newClaim(uid, mpsA))
		}
		b.boot("boot-2")
		m = b.manager()
		fewer := testPolicy()
		fewer.Default.MPS.Clients = 2
		m.SetInventory(inventoryOf(t, testNode(), device.Terms{Policy: fewer, Limited: true}))
		for _, uid := range uids {
			mustPrepare(t, m, newClaim(uid, mpsA))
		}
		wantError(t, runPrepare(t.Context(), m, newClaim("u4", mpsA)), "device "+mpsA+" has 2 shares and all are taken")
		b.endAll(m, "u1", "u2", "u3")
	})
}

// A claim that comes while the place is still taken gets it as soon as it is free,
// whichever process frees it. Meanwhile it is in nobody's way.
func TestWaitForPlace(t *testing.T) {
	for name, other := range map[string]bool{"same process": false, "other process": true} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			releasing := m
			if other {
				releasing = b.manager()
			}
			mustPrepare(t, m, newClaim("first", sliceA0))
			done := goPrepare(t, m, newClaim("second", halfA0))
			// Everybody has come to rest, so it waits.
			synctest.Wait()
			mustPrepare(t, m, newClaim("third", sliceA4))
			start := time.Now()
			mustUnprepare(t, releasing, "first")
			expect.Is(t, <-done, nil)
			if waited := time.Since(start); waited > poll || (!other && waited > 0) {
				t.Errorf("waited for another %s", waited)
			}
			b.endAll(m, "second", "third")
		})
	}
}

// The wait ends with the call.
func TestWaitForPlaceEndsWithCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, m := newNode(t)
		mustPrepare(t, m, newClaim("first", sliceA0))
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		expect.Is(t, runPrepare(ctx, m, newClaim("second", sliceA0)), rules.ErrTaken)
		expect.Same(t, time.Since(start), 3*time.Second)
	})
}

// What an abandoned claim left is cleared out of the way of the next.
func TestOverlapWithAbandoned(t *testing.T) {
	for _, effect := range []string{"create compute instance", "write prepared"} {
		runInBubble(t, effect, func(t *testing.T) {
			b := newBox(t)
			b.kill(t, effect, "dead", sliceA0)
			m := b.manager()
			if effect == "write prepared" {
				wantError(t, runPrepare(t.Context(), m, newClaim("next", halfA0)), "default/claim-dead")
				mustUnprepare(t, m, "dead")
			}
			mustPrepare(t, m, newClaim("next", halfA0))
			b.endAll(m, "next")
		})
	}
}

// TestWaitNamesUsers: who waits for a GPU that is given back is told which process still has it.
func TestWaitNamesUsers(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", wholeA))
		const ended = 4194305 // the kernel gives no process this ID
		b.run(pciA, gpu.Process{PID: ended, InstanceID: -1})
		mustUnprepare(t, m, "u1")
		wantError(t, runPrepare(t.Context(), m, newClaim("u2", wholeA)), "being released for claim default/claim-u1", "is in use: process 4194305 (has ended, its memory is still held)", "was not released in time")
		b.run(pciA)
		mustPrepare(t, m, newClaim("u2", wholeA))
	})
}

// TestWaitBesideTraffic: a wait for a place does not end early because claims come and go elsewhere.
func TestWaitBesideTraffic(t *testing.T) {
	for _, every := range []time.Duration{time.Second, 250 * time.Millisecond} {
		runInBubble(t, every.String(), func(t *testing.T) {
			_, m := newNode(t)
			mustPrepare(t, m, newClaim("first", sliceA0))
			began := time.Now()
			done := goPrepare(t, m, newClaim("second", sliceA0))
			synctest.Wait()
			for n := 0; time.Since(began) < 13*time.Second; n++ {
				uid := fmt.Sprint("beside", n)
				mustPrepare(t, m, newClaim(uid, sliceB0))
				synctest.Wait()
				mustUnprepare(t, m, types.UID(uid))
				synctest.Wait()
				time.Sleep(every)
			}
			mustUnprepare(t, m, "first")
			expect.Is(t, <-done, nil)
		})
	}
}

func (b *box) FabricPending(_ context.Context, pciAddress string) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.fabric[pciAddress], nil
}

// setFabric is the driver getting on with the registration of a GPU.
func (g *gpus) setFabric(pciAddress, state string) {
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.fabric[pciAddress] = state
}

// TestWaitForFabric: a whole GPU whose partitions are just gone, and a share of one, is handed out when
// the driver has registered it with the NVLink fabric, and another GPU does not wait. If that takes too long the
// error says of which GPU what was waited for, and the kubelet comes back.
func TestWaitForFabric(t *testing.T) {
	for name, claim := range map[string]string{"whole": wholeA, "share": mpsA} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u0", sliceA0))
			mustUnprepare(t, m, "u0")
			b.setFabric(addressA0.PCIAddress, "In Progress")

			start := time.Now()
			err := runPrepare(t.Context(), m, newClaim("u1", claim))
			expect.Is(t, err, gpu.ErrFabricPending)
			wantError(t, err, addressA0.PCIAddress, "(In Progress)")
			wantWithin(t, start, roomTime+time.Second)
			b.wantNothing()

			done := goPrepare(t, m, newClaim("u1", claim))
			synctest.Wait()
			mustPrepare(t, m, newClaim("u2", wholeB))
			b.setFabric(addressA0.PCIAddress, "")
			expect.Is(t, <-done, nil)
			b.endAll(m, "u1", "u2")
		})
	}
}

// TestFabricLostLater: a claim whose containers run is prepared again, as after a restart of the kubelet,
// while the GPU is not registered with its fabric, as during one of the fabric manager. After a reboot nothing
// runs, and it waits like a new one.
func TestFabricLostLater(t *testing.T) {
	for name, claim := range map[string]string{"whole": wholeA, "share": mpsA} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", claim))
			b.setFabric(addressA0.PCIAddress, "In Progress")
			mustPrepare(t, m, newClaim("u1", claim))

			b.boot("boot-2")
			m = b.manager()
			expect.Is(t, runPrepare(t.Context(), m, newClaim("u1", claim)), gpu.ErrFabricPending)
			b.setFabric(addressA0.PCIAddress, "")
			mustPrepare(t, m, newClaim("u1", claim))
			b.endAll(m, "u1")
		})
	}
}
