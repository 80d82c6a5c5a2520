// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// slowness is what takes its time on a box, in the time of a bubble. Nothing does at first. It
// is less than the limit after which a call is said to hang, so all calls are answered.
type slowness struct {
	mu sync.Mutex
	// gpus is how long each call on a GPU takes, by PCI address, smi how long nvidia-smi
	// takes, and folder how long looking through the driver's folder does.
	gpus        map[string]time.Duration
	smi, folder time.Duration
	// each is how long one call of the library takes where what is asked for takes many, or 0 for one call.
	each time.Duration
	// turn is held while somebody looks through the folder: others wait for what is found.
	turn chan bool
	// took counts the calls that took their time, late those that were not made because their
	// caller's time was over.
	took, late int
}

func (s *slowness) of(takes *time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *takes
}

func (s *slowness) onGPU(pciAddress string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gpus[pciAddress]
}

func (s *slowness) count(counter *int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*counter++
}

// nothing ends all slowness. What has begun takes the time that it takes.
func (s *slowness) nothing() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gpus, s.smi, s.folder = nil, 0, 0
}

// call is what a call into the library does before anything else: it is not made when the
// caller's time is over, and once it is made it takes its time whatever the caller wants.
func (s *slowness) call(ctx context.Context, pciAddress string) error {
	d := s.onGPU(pciAddress)
	each := s.of(&s.each)
	if each == 0 {
		each = d
	}
	for left := d; left > 0; left -= each {
		if err := ctx.Err(); err != nil {
			s.count(&s.late)
			return &gpu.Error{Call: "nvmlAnything", PCIAddress: pciAddress, Text: "not attempted: " + err.Error(), Err: err}
		}
		if left == d { // it is one call to its caller
			s.count(&s.took)
		}
		time.Sleep(min(each, left))
	}
	return nil
}

// process is what a process has of a box beside the hardware: the queues of its calls.
type process struct {
	*box
	calls *call.Queues
}

// left returns the error of a call, having left the call in the queues of the process if it does not return.
func (p process) left(err error) error {
	var out *gpu.PendingError
	if errors.As(err, &out) {
		_, _ = call.Do(context.Background(), p.calls.GPU(out.PCIAddress), out.Call, func() (bool, error) {
			<-out.Done
			return true, nil
		})
	}
	return err
}

// slowly makes a call on a GPU, which takes its time.
func slowly[T any](ctx context.Context, p process, pciAddress string, do func() (T, error)) (answer T, err error) {
	if err = p.slow.call(ctx, pciAddress); err != nil {
		return answer, err
	}
	answer, err = do()
	return answer, p.left(err)
}

// slowlyDo is for calls that only succeed or fail.
func (p process) slowlyDo(ctx context.Context, pciAddress string, do func() error) error {
	_, err := slowly(ctx, p, pciAddress, func() (bool, error) { return true, do() })
	return err
}

// slowGPUs are the GPUs of a box as the driver's library reaches them.
type slowGPUs struct{ process }

func (b slowGPUs) MIGState(ctx context.Context, at string) (gpu.MIGState, error) {
	return slowly(ctx, b.process, at, func() (gpu.MIGState, error) { return b.box.MIGState(ctx, at) })
}

func (b slowGPUs) Processes(ctx context.Context, at string) ([]gpu.Process, error) {
	return slowly(ctx, b.process, at, func() ([]gpu.Process, error) { return b.box.Processes(ctx, at) })
}

func (b slowGPUs) SetMIGMode(ctx context.Context, at string, enabled bool) error {
	return b.slowlyDo(ctx, at, func() error { return b.box.SetMIGMode(ctx, at, enabled) })
}

func (b slowGPUs) CreateInstance(ctx context.Context, at string, profileID uint32, where gpu.Placement) (int, error) {
	return slowly(ctx, b.process, at, func() (int, error) { return b.box.CreateInstance(ctx, at, profileID, where) })
}

func (b slowGPUs) CreateComputeInstance(ctx context.Context, at string, instanceID int) (gpu.ComputeInstance, error) {
	return slowly(ctx, b.process, at, func() (gpu.ComputeInstance, error) { return b.box.CreateComputeInstance(ctx, at, instanceID) })
}

func (b slowGPUs) DestroyComputeInstance(ctx context.Context, at string, instanceID, computeID int) error {
	return b.slowlyDo(ctx, at, func() error { return b.box.DestroyComputeInstance(ctx, at, instanceID, computeID) })
}

func (b slowGPUs) DestroyInstance(ctx context.Context, at string, instanceID int) error {
	return b.slowlyDo(ctx, at, func() error { return b.box.DestroyInstance(ctx, at, instanceID) })
}

// slowSharing is what makes the devices of a box shared: compute modes are set through the
// library, time slices by nvidia-smi, which is killed when the caller's time is over.
type slowSharing struct{ process }

func (b slowSharing) Ensure(ctx context.Context, spec mps.Spec, devices []sharing.Device) (mps.Status, error) {
	for _, d := range devices {
		if err := b.slow.call(ctx, d.PCIAddress); err != nil {
			return mps.Status{}, err
		}
	}
	answer, err := b.box.Ensure(ctx, spec, devices)
	return answer, b.left(err)
}

func (b slowSharing) Mode(ctx context.Context, d sharing.Device) (gpu.ComputeMode, error) {
	return slowly(ctx, b.process, d.PCIAddress, func() (gpu.ComputeMode, error) { return b.box.Mode(ctx, d) })
}

func (b slowSharing) SetExclusive(ctx context.Context, d sharing.Device, exclusive bool) error {
	return b.slowlyDo(ctx, d.PCIAddress, func() error { return b.box.SetExclusive(ctx, d, exclusive) })
}

func (b slowSharing) SetInterval(ctx context.Context, d sharing.Device, interval sharing.Interval) error {
	return b.slowlyDo(ctx, d.PCIAddress, func() error {
		if takes := b.slow.of(&b.slow.smi); takes > 0 {
			b.slow.count(&b.slow.took)
			select {
			case <-time.After(takes):
			case <-ctx.Done():
				b.slow.count(&b.slow.late)
				return &gpu.Error{Call: "nvidia-smi compute-policy", PCIAddress: d.PCIAddress, Text: "killed: " + ctx.Err().Error(), Err: ctx.Err()}
			}
		}
		return b.box.SetInterval(ctx, d, interval)
	})
}

func (b slowSharing) End(ctx context.Context, id string) error { return b.left(b.box.End(ctx, id)) }

// slowFolder writes the specs of a box, for which the driver's folder is looked through.
type slowFolder struct{ *box }

func (b slowFolder) look() {
	takes := b.slow.of(&b.slow.folder)
	if takes == 0 {
		return
	}
	b.slow.count(&b.slow.took)
	b.slow.turn <- true
	defer func() { <-b.slow.turn }()
	time.Sleep(takes)
}

func (b slowFolder) Write(ctx context.Context, uid types.UID, devices []cdi.Device) (map[string]string, error) {
	b.look()
	return b.box.Write(ctx, uid, devices)
}

func (b slowFolder) Matches(ctx context.Context, uid types.UID, devices []cdi.Device) (bool, error) {
	b.look()
	return b.box.Matches(ctx, uid, devices)
}

// kubeletTime is how long the kubelet waits for an answer.
const kubeletTime = 45 * time.Second

// slowWalk makes things slow in some steps of a walk. Its chances are its own, so the other
// steps are those of the same seed without it.
type slowWalk struct {
	rng *rand.Rand
	// left is for how many more steps it stays as it is, what is what takes how long.
	left int
	what string
	// steps is in how many something was slow, and began is when the last one did.
	steps int
	began time.Time
}

// nextSlow begins a step: perhaps something becomes slow, for this one and some others, or
// all is well again. The calls of some steps have as much time as the kubelet gives them.
func (w *walk) nextSlow(ctx context.Context) (context.Context, context.CancelFunc) {
	s := &w.slowly
	w.pass(time.Since(s.began))
	s.began = time.Now()
	if s.left--; s.left < 0 {
		w.slow.nothing()
		s.what = ""
		if s.rng.IntN(4) == 0 {
			s.left = s.rng.IntN(4)
			s.what = w.becomeSlow()
			w.note("   slow: %s", s.what)
		}
	}
	if s.what == "" {
		return context.WithCancel(ctx)
	}
	s.steps++
	if s.rng.IntN(2) == 0 {
		return context.WithTimeout(ctx, kubeletTime)
	}
	return context.WithCancel(ctx)
}

// becomeSlow chooses what takes how long.
func (w *walk) becomeSlow() string {
	takes := []time.Duration{200 * time.Millisecond, 2 * time.Second, 6 * time.Second, 20 * time.Second}[w.slowly.rng.IntN(4)]
	w.slow.mu.Lock()
	defer w.slow.mu.Unlock()
	switch n := w.slowly.rng.IntN(8); n {
	case 0:
		w.slow.folder = takes
		return fmt.Sprintf("the driver's folder takes %s", takes)
	case 1:
		w.slow.smi = takes
		return fmt.Sprintf("nvidia-smi takes %s", takes)
	case 2:
		w.slow.gpus = map[string]time.Duration{pciA: takes, pciB: takes, pciC: takes}
		return fmt.Sprintf("all GPUs take %s", takes)
	default:
		at := []string{pciA, pciB, pciC}[n%3]
		w.slow.gpus = map[string]time.Duration{at: takes}
		return fmt.Sprintf("GPU %s takes %s", at, takes)
	}
}

// endSlow is for the end of a walk: all is well again.
func (w *walk) endSlow() {
	w.slow.nothing()
	w.slowly.what = ""
	w.pass(time.Since(w.slowly.began))
}

// slowCounts are of all walks.
type slowCounts struct{ walks, steps, took, late int }

func (c *slowCounts) add(w *walk) {
	c.walks++
	c.steps += w.slowly.steps
	c.took += w.slow.took
	c.late += w.slow.late
}

// check fails unless enough was slow to say anything.
func (c *slowCounts) check(t *testing.T) {
	t.Helper()
	t.Logf("%d walks with %d slow steps, %d calls that took their time and %d that were too late", c.walks, c.steps, c.took, c.late)
	const enough = 10
	if t.Failed() || c.walks < enough {
		return // these are a few that somebody looks at
	}
	// Little is called when its caller has no time left: nothing is begun then.
	if c.steps < 20*c.walks || c.took < 60*c.walks || 2*c.late < c.walks {
		t.Error("too little was slow")
	}
}

// TestReleaseTime: a release answers within 20 seconds, however slow its GPU is.
func TestReleaseTime(t *testing.T) {
	type result struct {
		takes, took time.Duration
		parts       int
	}
	var worst result
	for parts := 1; parts <= 4; parts++ {
		for takes := time.Second; takes <= 17*time.Second; takes += time.Second {
			onNode(t, func(t *testing.T, b *box, m *Manager) {
				var devices []string
				for i := range parts {
					devices = append(devices, fmt.Sprintf("%s-mig-1g10gb-%d", wholeA, i))
				}
				mustPrepare(t, m, newClaim("u1", devices...))
				b.makeSlow(takes)
				b.slow.each = 500 * time.Millisecond
				ctx, cancel := context.WithTimeout(t.Context(), kubeletTime)
				defer cancel()
				began := time.Now()
				err := m.Unprepare(ctx, "u1")
				if took := time.Since(began); took > 20*time.Second {
					if took > worst.took {
						worst = result{takes, took, parts}
					}
					t.Logf("%d partitions, each look or change takes %s: answered after %s: %v", parts, takes, took, err)
				}
				b.slow.nothing()
			})
		}
	}
	if worst.took > 0 {
		t.Errorf("a release was answered after %s: %d partitions, each look or change of the GPU takes %s (calls of 0.5 s)", worst.took, worst.parts, worst.takes)
	}
}

// delay lets an effect take its time, on one GPU or on all.
func (b *box) delay(pciAddress, effect string, takes time.Duration) {
	b.beforeEffect(func(address, e string) error {
		if (pciAddress == "" || address == pciAddress) && e == effect {
			time.Sleep(takes)
		}
		return nil
	})
}

// makeSlow lets each call on GPU A take this long, in the time of a bubble.
func (b *box) makeSlow(each time.Duration) {
	b.slow.mu.Lock()
	defer b.slow.mu.Unlock()
	b.slow.gpus = map[string]time.Duration{pciA: each}
}

// TestSlowGPUHoldsUpNobody: one GPU is slow, so that calls for its claims are at work on it for minutes, and the driver looks
// at all GPUs as ever. Claims of another one do not wait.
func TestSlowGPUHoldsUpNobody(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		b.makeSlow(20 * time.Second)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		repeat := func(do func()) {
			wg.Go(func() {
				for ctx.Err() == nil {
					do()
				}
			})
		}
		repeat(func() {
			_, _ = m.Prepare(ctx, newClaim("slow", sliceA0))
			_ = m.Unprepare(ctx, "slow")
		})
		repeat(func() {
			survey(ctx, m)
			time.Sleep(10 * time.Second)
			b.pass(10 * time.Second)
		})
		time.Sleep(time.Minute)
		var longest time.Duration
		for range 60 {
			began := time.Now()
			mustPrepare(t, m, newClaim("beside", sliceB0))
			mustUnprepare(t, m, "beside")
			longest = max(longest, time.Since(began))
			time.Sleep(time.Second)
		}
		if longest > time.Second {
			t.Errorf("GPU A is slow, and a claim of GPU B waits for %s", longest)
		}
		stop()
		wg.Wait()
	})
}

// TestSlowReleaseIsTainted: the record of a claim says that it is being released long before anybody has looked at its GPU. What a
// release is still at work on is not tainted: as a rule it is free before anybody else wants it.
func TestSlowReleaseIsTainted(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceA0))
		mustReconcile(t, m)
		b.makeSlow(20 * time.Second)
		began := time.Now()
		released := make(chan error)
		go func() { released <- m.Unprepare(t.Context(), "u1") }()
		time.Sleep(5 * time.Second)
		b.pass(5 * time.Second)
		wantFindings(t, m)
		expect.Is(t, <-released, nil)
		b.pass(time.Since(began) - 5*time.Second)
		for len(findings(survey(t.Context(), m))) == 0 && time.Since(began) < 10*time.Minute {
			time.Sleep(time.Second)
			b.pass(time.Second)
		}
		wantWithin(t, began, 30*time.Second)
		b.slow.nothing()
		time.Sleep(gpuTime) // what goes on without a caller ends
		mustReconcile(t, m)
		wantFindings(t, m)
		b.wantNothing()
	})
}

// TestSlowGPUTaintsNoOther: what is released of another GPU while a look waits for the slow one is free.
func TestSlowGPUTaintsNoOther(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		for range 10 { // it was by chance
			mustPrepare(t, m, newClaim("u1", sliceB0))
			b.hooks(failTimes("destroy instance", always, errors.New("not now")), nil)
			mustUnprepare(t, m, "u1")
			b.hooks(nil, nil)
			b.pass(time.Minute)
			b.makeSlow(20 * time.Second)
			if status, err := m.Reconcile(t.Context()); err != nil || len(findings(status)) > 0 {
				t.Errorf("GPU A is slow, GPU B is not: %q, %v", findings(status), err)
			}
			b.slow.nothing()
			time.Sleep(gpuTime) // what goes on without a caller ends
		}
		b.wantNothing()
	})
}

// TestSlowReleaseOfShare: the rest of a device that claims share may be given out, also while a share is released.
func TestSlowReleaseOfShare(t *testing.T) {
	for _, stays := range []bool{true, false} {
		onNode(t, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("goes", mpsA))
			if stays {
				mustPrepare(t, m, newClaim("stays", mpsA))
			}
			mustReconcile(t, m)
			b.makeSlow(20 * time.Second)
			mustUnprepare(t, m, "goes")
			b.pass(time.Minute)
			if got := findings(survey(t.Context(), m)); (len(got) == 0) != stays {
				t.Errorf("another claim has a share: %t; %q", stays, got)
			}
			b.slow.nothing()
			time.Sleep(gpuTime) // what goes on without a caller ends
		})
	}
}

// TestReleaseOnSlowGPU: each call takes its time and none hangs. The release comes to its end although no run of it has the time to do all of
// it.
func TestReleaseOnSlowGPU(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
		// To read what is on a GPU with seven partitions takes 36 calls of NVML. Here each takes 1.3 s.
		b.makeSlow(36 * 1300 * time.Millisecond)
		b.slow.each = 1300 * time.Millisecond
		for range 20 {
			_ = m.Unprepare(t.Context(), "u1")
			_ = m.cleanUp(t.Context())
			time.Sleep(time.Minute)
			b.pass(2 * time.Minute)
		}
		b.wantNothing()
		b.slow.nothing()
		time.Sleep(gpuTime) // what goes on without a caller ends
	})
}

// A claim on two GPUs gets them although claims on one each come and go without end.
func TestClaimOnTwoGPUsIsNotStarved(t *testing.T) {
	for name, test := range map[string]struct {
		claim   *resourceapi.ResourceClaim
		pause   time.Duration
		traffic []string
	}{
		"partitions": {newClaim("two", sliceA0, sliceB0), time.Millisecond,
			[]string{wholeA + "-mig-1g10gb-1", wholeA + "-mig-1g10gb-2", wholeB + "-mig-1g10gb-1", wholeB + "-mig-1g10gb-2"}},
		// Only the locks are in its way.
		"MPS session": {configure(newClaim("two", wholeA, wholeB), fromClaim, gpuMPS), 100 * time.Millisecond, []string{wholeC}},
	} {
		runOnNode(t, name, func(t *testing.T, b *box, m *Manager) {
			b.beforeEffect(func(_, effect string) error {
				if effect == "create instance" || effect == "destroy instance" {
					time.Sleep(time.Second)
				}
				return nil
			})
			ctx, stop := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			for w, device := range test.traffic {
				wg.Go(func() {
					time.Sleep(time.Duration(w) * 300 * time.Millisecond)
					for n := 0; ctx.Err() == nil; n++ {
						uid := fmt.Sprintf("w%d-%d", w, n)
						expect.Is(t, runPrepare(t.Context(), m, newClaim(uid, device)), nil)
						_ = m.Unprepare(t.Context(), types.UID(uid))
						time.Sleep(test.pause)
					}
				})
			}
			time.Sleep(5 * time.Second)
			call, cancel := context.WithTimeout(t.Context(), 45*time.Second)
			defer cancel()
			expect.Is(t, runPrepare(call, m, test.claim), nil)
			stop()
			wg.Wait()
			b.endAll(m, "two")
		})
	}
}

// 32 partitions on two GPUs are made at the same time on both.
func TestGroupsAreMadeAtTheSameTime(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		b.delay("", "create instance", 2*time.Second)
		var devices []string
		for i := range 7 {
			devices = append(devices, fmt.Sprintf("%s-mig-1g10gb-%d", wholeA, i), fmt.Sprintf("%s-mig-1g10gb-%d", wholeB, i))
		}
		start := time.Now()
		mustPrepare(t, m, newClaim("u1", devices...))
		expect.Same(t, time.Since(start), 14*time.Second) // 7 on each
		b.endAll(m, "u1")
	})
}

// TestJointTaskKeepsNoGPU: what is due on several GPUs together does not wait for one of them while it has another.
func TestJointTaskKeepsNoGPU(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS))
		must.Do(t, os.Remove(m.store.Path("u1"))) // its session is nobody's now
		release := b.lockGPU(b.manager(), pciC)
		start := time.Now()
		expect.Is(t, m.cleanUpGPU(t.Context(), pciA), nil)
		wantWithin(t, start, 2*time.Second)
		release()
		mustReconcile(t, m)
		b.wantNothing()
	})
}

// TestOtherGPUFails: a GPU of a claim that waited when another one failed does not say that it has waited for long.
func TestOtherGPUFails(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, newClaim("u1", sliceB0))
		b.beforeEffect(func(_, effect string) error {
			if effect == "create instance" {
				time.Sleep(3 * time.Second)
				return gpu.ErrNoPermission
			}
			return nil
		})
		err := runPrepare(t.Context(), m, newClaim("u2", sliceA0, sliceB0))
		wantError(t, err, "no permission")
		if err != nil && strings.Contains(err.Error(), sliceB0) {
			t.Errorf("it did not wait to the end for the place on GPU B: %v", err)
		}
	})
}

// A GPU that is slow does not hold up the claims of another, also where a claim has both.
func TestSlowGPUOfAClaim(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		beside := func(device string) {
			t.Helper()
			synctest.Wait()
			start := time.Now()
			mustPrepare(t, m, newClaim("u2", device))
			mustUnprepare(t, m, "u2")
			wantWithin(t, start, 0)
		}
		b.delay(pciA, "create instance", 20*time.Second)
		done := goPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
		beside(wholeB + "-mig-1g10gb-1")
		expect.Is(t, <-done, nil)
		// Nor does it hold up the release of the other part.
		b.delay(pciA, "destroy instance", 20*time.Second)
		released := make(chan error)
		go func() { released <- m.Unprepare(t.Context(), "u1") }()
		beside(sliceB0)
		expect.Is(t, <-released, nil)
		b.beforeEffect(nil)
		mustReconcile(t, m) // what the release had no time for
		b.wantNothing()
	})
}

// TestGPUsAreIndependent: while a call hangs on one, claims on others come and go, and those that need the same GPU wait no longer
// than they are told to.
func TestGPUsAreIndependent(t *testing.T) {
	b, m, next := newPair(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	hang := sync.OnceFunc(func() { close(entered) })
	b.beforeEffect(func(address, e string) error {
		if address == pciA && e == "create instance" {
			hang()
			<-leave
		}
		return nil
	})
	done := goPrepare(t, m, newClaim("hangs", sliceA0))
	<-entered
	for _, other := range []*Manager{m, next} {
		mustPrepare(t, other, newClaim("free", sliceB0, wholeC))
		mustUnprepare(t, other, "free")
		ctx, cancel := context.WithCancel(t.Context())
		waiting := make(chan error)
		go func() { waiting <- runPrepare(ctx, other, newClaim("waits", sliceA4)) }()
		cancel()
		expect.Is(t, <-waiting, context.Canceled)
	}
	select {
	case err := <-done:
		t.Errorf("the hanging call returned: %v", err)
	default:
	}
	close(leave)
	expect.Is(t, <-done, nil)
	b.endAll(m, "hangs")
}

// TestManyAtOnce: many claims in two processes at once, on the same GPUs. All are prepared, and nothing is left at the end.
func TestManyAtOnce(t *testing.T) {
	b, one, other := newPair(t)
	managers := []*Manager{one, other}
	var wg sync.WaitGroup
	var uids []types.UID
	for i := range 7 {
		for g, whole := range []string{wholeA, wholeB} {
			m := managers[(i+g)%2]
			claim := newClaim(fmt.Sprint("u", i, "-", g), fmt.Sprint(whole, "-mig-1g10gb-", i))
			uids = append(uids, claim.UID)
			wg.Go(func() {
				for range 3 {
					expect.Is(t, runPrepare(t.Context(), m, claim), nil)
					expect.Is(t, m.Unprepare(t.Context(), claim.UID), nil)
				}
				expect.Is(t, runPrepare(t.Context(), m, claim), nil)
			})
		}
	}
	wg.Wait()
	if b.count(pciA) != 7 || b.count(pciB) != 7 {
		t.Errorf("not all are there: %v", b.state())
	}
	for _, uid := range uids {
		wg.Go(func() { expect.Is(t, one.Unprepare(t.Context(), uid), nil) })
	}
	wg.Wait()
	b.wantNothing()
}
