// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// world is a node with two GPUs and claims on them.
type world struct {
	mu      sync.Mutex
	live    []claim.LiveClaim
	changed chan struct{}
	// used is what is used of a GPU; one that hangs waits for the channel.
	used  map[string]gpu.Usage
	hangs map[string]chan struct{}
	// pods are those that a claim is reserved for; asked counts.
	pods  map[types.UID][]string
	asked int
	down  bool
	// environ is that of processes; one that hangs waits for a channel, too. warned are the events.
	environ map[int]string
	warned  []string
}

func newWorld() *world {
	return &world{
		changed: make(chan struct{}),
		used:    map[string]gpu.Usage{}, hangs: map[string]chan struct{}{}, pods: map[types.UID][]string{},
	}
}

// with does something to the world.
func (w *world) with(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
}

func (w *world) Live() (live []claim.LiveClaim, err error) {
	w.with(func() { live = w.live })
	return live, nil
}

func (w *world) RecordCounts() (map[string]int, error) {
	live, err := w.Live()
	return map[string]int{"prepared": len(live)}, err
}

func (*world) GPUs() []string { return []string{"A", "B"} }

func (w *world) Changed() (changed <-chan struct{}) {
	w.with(func() { changed = w.changed })
	return changed
}

func (w *world) hold(live ...claim.LiveClaim) {
	w.with(func() {
		w.live = live
		close(w.changed)
		w.changed = make(chan struct{})
	})
}

func (w *world) use(pci string, memory uint64, processes ...gpu.ProcessUsage) {
	w.with(func() {
		w.used[pci] = gpu.Usage{UsedBytes: memory, Processes: append([]gpu.ProcessUsage{}, processes...)}
	})
}

func (w *world) Usage(_ context.Context, pci string, _ []gpu.PartitionID, _ time.Time) (gpu.Usage, error) {
	w.mu.Lock()
	hang := w.hangs[pci]
	w.mu.Unlock()
	if hang != nil {
		<-hang
		return gpu.Usage{}, &gpu.PendingError{PCIAddress: pci}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	usage := w.used[pci]
	usage.Time = time.Now()
	return usage, nil
}

func (w *world) List(context.Context) ([]mps.Status, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.down {
		return nil, errors.New("nobody answers")
	}
	return []mps.Status{{Phase: mps.Running}, {Phase: mps.Running}, {Phase: mps.Failed}}, nil
}

func (w *world) Claim(_ context.Context, ref claim.Ref) (*resourceapi.ResourceClaim, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked++
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: ref.Name, UID: ref.UID}}
	for _, pod := range w.pods[ref.UID] {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "pod-" + pod, UID: types.UID(pod)})
	}
	return c, nil
}

const interval = 10 * time.Second

// run starts a sampler in a bubble.
func (w *world) run(t *testing.T) *Sampler {
	t.Helper()
	s := New(Options{
		Claims: w, GPUs: w, Sessions: w, Facts: NewFacts("gpu.nvidia.com", w), Interval: interval,
		PodOf:   func(pid int) string { return map[int]string{1: "a", 2: "b"}[pid/10] },
		Environ: w.environOf, Warn: w.warn,
	})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return s
}

func (w *world) environOf(pid int) string {
	if w.environ[pid] == "hangs" {
		<-w.hangs["environ"]
	}
	return w.environ[pid]
}

func (w *world) warn(_ context.Context, ref claim.Ref, reason, _ string) {
	w.with(func() { w.warned = append(w.warned, ref.Name+" "+reason) })
}

func claimNamed(name, pci string, kind device.Kind) claim.LiveClaim {
	return claim.LiveClaim{
		Claim:   claim.Ref{Namespace: "n", Name: name, UID: types.UID(name)},
		Devices: []claim.LiveDevice{{Device: "gpu-" + pci, PCIAddress: pci, Kind: kind}},
	}
}

func pass(d time.Duration) {
	time.Sleep(d) // in a bubble
	synctest.Wait()
}

// TestPeakAndIdle: the peak stays, idle time counts from the last work, and both end with the
// claim.
func TestPeakAndIdle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		whole := claimNamed("c", "A", device.Whole)
		whole.Devices[0].Resources.MemoryBytes = 1000
		w.hold(whole)
		w.use("A", 0)
		s := w.run(t)
		pass(2 * interval)
		one := s.Snapshot().Claims[0]
		if *one.MemoryBytes != 0 || *one.Idle < interval || *one.RequestedBytes != 1000 {
			t.Errorf("before: %+v, idle %v", one, *one.Idle)
		}
		w.use("A", 70, process(10, -1, 70))
		pass(2 * interval)
		w.use("A", 30, process(10, -1, 30))
		pass(2 * interval)
		if one = s.Snapshot().Claims[0]; *one.MemoryBytes != 30 || *one.PeakBytes != 70 || *one.Idle != 0 || *one.Processes != 1 {
			t.Errorf("while: %+v", one)
		}
		w.use("A", 0)
		pass(5 * interval)
		if one = s.Snapshot().Claims[0]; *one.MemoryBytes != 0 || *one.PeakBytes != 70 || *one.Idle < 3*interval || *one.Idle > 6*interval {
			t.Errorf("after: %+v, idle %v", one, *one.Idle)
		}
		w.hold()
		pass(2 * together)
		expect.Len(t, s.Snapshot().Claims, 0, "released")
		w.hold(whole)
		pass(2 * together)
		if one = s.Snapshot().Claims[0]; one.PeakBytes != nil {
			t.Errorf("prepared again: the peak is still %d", *one.PeakBytes)
		}
	})
}

// TestHang: a GPU that does not answer delays neither snapshots nor other GPUs, and what was
// read of it is not told for ever.
func TestHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.hold(claimNamed("a", "A", device.Whole), claimNamed("b", "B", device.Whole))
		w.use("A", 5)
		w.use("B", 6)
		s := w.run(t)
		pass(2 * interval)
		stuck := make(chan struct{})
		w.with(func() { w.hangs["A"] = stuck })
		defer close(stuck)
		pass(2 * interval)
		w.use("B", 7)
		pass(2 * interval)
		now := s.Snapshot()
		if *now.Claims[0].MemoryBytes != 5 || *now.Claims[1].MemoryBytes != 7 || now.GPUs["B"].Sampled.Sub(now.GPUs["A"].Sampled) < interval {
			t.Errorf("soon: %+v", now)
		}
		pass(10 * interval)
		now = s.Snapshot()
		if now.Claims[0].MemoryBytes != nil || now.Claims[0].Idle != nil || now.GPUs["A"].Usage != nil || now.GPUs["A"].Sampled.IsZero() {
			t.Errorf("later: %+v", now.Claims[0])
		}
		if *now.Claims[0].PeakBytes != 5 || *now.Claims[1].MemoryBytes != 7 {
			t.Errorf("later: %+v", now.Claims)
		}
	})
}

// TestTogether: all GPUs are sampled at the same time, once in an interval, so that the process
// rests in between.
func TestTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.hold(claimNamed("a", "A", device.Whole), claimNamed("b", "B", device.Whole))
		s := w.run(t)
		synctest.Wait()
		first := s.Snapshot().GPUs
		if a, b := first["A"].Sampled, first["B"].Sampled; a.IsZero() || !a.Equal(b) {
			t.Errorf("sampled at %v and %v", a, b)
		}
		pass(interval)
		for pci, now := range s.Snapshot().GPUs {
			expect.Equal(t, now.Sampled.Sub(first[pci].Sampled), interval, pci, "is sampled again after")
		}
	})
}

// TestLaterPod: a claim may be reserved for another pod after it was prepared; the API server
// is asked about that, and not at every sample.
func TestLaterPod(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.hold(claimNamed("c", "A", device.MPS))
		w.pods["c"] = []string{"a"}
		w.use("A", 30, process(10, -1, 10), process(20, -1, 20))
		s := w.run(t)
		pass(2 * interval)
		if one := s.Snapshot().Claims[0]; *one.MemoryBytes != 10 || len(one.Pods) != 1 || one.Pods[0] != "pod-a" {
			t.Errorf("one pod: %+v", one)
		}
		w.with(func() { w.pods["c"] = []string{"a", "b"} })
		pass(2 * askAgain)
		if one := s.Snapshot().Claims[0]; *one.MemoryBytes != 30 || len(one.Pods) != 2 || w.asked > 4 {
			t.Errorf("two pods: %+v after %d questions", one, w.asked)
		}
	})
}

// TestNobodySamples: where metrics are switched off nobody forgets claims, and so none is
// remembered.
func TestNobodySamples(t *testing.T) {
	t.Parallel()
	f := NewFacts("gpu.nvidia.com", newWorld())
	for i := range 100 {
		must.Get(f.Claim(t.Context(), claim.Ref{Namespace: "n", Name: "c", UID: types.UID(fmt.Sprint(i))}))(t)
	}
	expect.Equal(t, len(f.known)+len(f.asked), 0, "claims that are remembered for ever")
}

// TestSessions: MPS servers are counted, and not known without a supervisor.
func TestSessions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		s := w.run(t)
		pass(2 * interval)
		if got := s.Snapshot().Sessions; got[mps.Running] != 2 || got[mps.Failed] != 1 {
			t.Errorf("got %v", got)
		}
		w.with(func() { w.down = true })
		pass(2 * interval)
		if got := s.Snapshot().Sessions; got != nil {
			t.Errorf("without a supervisor: %v", got)
		}
	})
}

// TestIgnoredLimit: a claim is told once that a program asks for a limit in vain, and not where the driver holds one. A process
// that keeps its reader waiting keeps nobody else from being sampled.
func TestIgnoredLimit(t *testing.T) {
	t.Parallel()
	const asks = "PATH=/bin\x00NVIDIA_GPU_MEMORY_LIMIT=1024\x00"
	for name, test := range map[string]struct {
		environ string
		kind    device.Kind
		held    bool
		pod     string
		want    []string
	}{
		"a whole GPU":           {asks, device.Whole, false, "a", []string{"c MemoryLimitIgnored"}},
		"a share":               {asks, device.TimeSlice, false, "a", []string{"c MemoryLimitIgnored"}},
		"a share that is held":  {asks, device.TimeSlice, true, "a", nil},
		"another pod's program": {asks, device.TimeSlice, false, "b", nil},
		"another variable":      {"MY_NVIDIA_GPU_MEMORY_LIMIT=1\x00NVIDIA_GPU_MEMORY_LIMITS=1", device.TimeSlice, false, "a", nil},
		"an endless look":       {"hangs", device.TimeSlice, false, "a", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				w.environ = map[int]string{10: test.environ}
				w.hangs["environ"] = make(chan struct{})
				defer close(w.hangs["environ"])
				c := claimNamed("c", "A", test.kind)
				c.Devices[0].Limits = &claim.LiveLimits{MemoryBytes: 1, Held: test.held}
				w.hold(c)
				w.pods["c"] = []string{test.pod}
				w.use("A", 30, process(10, -1, 10))
				s := w.run(t)
				pass(3 * interval)
				var warned []string
				if w.with(func() { warned = w.warned }); !slices.Equal(warned, test.want) {
					t.Errorf("events %q, want %q", warned, test.want)
				}
				if test.environ != "hangs" {
					return
				}
				w.use("A", 99, []gpu.ProcessUsage{process(10, -1, 10), process(11, -1, 10)}...)
				pass(2 * interval)
				if got := s.Snapshot().GPUs["A"]; got.Usage == nil || got.Usage.UsedBytes != 99 {
					t.Errorf("the GPU is not sampled any more: %+v", got)
				}
			})
		})
	}
}

// lateSessions is a busy supervisor, whose first answer comes after the second.
type lateSessions struct{ asked atomic.Int32 }

func (l *lateSessions) List(context.Context) ([]mps.Status, error) {
	if l.asked.Add(1) == 1 {
		time.Sleep(4 * time.Second)
		return []mps.Status{{Phase: mps.Failed}}, nil
	}
	return []mps.Status{{Phase: mps.Running}}, nil
}

// TestLateAnswer: nobody asks the supervisor while an earlier question is open, so that no answer replaces a newer one.
func TestLateAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := &lateSessions{}
		s := New(Options{Sessions: late, Interval: time.Second})
		go s.list(t.Context())
		time.Sleep(time.Second)
		s.list(t.Context())
		if asked := late.asked.Load(); asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		time.Sleep(10 * time.Second)
		s.list(t.Context())
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.sessions[mps.Running] != 1 {
			t.Errorf("sessions %v", s.sessions)
		}
	})
}
