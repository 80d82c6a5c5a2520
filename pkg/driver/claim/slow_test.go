// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/mps"
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
	if d == 0 {
		return nil
	}
	if err := ctx.Err(); err != nil {
		s.count(&s.late)
		return &gpu.Error{Call: "nvmlAnything", PCIAddress: pciAddress, Text: "not attempted: " + err.Error(), Err: err}
	}
	s.count(&s.took)
	for each := s.of(&s.each); each > 0 && d > each; d -= each {
		time.Sleep(each)
		if err := ctx.Err(); err != nil {
			s.count(&s.late)
			return &gpu.Error{Call: "nvmlAnything", PCIAddress: pciAddress, Text: "not attempted: " + err.Error(), Err: err}
		}
	}
	time.Sleep(d)
	return nil
}

// process is what a process has of a box beside the hardware: the queues of its calls.
type process struct {
	*box
	calls *call.Queues
}

// left returns the error of a call, having left the calls in it that do not return in the queues of the process.
func (p process) left(err error) error {
	for _, out := range outIn(err) {
		_, _ = call.Do(context.Background(), p.calls.GPU(out.PCIAddress), out.Call, func() (bool, error) {
			<-out.Done
			return true, nil
		})
	}
	return err
}

// outIn finds all of them: a session may be on several GPUs.
func outIn(err error) []*gpu.PendingError {
	switch e := err.(type) { //nolint:errorlint // this walks through the wrapped ones
	case *gpu.PendingError:
		return []*gpu.PendingError{e}
	case interface{ Unwrap() error }:
		return outIn(e.Unwrap())
	case interface{ Unwrap() []error }:
		var all []*gpu.PendingError
		for _, wrapped := range e.Unwrap() {
			all = append(all, outIn(wrapped)...)
		}
		return all
	}
	return nil
}

// slowGPUs are the GPUs of a box as the driver's library reaches them.
type slowGPUs struct{ process }

func (b slowGPUs) MIGState(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	if err := b.slow.call(ctx, pciAddress); err != nil {
		return gpu.MIGState{}, err
	}
	answer, err := b.box.MIGState(ctx, pciAddress)
	return answer, b.left(err)
}

func (b slowGPUs) Processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	if err := b.slow.call(ctx, pciAddress); err != nil {
		return nil, err
	}
	answer, err := b.box.Processes(ctx, pciAddress)
	return answer, b.left(err)
}

func (b slowGPUs) SetMIGMode(ctx context.Context, pciAddress string, enabled bool) error {
	if err := b.slow.call(ctx, pciAddress); err != nil {
		return err
	}
	return b.left(b.box.SetMIGMode(ctx, pciAddress, enabled))
}

func (b slowGPUs) CreateInstance(ctx context.Context, pciAddress string, profileID uint32, at gpu.Placement) (int, error) {
	if err := b.slow.call(ctx, pciAddress); err != nil {
		return 0, err
	}
	answer, err := b.box.CreateInstance(ctx, pciAddress, profileID, at)
	return answer, b.left(err)
}

func (b slowGPUs) CreateComputeInstance(ctx context.Context, pciAddress string, instanceID int) (gpu.ComputeInstance, error) {
	if err := b.slow.call(ctx, pciAddress); err != nil {
		return gpu.ComputeInstance{}, err
	}
	answer, err := b.box.CreateComputeInstance(ctx, pciAddress, instanceID)
	return answer, b.left(err)
}

func (b slowGPUs) DestroyComputeInstance(ctx context.Context, pciAddress string, instanceID, computeID int) error {
	if err := b.slow.call(ctx, pciAddress); err != nil {
		return err
	}
	return b.left(b.box.DestroyComputeInstance(ctx, pciAddress, instanceID, computeID))
}

func (b slowGPUs) DestroyInstance(ctx context.Context, pciAddress string, instanceID int) error {
	if err := b.slow.call(ctx, pciAddress); err != nil {
		return err
	}
	return b.left(b.box.DestroyInstance(ctx, pciAddress, instanceID))
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
	if err := b.slow.call(ctx, d.PCIAddress); err != nil {
		return "", err
	}
	answer, err := b.box.Mode(ctx, d)
	return answer, b.left(err)
}

func (b slowSharing) SetExclusive(ctx context.Context, d sharing.Device, exclusive bool) error {
	if err := b.slow.call(ctx, d.PCIAddress); err != nil {
		return err
	}
	return b.left(b.box.SetExclusive(ctx, d, exclusive))
}

func (b slowSharing) SetInterval(ctx context.Context, d sharing.Device, interval sharing.Interval) error {
	if err := b.slow.call(ctx, d.PCIAddress); err != nil {
		return err
	}
	if takes := b.slow.of(&b.slow.smi); takes > 0 {
		b.slow.count(&b.slow.took)
		select {
		case <-time.After(takes):
		case <-ctx.Done():
			b.slow.count(&b.slow.late)
			return &gpu.Error{Call: "nvidia-smi compute-policy", PCIAddress: d.PCIAddress, Text: "killed: " + ctx.Err().Error(), Err: ctx.Err()}
		}
	}
	return b.left(b.box.SetInterval(ctx, d, interval))
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
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
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
