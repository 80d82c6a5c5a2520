// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package converge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// TestMain keeps what the many deaths have to say off the screen.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	m.Run()
}

// The devices of claims: what they are, by a short name.
func deviceNamed(name string, uid types.UID) record.Device {
	address, kind, _ := strings.Cut(name, " ")
	pci := map[string]string{"A": pciA, "B": pciB}[address]
	d := record.Device{
		Requests: []string{name}, Pool: "node", Device: device.GPUName(pci) + "-" + kind, PCIAddress: pci, Type: device.Whole, DynamicMIG: true, Divisible: true,
	}
	share := types.UID("share-" + string(uid))
	switch kind {
	case "slice0", "slice4":
		d.Type = device.Partition
		d.Partition = &record.Partition{Profile: "1g", Place: record.Place{ProfileID: 19, Placement: gpu.Placement{Start: int(kind[5] - '0'), Size: 1}}}
	case "mps", "half":
		d.Type, d.ShareID = device.MPS, &share
		d.Sharing = &record.Sharing{UUID: "GPU-" + pci, Session: device.GPUName(pci), Limits: record.Limits{Percent: 25}}
		if kind == "half" {
			d.Device, d.Sharing.Limits.Percent = device.GPUName(pci)+"-mps", 50
		}
	case "turns":
		d.Type, d.ShareID = device.TimeSlice, &share
		d.Sharing = &record.Sharing{UUID: "GPU-" + pci, Interval: policy.IntervalLong}
	case "look":
		d.Admin, d.Divisible = true, false
	case "own":
		d.Sharing = &record.Sharing{UUID: "GPU-" + pci, Session: device.GPUName(pciA)}
	}
	return d
}

func wanted(e *Engine, uid types.UID, devices ...string) *Call {
	r := &record.Record{Claim: record.Ref{Namespace: "team", Name: string(uid), UID: uid}, State: record.Preparing, BootID: boot}
	r.Arrived = e.Clock()
	for _, name := range devices {
		d := deviceNamed(name, uid)
		r.Devices = append(r.Devices, d)
		if d.Sharing == nil || d.Sharing.Session == "" {
			continue
		}
		id := d.Sharing.Session
		if r.Session(id) == nil {
			r.Sessions = append(r.Sessions, record.Session{ID: id, Shared: d.ShareID != nil, MultiUser: true})
		}
		s := r.Session(id)
		s.Devices = append(s.Devices, record.SessionDevice{Device: d.Device, PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID})
	}
	was, _ := e.Store.Read(uid)
	return &Call{Wanted: r, Was: was}
}

// layouts are claims that are prepared one after the other; the last one is what is struck.
var layouts = map[string][][]string{
	"partition":                 {{"A slice0"}},
	"second partition":          {{"A slice4"}, {"A slice0"}},
	"two partitions":            {{"A slice0", "A slice4"}},
	"partitions of two GPUs":    {{"A slice0", "B slice4"}},
	"whole":                     {{"A whole"}},
	"whole and partition":       {{"A whole", "B slice0"}},
	"MPS share":                 {{"A mps"}},
	"larger MPS share":          {{"A mps"}, {"A half"}},
	"MPS of its own on two":     {{"A own", "B own"}},
	"time slice":                {{"A turns"}},
	"second time slice":         {{"A turns"}, {"A turns"}},
	"MPS share and time slices": {{"B turns"}, {"A mps", "B turns"}},
}

// settle does everything that is due.
func settle(t *testing.T, e *Engine) {
	t.Helper()
	for _, address := range []string{pciA, pciB} {
		decision, err := e.Converge(t.Context(), address, everything)
		if err != nil || decision == nil {
			o := e.observe(t.Context(), address, nil, nil)
			t.Fatalf("GPU %s: busy %t, %v; %+v -> %+v", address, decision == nil, err, o.Observation, rules.Decide(o.Observation))
		}
		if len(decision.Tasks) > 0 {
			t.Fatalf("GPU %s does not come to rest: %+v", address, decision.Tasks)
		}
	}
}

func release(t *testing.T, e *Engine, uid types.UID) error {
	t.Helper()
	known, err := e.Store.Release(uid, e.Clock())
	if err != nil {
		known = e.Store.Snapshot()
	}
	r := cmp.Or(known.Of(uid), &record.Record{Claim: record.Ref{UID: uid}})
	return errors.Join(err, e.Specs.Remove(t.Context(), uid), e.Finish(t.Context(), r, r.GPUs()))
}

func mustPrepare(t *testing.T, e *Engine, uid types.UID, devices ...string) *record.Record {
	t.Helper()
	r, err := e.Prepare(t.Context(), wanted(e, uid, devices...))
	if err != nil {
		t.Fatalf("prepare %s: %v", uid, err)
	}
	return r
}

func mustRelease(t *testing.T, e *Engine, uid types.UID) {
	t.Helper()
	if err := release(t, e, uid); err != nil {
		t.Errorf("release %s: %v", uid, err)
	}
}

func wantLeft(t *testing.T, m *machine, when string, want []string) {
	t.Helper()
	if got := m.left(); !slices.Equal(got, want) {
		t.Errorf("%s: there is\n%q, want\n%q", when, got, want)
	}
}

// TestStruck fails every effect of preparing and of releasing a claim, and kills the process there. What the claims beside
// have stays, nothing is left of the one that was struck after its release, and a repeated call prepares it.
func TestStruck(t *testing.T) {
	cases := 0
	for name, layout := range layouts {
		for _, dies := range []bool{true, false} {
			for _, prepared := range []bool{false, true} {
				for n := 1; ; n++ {
					if !struckAt(t, fmt.Sprintf("%s, prepared before: %t, killed: %t, effect %d", name, prepared, dies, n), layout, n, dies, prepared) {
						break
					}
					if cases++; n > 100 {
						t.Fatalf("%s: there is no end", name)
					}
				}
			}
		}
	}
	// Claims on several GPUs have more effects in some orders than in others.
	const want = 265
	if cases < want {
		t.Errorf("%d cases, want %d at least", cases, want)
	}
}

// struckAt returns false where the call has fewer effects.
func struckAt(t *testing.T, name string, layout [][]string, n int, dies, prepared bool) (struck bool) {
	t.Helper()
	m := newMachine(t)
	e := m.engine()
	last := len(layout) - 1
	for i, devices := range layout[:last] {
		if _, err := e.Prepare(t.Context(), wanted(e, types.UID(fmt.Sprintf("beside-%d", i)), devices...)); err != nil {
			t.Fatalf("%s: beside: %v", name, err)
		}
	}
	before := m.left()
	if prepared {
		if _, err := e.Prepare(t.Context(), wanted(e, "u", layout[last]...)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	m.strike(n, dies)
	var err error
	if prepared {
		err = release(t, e, "u")
	} else {
		_, err = e.Prepare(t.Context(), wanted(e, "u", layout[last]...))
	}
	count := len(m.effects)
	m.heal()
	if err == nil && count < n {
		return false
	}
	if !dies && !prepared && err != nil {
		settle(t, e)
		wantLeft(t, m, name+": undone", before)
	}
	next := m.engine()
	if prepared {
		if r, err := next.Store.Read("u"); err == nil && r != nil && r.State == record.Prepared {
			err = release(t, next, "u") // the kubelet calls again
			if err != nil {
				t.Errorf("%s: release again: %v", name, err)
			}
		}
		settle(t, next)
		if !dies && m.struck == "mode" {
			// That the mode cannot be turned off keeps no claim: the next one of the whole GPU turns it off.
			m.modes = map[string]bool{}
		}
		wantLeft(t, m, name+": released", before)
		return true
	}
	if _, err := next.Prepare(t.Context(), wanted(next, "u", layout[last]...)); err != nil {
		t.Errorf("%s: again: %v", name, err)
		return true
	}
	settle(t, next)
	if err := release(t, next, "u"); err != nil {
		t.Errorf("%s: release: %v", name, err)
	}
	settle(t, next)
	wantLeft(t, m, name+": released", before)
	return true
}

// TestFirstInstanceInUse shows that the mode stays while somebody's memory keeps the first instance from being made.
func TestFirstInstanceInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t)
		e := m.engine()
		m.users[pciA] = "process 4711 (python)"
		if _, err := e.Prepare(t.Context(), wanted(e, "u", "A slice0")); !errors.Is(err, gpu.ErrInUse) {
			t.Errorf("got %v, want the driver's refusal", err)
		}
		if modes := len(slices.DeleteFunc(slices.Clone(m.effects), func(name string) bool { return name != "mode" })); modes != 1 {
			t.Errorf("the mode was changed %d times", modes)
		}
		wantLeft(t, m, "refused", []string{"MIG mode of " + pciA})
	})
}

// TestInPlaceOfAnother shows that a partition that somebody else has made in the place of a claim's is left alone.
func TestInPlaceOfAnother(t *testing.T) {
	m := newMachine(t)
	e := m.engine()
	mustPrepare(t, e, "u", "A slice0")
	there := m.instances[pciA]
	m.instances[pciA] = nil
	decision, err := e.Converge(t.Context(), pciA, everything)
	if err != nil {
		t.Fatal(err)
	}
	if len(decision.Statements) != 1 || decision.Statements[0].Reason != rules.PartitionGone {
		t.Errorf("got %+v", decision.Statements)
	}
	if len(m.specs) > 0 {
		t.Error("it still has its CDI spec")
	}
	m.instances[pciA] = there // the same UUID, and the same ID
	settle(t, e)
	mustRelease(t, e, "u")
	wantLeft(t, m, "released", []string{"MIG mode of " + pciA, "instance 0 of " + pciA + " complete=true"})
}

// TestWaitsForPlace shows that a claim waits for one that is in its way, and finishes its release.
func TestWaitsForPlace(t *testing.T) {
	m := newMachine(t)
	e := m.engine()
	mustPrepare(t, e, "first", "A slice0")
	if _, err := e.Store.Release("first", e.Clock()); err != nil {
		t.Fatal(err)
	}
	r := mustPrepare(t, e, "second", "A slice0")
	if made := r.Devices[0].Partition.Made; made == nil || made.UUID != "MIG-"+pciA+"-0" {
		t.Errorf("got %+v", made)
	}
	if r, err := e.Store.Read("first"); r != nil || err != nil {
		t.Errorf("the first one has %+v, %v", r, err)
	}
}

// TestNamesakes shows that no CDI spec names the ID of another claim's partition when that can be used.
func TestNamesakes(t *testing.T) {
	m := newMachine(t)
	e := m.engine()
	mustPrepare(t, e, "u", "A slice0")
	m.instances[pciA], m.nextID = nil, 7
	m.fail = func(effect string) error {
		if effect == "create compute" && len(m.specs) > 0 {
			t.Error("the spec of the claim that has lost its partition is still there")
		}
		return nil
	}
	mustPrepare(t, e, "other", "A slice4")
	if got := partition.Instance(gpu.MIGState{Instances: m.instances[pciA]}, partition.Address{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}}); got == nil || got.ID != 7 {
		t.Errorf("got %+v, want the ID of the first one", got)
	}
}

// TestAllocatedAnew shows that a claim that was allocated other devices, or the same with another configuration, gets these,
// and not while processes use what it had.
func TestAllocatedAnew(t *testing.T) {
	for name, test := range map[string]struct{ first, second []string }{
		"other place":    {[]string{"A slice0"}, []string{"A slice4"}},
		"other GPU":      {[]string{"A whole"}, []string{"B whole"}},
		"other share":    {[]string{"A mps"}, []string{"A half"}},
		"one more":       {[]string{"A slice0"}, []string{"A slice0", "B slice0"}},
		"the same":       {[]string{"A slice0", "B mps"}, []string{"A slice0", "B mps"}},
		"another kind":   {[]string{"A turns"}, []string{"A mps"}},
		"MPS of its own": {[]string{"A whole"}, []string{"A own", "B own"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			e := m.engine()
			mustPrepare(t, e, "u", test.first...)
			started := len(m.effects)
			call := wanted(e, "u", test.second...)
			r, err := e.Prepare(t.Context(), call)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(wishOf(r), wishOf(call.Wanted)) || r.Arrived != call.Wanted.Arrived {
				t.Errorf("got %+v, want %+v", r, call.Wanted)
			}
			if effects := m.effects[started:]; name == "the same" && slices.ContainsFunc(effects, func(e string) bool { return strings.Contains(e, "instance") || strings.Contains(e, "session") }) {
				t.Errorf("it was made again: %v", effects)
			}
			settle(t, e)
			mustRelease(t, e, "u")
			wantLeft(t, m, "released", nil)
		})
	}
}

// TestAllocatedAnewInUse shows that nothing is taken from running processes because their claim is allocated other devices.
func TestAllocatedAnewInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t)
		e := m.engine()
		mustPrepare(t, e, "u", "A own", "B own")
		m.users[pciA] = "process 4711 (python)"
		if _, err := e.Prepare(t.Context(), wanted(e, "u", "A whole")); err == nil || !m.exclusive[pciA] {
			t.Errorf("got %v, and the compute mode of a GPU in use is exclusive: %t", err, m.exclusive[pciA])
		}
		clear(m.users)
		mustPrepare(t, e, "u", "A whole")
		settle(t, e)
		mustRelease(t, e, "u")
		wantLeft(t, m, "released", nil)
	})
}

// TestPreparedMeanwhile shows that a claim that is prepared on one GPU while another is observed keeps its CDI spec.
func TestPreparedMeanwhile(t *testing.T) {
	m := newMachine(t)
	e := m.engine()
	m.listed = func() {
		if _, err := e.Prepare(t.Context(), wanted(e, "u", "B slice0")); err != nil {
			t.Error(err)
		}
	}
	if _, err := e.Converge(t.Context(), pciA, everything); err != nil {
		t.Fatal(err)
	}
	if len(m.specs) != 1 {
		t.Error("the CDI spec of a claim that was prepared meanwhile was removed")
	}
}

// TestNoComputeMode shows that a driver which says that there is no compute mode is believed only where none was set.
func TestNoComputeMode(t *testing.T) {
	m := newMachine(t)
	e := m.engine()
	mustPrepare(t, e, "u", "A mps")
	m.noMode = true
	if err := release(t, e, "u"); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("released: %v", err)
	}
	m.noMode = false
	settle(t, e)
	wantLeft(t, m, "released", nil)
	m.noMode = true
	if _, err := e.Prepare(t.Context(), wanted(e, "v", "A mps")); err == nil || !strings.Contains(err.Error(), "MPS needs a compute mode") {
		t.Errorf("prepared: %v", err)
	}
	wantLeft(t, m, "refused", nil)
}

// TestTimeSliceAfterRestart shows that a process that has not set a time slice itself sets it again, also on one GPU of a claim
// that has all it needs on the other, and that a repeated Prepare has its answer.
func TestTimeSliceAfterRestart(t *testing.T) {
	for _, devices := range [][]string{{"A turns"}, {"A turns", "B slice0"}, {"A slice0", "B turns"}} {
		for _, again := range []bool{false, true} {
			m := newMachine(t)
			if _, err := m.engine().Prepare(t.Context(), wanted(m.engine(), "u", devices...)); err != nil {
				t.Fatal(err)
			}
			set := maps.Clone(m.intervals)
			clear(m.intervals)
			e := m.engine()
			if again {
				if _, err := e.Prepare(t.Context(), wanted(e, "u", devices...)); err != nil {
					t.Errorf("%v: prepared again: %v", devices, err)
				}
			} else {
				settle(t, e)
			}
			if !maps.Equal(m.intervals, set) {
				t.Errorf("%v, prepared again %t: the time slices are %v, want %v", devices, again, m.intervals, set)
			}
		}
	}
}

// TestLimitsStay shows that limits that cannot be tightened keep no claim.
func TestLimitsStay(t *testing.T) {
	m := newMachine(t)
	e := m.engine()
	for uid, share := range map[types.UID]string{"small": "A mps", "large": "A half"} {
		mustPrepare(t, e, uid, share)
	}
	m.fail = func(effect string) error {
		if effect == "start session" {
			return errors.New("it cannot change")
		}
		return nil
	}
	if err := release(t, e, "large"); err != nil {
		t.Errorf("the claim is kept: %v", err)
	}
	if r, err := e.Store.Read("large"); r != nil || err != nil {
		t.Errorf("got %+v, %v", r, err)
	}
	m.heal()
	settle(t, e)
	if got := m.sessions[device.GPUName(pciA)].ThreadPercentage; got != 25 {
		t.Errorf("the limit is %d %% in the end, want 25 %%", got)
	}
}

// TestSmallerComputeInstance shows that a partition of somebody else whose compute instance does not span it is no device, by
// the slices of its profile: those of its placement are of memory, of which a profile may have more.
func TestSmallerComputeInstance(t *testing.T) {
	for slices, want := range map[int]bool{0: true, 1: true, 2: false} {
		m := newMachine(t)
		e := m.engine()
		e.GPU = func(pciAddress string) *gpu.GPU {
			return &gpu.GPU{UUID: "GPU-" + pciAddress, MIG: &gpu.MIG{Profiles: []gpu.Profile{{ID: 15, Slices: slices}}}}
		}
		m.modes[pciA] = true
		m.instances[pciA] = []gpu.Instance{{
			ID: 7, ProfileID: 15, Placement: gpu.Placement{Start: 0, Size: 2}, Compute: []gpu.ComputeInstance{{UUID: "MIG-1", Slices: 1}},
		}}
		decision, err := e.Converge(t.Context(), pciA, everything)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(decision.Static) == 1; got != want {
			t.Errorf("a compute instance of 1 slice in a profile of %d: a device: %t", slices, got)
		}
	}
}

// TestTwoProcesses prepares and releases claims at the same time in two processes, as during an upgrade, where effects fail
// now and then, while both converge all GPUs. Whatever the order, claims get what they want or an error, no two have the
// same place, and nothing is left.
func TestTwoProcesses(t *testing.T) {
	m := newMachine(t)
	engines := []*Engine{m.engine(), m.engine()}
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(1, 2))
	m.mu.Lock()
	m.fail = func(string) error {
		mu.Lock()
		defer mu.Unlock()
		if random.IntN(40) == 0 {
			return errors.New("it fails now and then")
		}
		return nil
	}
	m.mu.Unlock()
	wants := [][]string{
		{"A slice0"}, {"A slice4", "B slice0"}, {"B slice4"}, {"A slice4"}, {"B mps"}, {"B half"}, {"A turns"}, {"A own", "B own"},
		{"A look"}, {"A look", "B look"}, {"B slice0", "A look"},
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	prepared := make([]int, len(wants))
	for i, devices := range wants {
		e, uid := engines[i%2], types.UID(fmt.Sprintf("u%d", i))
		wg.Go(func() {
			for range 3 {
				// A claim that is in the way does not go before its own round is over.
				limited, cancel := context.WithTimeout(ctx, time.Second)
				unlock, err := e.Locks.Claim(limited, uid)
				if err != nil {
					t.Error(err)
				} else {
					if _, err := e.Prepare(limited, wanted(e, uid, devices...)); err == nil {
						prepared[i]++
						if r, err := e.Store.Read(uid); err != nil || r == nil || r.State != record.Prepared || !m.hasSpec(uid) {
							t.Errorf("claim of %v is prepared, and its record is %+v, %v; CDI spec: %t", devices, r, err, m.hasSpec(uid))
						}
					}
					unlock()
				}
				cancel()
				_ = release(t, e, uid) // what fails is left to the loops
			}
		})
	}
	loops, stop := context.WithCancel(ctx)
	var looping sync.WaitGroup
	for i, e := range engines {
		looping.Go(func() {
			for loops.Err() == nil {
				_, _ = e.Converge(loops, []string{pciA, pciB}[i], everything)
				_, _ = e.Converge(loops, []string{pciB, pciA}[i], everything)
			}
		})
	}
	wg.Wait()
	stop()
	looping.Wait()
	m.heal()
	for _, e := range engines {
		for _, address := range []string{pciA, pciB} {
			if decision, err := e.Converge(t.Context(), address, everything); err != nil || decision == nil {
				t.Errorf("GPU %s: busy %t, %v", address, decision == nil, err)
			} else if len(decision.Tasks) > 0 {
				t.Errorf("GPU %s: left to do: %+v", address, decision.Tasks)
			}
		}
	}
	// That a mode cannot be turned off keeps no claim: the next one of the whole GPU turns it off.
	clear(m.modes)
	wantLeft(t, m, "at the end", nil)
	for i, devices := range wants {
		e, uid := engines[i%2], types.UID(fmt.Sprintf("u%d", i))
		mustPrepare(t, e, uid, devices...)
		mustRelease(t, e, uid)
	}
	wantLeft(t, m, "afterwards", nil)
	t.Logf("prepared %v", prepared)
}

// TestNotLeftOver: a claim that only observes a GPU is prepared without its lock. What was seen of it may be over by then, and
// is not taken for what is left of it.
func TestNotLeftOver(t *testing.T) {
	for name, leave := range map[string]func(*Engine){
		"being prepared": func(*Engine) {},
		"being released": func(e *Engine) { _, _ = e.Store.Release("u", e.Clock()) },
	} {
		t.Run(name, func(t *testing.T) { notLeftOver(t, leave) })
	}
}

func notLeftOver(t *testing.T, leave func(*Engine)) {
	t.Helper()
	m := newMachine(t)
	killed, one, other := m.engine(), m.engine(), m.engine()
	m.strike(3, true) // before the claim is noted as prepared
	if _, err := killed.Prepare(t.Context(), wanted(killed, "u", "A look", "B look")); err == nil {
		t.Fatal("the process was not killed")
	}
	m.heal()
	leave(one)
	prepare := func() {
		unlock, err := one.Locks.Claim(t.Context(), "u")
		if err != nil {
			t.Error(err)
			return
		}
		defer unlock()
		if _, err := one.Prepare(t.Context(), wanted(one, "u", "A look", "B look")); err != nil {
			t.Error(err)
		}
	}
	other.Users = hooked{hardware{m}, sync.OnceFunc(prepare)}
	if _, err := other.Converge(t.Context(), pciA, everything); err != nil {
		t.Error(err)
	}
	settle(t, other)
	wantLeft(t, m, "prepared while another process had observed what was left", []string{"record of u", "spec of u"})
}

// hooked does something when it was already read what records say.
type hooked struct {
	hardware

	hook func()
}

func (h hooked) Users(ctx context.Context, pciAddress string, claims []*record.Record, orphan *record.Record) (string, map[int]string, string) {
	h.hook()
	return h.hardware.Users(ctx, pciAddress, claims, orphan)
}

// TestUsersOf shows who is found on the devices of a claim, as if it did not exist.
func TestUsersOf(t *testing.T) {
	for _, devices := range [][]string{{"A slice0"}, {"A whole"}, {"A mps"}, {"A own", "B own"}} {
		m := newMachine(t)
		e := m.engine()
		r := mustPrepare(t, e, "u", devices...)
		for _, users := range []string{"process 4711", ""} {
			m.users[pciA] = users
			got, err := e.UsersOf(t.Context(), r, pciA)
			want := ""
			if users != "" && devices[0] != "A slice0" { // the users of partitions are found by instance
				want = r.Devices[0].Device + ": " + users
			}
			if got != want || err != nil {
				t.Errorf("%v, users %q: got %q, %v", devices, users, got, err)
			}
		}
	}
}

// TestFinishUnreadable: a release that waits is not over because the record cannot be read.
func TestFinishUnreadable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t)
		e := m.engine()
		mustPrepare(t, e, "u", "A")
		m.users[pciA] = "process 4711"
		known, err := e.Store.Release("u", m.clock())
		if err != nil {
			t.Fatal(err)
		}
		folder := filepath.Join(m.root, "records")
		e.Users = hooked{hardware{m}, func() {
			_ = os.Rename(folder, folder+"-aside")
			_ = os.WriteFile(folder, nil, 0o600)
		}}
		if err = e.Finish(t.Context(), known.Of("u"), []string{pciA}); err == nil {
			t.Errorf("something is left, and it is said that nothing is: %v", m.left())
		}
	})
}
