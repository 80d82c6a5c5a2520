// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/must"
)

// fakeHardware has GPUs that say what they are told.
type fakeHardware struct {
	events chan gpu.Event
	mu     sync.Mutex
	health map[string]gpu.Health
	errs   map[string]error
	states map[string]gpu.MIGState
	// fabric is what is said of the fabric in any MIG mode, and reads counts readings.
	fabric map[string]string
	reads  map[string]int
	// hang makes calls on a GPU hang.
	hang map[string]bool
	// slow is how long a look at partitions takes, and slowHealth one at the health.
	slow, slowHealth time.Duration
}

func newFakeHardware() *fakeHardware {
	return &fakeHardware{
		events: make(chan gpu.Event), health: map[string]gpu.Health{}, errs: map[string]error{},
		states: map[string]gpu.MIGState{}, hang: map[string]bool{}, fabric: map[string]string{}, reads: map[string]int{},
	}
}

func (f *fakeHardware) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeHardware) Events(ctx context.Context) <-chan gpu.Event {
	out := make(chan gpu.Event)
	go func() {
		defer close(out)
		for {
			select {
			case e := <-f.events:
				out <- e
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

func (f *fakeHardware) Unmonitored(string) error { return nil }

func (f *fakeHardware) wait(ctx context.Context, pci string) error {
	hang := false
	f.set(func() { hang = f.hang[pci] })
	if !hang {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(call.DefaultLimit):
		return gpu.ErrHung
	}
}

func (f *fakeHardware) Health(ctx context.Context, pci string) (gpu.Health, error) {
	if err := f.wait(ctx, pci); err != nil {
		return gpu.Health{}, err
	}
	var slow time.Duration
	f.set(func() { slow = f.slowHealth })
	time.Sleep(slow)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reads[pci]++
	return f.health[pci], f.errs[pci]
}

func (f *fakeHardware) FabricPending(_ context.Context, pci string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fabric[pci], nil
}

func (f *fakeHardware) MIGState(ctx context.Context, pci string) (gpu.MIGState, error) {
	if err := f.wait(ctx, pci); err != nil {
		return gpu.MIGState{}, err
	}
	var slow time.Duration
	f.set(func() { slow = f.slow })
	time.Sleep(slow)
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.states[pci], nil
}

// inBubble runs a test of hardware in a bubble.
func inBubble(t *testing.T, test func(t *testing.T, h *fakeHardware)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, newFakeHardware()) })
}

// station is a monitor of two GPUs in a bubble.
type station struct {
	*Monitor
	hardware *fakeHardware
	changes  atomic.Int32
	mu       sync.Mutex
	programs []ProgramError
	holds    []Hold
	observed []uint64
	end      func()
}

func newStation(t *testing.T, dir string, hardware *fakeHardware) *station {
	t.Helper()
	s := &station{hardware: hardware}
	s.Monitor = New(Options{
		Hardware: hardware, DataDir: dir, BootID: "boot-1", Interval: 10 * time.Second,
		Changed:      func() { s.changes.Add(1) },
		Report:       func(_ context.Context, e ProgramError) { s.note(func() { s.programs = append(s.programs, e) }) },
		HeldBack:     func(_ context.Context, h Hold) { s.note(func() { s.holds = append(s.holds, h) }) },
		ObserveEvent: func(e gpu.Event) { s.note(func() { s.observed = append(s.observed, e.XID) }) }, ObserveHealth: func(string, gpu.Health, error) {},
	})
	s.Follow(map[string]string{pciA: "GPU-A", pciB: "GPU-B"}, policy.Builtin().Health)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { s.Run(ctx); close(done) }()
	s.end = func() { cancel(); <-done }
	t.Cleanup(s.end)
	synctest.Wait()
	return s
}

func (s *station) note(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
}

func (s *station) send(pci string, xid uint64, instance int) {
	s.deliver(pci, xid, instance, 0)
}

// deliver sends an XID that may be older, by as much.
func (s *station) deliver(pci string, xid uint64, instance int, old time.Duration) {
	now := time.Now()
	s.hardware.events <- gpu.Event{
		Time: now, NotBefore: now.Add(-old), PCIAddress: pci, Kind: gpu.EventXID, XID: xid, InstanceID: instance, ComputeInstanceID: -1,
	}
	synctest.Wait()
}

func (s *station) shows() string {
	var all []string
	for _, c := range s.Conditions() {
		all = append(all, short(c))
	}
	return strings.Join(all, "; ")
}

func (s *station) want(t *testing.T, when, want string) {
	t.Helper()
	synctest.Wait()
	if got := s.shows(); got != want {
		t.Errorf("%s: %q, want %q", when, got, want)
	}
}

func partitioned(uuids ...string) gpu.MIGState {
	state := gpu.MIGState{Enabled: true}
	for i, uuid := range uuids {
		state.Instances = append(state.Instances, gpu.Instance{
			ID: i + 7, ProfileID: 19, Placement: gpu.Placement{Start: i, Size: 1}, Compute: []gpu.ComputeInstance{{ID: 0, UUID: uuid}},
		})
	}
	return state
}

// TestMonitor: an event is about the partition that has the instance now; its fault ends with
// it, without anybody's asking.
func TestMonitor(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.states[pciA] = partitioned("MIG-1", "MIG-2")
		s := newStation(t, t.TempDir(), h)
		s.send(pciA, 94, 8)
		s.want(t, "an XID", "xid=94 NoSchedule at 1:1")
		if s.changes.Load() != 1 {
			t.Errorf("%d changes", s.changes.Load())
		}
		s.send(pciA, 94, 8)
		s.send(pciA, 94, 9)
		s.want(t, "the instance is not there", "xid=94 NoSchedule at 1:1; xid=94 NoSchedule")
		if s.changes.Load() != 2 {
			t.Errorf("%d changes", s.changes.Load())
		}
		h.set(func() { h.states[pciA] = partitioned("MIG-1", "MIG-3") })
		time.Sleep(11 * time.Second)
		s.want(t, "another partition", "xid=94 NoSchedule")
		time.Sleep(10 * time.Minute)
		s.want(t, "quiet", "")
		s.send(pciB, 95, 7)
		time.Sleep(2 * readPause)
		h.set(func() { h.health[pciB] = gpu.Health{RecoveryAction: gpu.RecoveryReset} })
		s.hardware.events <- gpu.Event{Time: time.Now(), PCIAddress: pciB, Kind: gpu.EventRecoveryAction, InstanceID: -1, ComputeInstanceID: -1}
		s.want(t, "read at once", "xid=95 NoExecute on "+pciB+"; recovery-required=reset NoSchedule on "+pciB)
		h.set(func() { h.health[pciB] = gpu.Health{RecoveryAction: gpu.RecoveryNone} })
		time.Sleep(11 * time.Second)
		s.want(t, "reset", "")
		s.Follow(map[string]string{pciB: "GPU-B"}, policy.Builtin().Health)
		s.send(pciA, 95, 7)
		s.want(t, "a GPU that is not followed", "")
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.observed) != 6 {
			t.Errorf("observed %v", s.observed)
		}
	})
}

// TestReusedInstance: an event that may be older than the partition that now has the instance is
// not about that partition. It keeps new pods away from the GPU and evicts nobody, whatever the
// policy has for it; one of all of the GPU does.
func TestReusedInstance(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		state := partitioned("MIG-1", "MIG-2")
		state.Instances[1].IDSince = time.Now().Add(-10 * time.Second)
		h.states[pciA] = state
		dir := t.TempDir()
		s := newStation(t, dir, h)
		reaction := policy.Builtin().Health
		reaction.XIDs = map[uint64]policy.Effect{94: policy.EffectNoExecute}
		uuids := map[string]string{pciA: "GPU-A", pciB: "GPU-B"}
		s.Follow(uuids, reaction)
		s.deliver(pciA, 94, 8, 20*time.Second)
		s.deliver(pciA, 31, 8, 20*time.Second)
		s.want(t, "an old event", "xid=94 NoSchedule")
		if got := s.Conditions()[0].Message; !strings.Contains(got, "on a partition that is not known") {
			t.Errorf("the condition says %q", got)
		}
		s.mu.Lock()
		if len(s.programs) != 0 {
			t.Errorf("told those who have the partition now: %+v", s.programs)
		}
		s.mu.Unlock()
		s.end()
		s = newStation(t, dir, h)
		s.Follow(uuids, reaction)
		s.want(t, "restarted", "xid=94 NoSchedule")
		s.deliver(pciA, 94, 8, 5*time.Second)
		s.want(t, "an event that is younger than the partition", "xid=94 NoSchedule; xid=94 NoExecute at 1:1")
		s.send(pciA, 94, -1)
		s.want(t, "an event of all of the GPU", "xid=94 NoSchedule; xid=94 NoExecute at 1:1; xid=94 NoExecute")
		s.deliver(pciA, 119, 8, 20*time.Second)
		s.want(t, "what is about all of the GPU whatever it names",
			"xid=94 NoSchedule; xid=94 NoExecute at 1:1; xid=94 NoExecute; xid=119 NoExecute")
	})
}

// TestReusedInstanceInQueue: of events that wait for the look together, the last one says how old
// they are.
func TestReusedInstanceInQueue(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.states[pciA] = partitioned("MIG-1", "MIG-2")
		h.slow = 3 * time.Second
		s := newStation(t, t.TempDir(), h)
		s.send(pciA, 48, 8) // keeps the queue busy
		s.send(pciA, 94, 7)
		s.send(pciA, 94, 8)
		time.Sleep(time.Second)
		h.set(func() {
			// Both partitions go, and others get their instances.
			state := partitioned("MIG-3", "MIG-4")
			for i := range state.Instances {
				state.Instances[i].IDSince = time.Now()
			}
			h.states[pciA] = state
		})
		time.Sleep(time.Second)
		s.send(pciA, 94, 7)
		time.Sleep(11 * time.Second)
		s.want(t, "both", "xid=48 NoSchedule; xid=94 NoSchedule; xid=94 NoSchedule at 0:1")
	})
}

// TestHungGPU: one that hangs is said to, and keeps back nothing of the other; its own events
// count for all of it.
func TestHungGPU(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.states[pciA], h.states[pciB] = partitioned("MIG-1"), partitioned("MIG-2")
		s := newStation(t, t.TempDir(), h)
		h.set(func() { h.hang[pciA] = true })
		time.Sleep(15 * time.Second)
		s.send(pciA, 94, 7)
		s.send(pciB, 94, 7)
		s.want(t, "the other GPU's event", "xid=94 NoSchedule at 0:1 on "+pciB)
		time.Sleep(placeLimit)
		s.want(t, "its own event", "xid=94 NoSchedule; xid=94 NoSchedule at 0:1 on "+pciB)
		h.set(func() { h.errs[pciB] = gpu.ErrLost })
		time.Sleep(10 * time.Second)
		s.want(t, "the other GPU's readings", "xid=94 NoSchedule; xid=94 NoSchedule at 0:1 on "+pciB+"; gpu-lost NoSchedule on "+pciB)
		time.Sleep(call.DefaultLimit)
		if got := s.shows(); !strings.Contains(got, "unresponsive NoSchedule;") {
			t.Errorf("a call that does not return: %s", got)
		}
	})
}

// TestSlowGPU: a GPU that answers each call is not silent, however long all calls of a reading take together.
func TestSlowGPU(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.slowHealth = 2 * time.Minute
		h.health[pciA] = gpu.Health{RowRemapFailed: true}
		s := newStation(t, t.TempDir(), h)
		time.Sleep(119 * time.Second)
		s.want(t, "while it is read", "")
		time.Sleep(2 * time.Second)
		s.want(t, "what was read", "row-remap-failed NoSchedule")
		time.Sleep(110 * time.Second)
		s.want(t, "while it is read again", "row-remap-failed NoSchedule")
	})
}

// TestStorm: a program that fails in a loop costs its own partition only, however slow the look
// at the partitions is; more different events than can wait count for all of the GPU.
func TestStorm(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.states[pciA] = partitioned("MIG-1", "MIG-2")
		h.slow = time.Second
		s := newStation(t, t.TempDir(), h)
		for range 3 * queueLength {
			s.send(pciA, 94, 7)
			s.send(pciA, 31, 7)
		}
		time.Sleep(time.Minute)
		s.want(t, "a storm", "xid=94 NoSchedule at 0:1")
		s.mu.Lock()
		if len(s.observed) != 6*queueLength {
			t.Errorf("%d events observed", len(s.observed))
		}
		if len(s.programs) != 1 || s.programs[0].Place == nil {
			t.Errorf("reported %+v", s.programs)
		}
		s.mu.Unlock()

		h.set(func() { h.hang[pciB] = true })
		for i := range queueLength + 2 {
			s.send(pciB, 94, i)
		}
		s.want(t, "more than can wait", "xid=94 NoSchedule at 0:1; xid=94 NoSchedule on "+pciB)
	})
}

// TestProgramErrors are reported, but not each of them, and are no conditions.
func TestProgramErrors(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		h.states[pciA] = partitioned("MIG-1", "MIG-2")
		s := newStation(t, t.TempDir(), h)
		for range 5 {
			s.send(pciA, 31, 7)
			s.send(pciA, 31, 8)
			s.send(pciB, 13, -1)
			s.send(pciB, 63, -1)
			s.send(pciA, 31, 9) // of a partition that has gone: nobody's
			time.Sleep(time.Minute)
		}
		s.send(pciA, 31, 7)
		s.want(t, "errors of programs", "")
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.programs) != 4 {
			t.Fatalf("reported %+v", s.programs)
		}
		if p := s.programs[1]; p.PCIAddress != pciA || p.Place == nil || p.Place.Start != 1 || !strings.HasPrefix(p.Text, "XID 31 (GPU memory page fault). ") {
			t.Errorf("reported %+v", p)
		}
		if p := s.programs[2]; p.Place != nil {
			t.Errorf("reported %+v", p)
		}
	})
}

// TestHistory: what was wrong is known after a restart, and how often it was.
func TestHistory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := newFakeHardware()
		h.states[pciA] = partitioned("MIG-1")
		restart := func(s *station) *station { s.end(); return newStation(t, dir, h) }
		s := newStation(t, dir, h)
		s.send(pciA, 94, 7)
		s.send(pciA, 95, -1)
		s = restart(s)
		s.want(t, "restarted", "xid=94 NoSchedule at 0:1; xid=95 NoExecute")
		if s.changes.Load() != 0 {
			t.Errorf("%d changes by a restart", s.changes.Load())
		}

		h.set(func() { h.errs[pciB] = gpu.ErrLost })
		time.Sleep(11 * time.Second)
		h.set(func() { h.errs[pciB] = nil })
		time.Sleep(11 * time.Second)
		s = restart(s)
		h.set(func() { h.errs[pciB] = gpu.ErrLost })
		time.Sleep(11 * time.Second)
		h.set(func() { h.errs[pciB] = nil })
		time.Sleep(11 * time.Second)
		s.want(t, "lost for the second time", "xid=94 NoSchedule at 0:1; xid=95 NoExecute; gpu-lost NoSchedule on "+pciB)
		s.mu.Lock()
		if len(s.holds) != 1 || s.holds[0].PCIAddress != pciB || s.holds[0].Earlier != 1 || time.Until(s.holds[0].Until) > 10*time.Minute {
			t.Errorf("told of %+v", s.holds)
		}
		s.mu.Unlock()

		s.end()
		path := filepath.Join(dir, FileName)
		if info, err := os.Stat(path); err != nil || info.Mode() != fileMode {
			t.Errorf("%v, %v", info, err)
		}
		for what, change := range map[string]func(text string) string{
			"damaged":         func(text string) string { return text[:len(text)/2] },
			"of a version":    func(text string) string { return strings.Replace(text, fileVersion, "health.partage.dev/v9", 1) },
			"unknown ending":  func(text string) string { return strings.Replace(text, `"ending": "quiet"`, `"ending": "never"`, 1) },
			"null for faults": func(text string) string { return strings.Replace(text, `"faults": [`, `"faults": [null,`, 1) },
		} {
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			must.Do(t, os.WriteFile(path, []byte(change(string(content))), fileMode))
			if gpus, err := (&historyFile{path: path, bootID: "boot-1"}).read(time.Now()); err == nil || len(gpus) != 0 {
				t.Errorf("%s: read as %v", what, gpus)
			}
			s = newStation(t, dir, h)
			s.want(t, what, "")
			s.end()
			must.Do(t, os.WriteFile(path, content, fileMode))
		}
		content := must.Get(os.ReadFile(path))(t)
		newer := []byte(strings.Replace(string(content), `"gpus"`, `"more": 1, "gpus"`, 1))
		must.Do(t, os.WriteFile(path, newer, fileMode))
		gpus, err := (&historyFile{path: path, bootID: "boot-1"}).read(time.Now())
		if err != nil || len(gpus) != 2 {
			t.Errorf("of a newer driver: %v, %v", gpus, err)
		}
		gpus, err = (&historyFile{path: path, bootID: "boot-2"}).read(time.Now())
		if err != nil || len(gpus) != 2 || len(gpus[pciA].Faults) != 0 || gpus[pciB].Past[0].Count != 1 || gpus[pciA].UUID != "GPU-A" {
			t.Errorf("in another boot: %v, %v", gpus, err)
		}
		gpus, err = (&historyFile{path: path, bootID: "boot-1"}).read(time.Now().Add(remember + time.Hour))
		if err != nil || len(gpus) != 0 {
			t.Errorf("much later: %v, %v", gpus, err)
		}
		gpus, err = (&historyFile{path: path, bootID: "boot-1"}).read(time.Now().Add(-time.Hour))
		if err != nil || gpus[pciA].Faults[0].Last.After(time.Now().Add(-time.Hour)) {
			t.Errorf("with a clock that was put back: %v, %v", gpus, err)
		}
	})
}

// TestClockPutBack: what was written down by a clock that was ahead lasts no longer for it.
func TestClockPutBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		ahead := time.Now().AddDate(10, 0, 0).UTC().Format(time.RFC3339)
		content := `{"apiVersion": "` + fileVersion + `", "kind": "` + fileKind + `", "bootID": "boot-1", "gpus": {
			"` + pciA + `": {"uuid": "GPU-A", "faults": [{"reason": "gpu-lost", "ending": "reading", "detail": "lost",
				"first": "` + ahead + `", "last": "` + ahead + `", "gone": "` + ahead + `"}]},
			"` + pciB + `": {"uuid": "GPU-B", "wants": "None", "content": "` + ahead + `", "faults": [{"reason": "xid", "xid": 79, "value": "79",
				"ending": "reset", "detail": "XID 79", "first": "` + ahead + `", "last": "` + ahead + `"}]}}}`
		must.Do(t, os.WriteFile(filepath.Join(dir, FileName), []byte(content), fileMode))
		h := newFakeHardware()
		h.health[pciB] = gpu.Health{RecoveryAction: gpu.RecoveryNone}
		s := newStation(t, dir, h)
		time.Sleep(21 * time.Minute)
		s.want(t, "long after it was over", "")
	})
}

// TestNoPlaceForHistory: the GPUs are followed all the same.
func TestNoPlaceForHistory(t *testing.T) {
	inBubble(t, func(t *testing.T, h *fakeHardware) {
		s := newStation(t, filepath.Join(t.TempDir(), "none"), h)
		s.send(pciA, 95, -1)
		s.want(t, "an XID", "xid=95 NoExecute")
	})
}

// TestWrites: a fault that lasts is not written down at every reading.
func TestWrites(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := newFakeHardware()
		h.errs[pciA] = errors.Join(errors.New("read"), gpu.ErrLost)
		newStation(t, dir, h)
		writes, last := 0, []byte(nil)
		for range 360 {
			time.Sleep(10 * time.Second)
			synctest.Wait()
			now := must.Get(os.ReadFile(filepath.Join(dir, FileName)))(t)
			if string(now) != string(last) {
				writes++
			}
			last = now
		}
		if writes > 62 {
			t.Errorf("%d writes in an hour", writes)
		}
	})
}
