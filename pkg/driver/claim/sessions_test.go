// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

var ownMPSOfOne = strings.ReplaceAll(ownMPS, `{"1":"5Gi"}`, `{"0":"5Gi"}`)

func portion(uid, device, memory, percent string) *resourceapi.ResourceClaim {
	return newShare(uid, device, map[resourceapi.QualifiedName]string{"memory": memory, "smPercent": percent})
}

// wantWithoutEffects fails if something was done to the hardware since the hooks were set.
func (b *box) wantWithoutEffects() {
	b.t.Helper()
	if seen := b.onHardware(); len(seen) > 0 {
		b.t.Errorf("effects: %q", seen)
	}
}

// wantLimits fails unless a session has these limits, and was started once.
func (b *box) wantLimits(when, id string, percent int, gib int64) {
	b.t.Helper()
	s := b.running(id)
	if s == nil {
		b.t.Errorf("%s: session %s does not run", when, id)
		return
	}
	want := map[string]int64{}
	for _, uuid := range s.Devices {
		want[uuid] = gib << 30
	}
	if s.ThreadPercentage != percent || !cmp.Equal(s.Memory, want) || s.starts != 1 {
		b.t.Errorf("%s: session %s has %+v and was started %d times, want %d%% and %v", when, id, s.Spec, s.starts, percent, want)
	}
}

// The server's limits are those of the largest share, whoever comes and goes.
func TestLargestShare(t *testing.T) {
	for _, device := range []string{mpsA, mpsSliceA0} {
		b, m := newNode(t)
		id := strings.TrimSuffix(device, "-mps")
		mustPrepare(t, m, portion("small", device, "1Gi", "30"))
		b.wantLimits("one", id, 30, 1)
		mustPrepare(t, m, portion("large", device, "3Gi", "10"))
		b.wantLimits("two", id, 30, 3)
		mustPrepare(t, m, portion("middle", device, "2Gi", "20"))
		b.wantLimits("three", id, 30, 3)
		mustUnprepare(t, m, "small")
		b.wantLimits("without the first", id, 20, 3)

		// The limits stay where they are if they cannot be changed, and nobody waits.
		b.hooks(failTimes("set limits", always, errFault), nil)
		mustUnprepare(t, m, "large")
		b.hooks(nil, nil)
		b.wantLimits("not changed", id, 20, 3)
		mustPrepare(t, m, portion("middle", device, "2Gi", "20"))
		b.wantLimits("looked after", id, 20, 2)
		b.endAll(m, "middle")
	}
}

// Less memory is offered than claims have, because of another version, policy or what
// the driver keeps: they keep their limits, whatever they are asked for again, and nothing
// of theirs is touched.
func TestLessMemoryIsOffered(t *testing.T) {
	b, m := newNode(t)
	const most = "79Gi" // of 80, which the fixture's GPU does not offer
	old := []*resourceapi.ResourceClaim{portion("u1", mpsA, most, "25"), portion("u2", mpsA, "1Gi", "25")}

	var prepared [][]LiveDevice
	for _, claim := range old {
		prepared = append(prepared, mustPrepare(t, m, claim))
	}
	b.wantLimits("as allocated", wholeA, 25, 79)
	before := b.limitsOfSpec("u1")

	next := b.manager() // of the next version
	b.hooks(nil, nil)
	mustReconcile(t, next)
	for i, claim := range old {
		expect.Same(t, mustPrepare(t, next, claim), prepared[i])
	}
	b.wantWithoutEffects()
	b.wantLimits("with the new version", wholeA, 25, 79)
	expect.Same(t, b.limitsOfSpec("u1"), before)
	mustUnprepare(t, next, "u1")
	b.wantLimits("without the large one", wholeA, 25, 1)
	b.endAll(next, "u2")
}

// Limits by index count the devices of their configuration, also where each of them is
// in a session of its own.
func TestLimitsByIndex(t *testing.T) {
	b, m := newNode(t)
	claim := configure(newClaim("u1", wholeB, sliceA0, sliceA4), fromClaim, strings.ReplaceAll(migMPS,
		`"mpsConfig":{`, `"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi","1":"2Gi"},`))
	for range 2 {
		mustPrepare(t, m, claim)
		b.wantLimits("the first", sliceA0, 0, 1)
		b.wantLimits("the second", sliceA4, 0, 2)
	}
	b.endAll(m, "u1")
}

// Claims of one GPU come and go in two processes at once.
func TestManySharesAtOnce(t *testing.T) {
	b := newBox(t)
	managers := []*Manager{b.manager(), b.manager()}
	var wg sync.WaitGroup
	for i := range 12 {
		m := managers[i%2]
		uid := fmt.Sprintf("u%d", i)
		device, id := mpsA, wholeA
		if i%3 == 0 {
			device, id = sliceB0+"-mps", sliceB0
		}
		claim := portion(uid, device, fmt.Sprintf("%dGi", 1+i%4), "20")
		wg.Go(func() {
			for range 4 {
				if _, err := m.Prepare(t.Context(), claim); err != nil {
					t.Errorf("prepare: %v", err)
				}
				if s := b.running(id); s == nil {
					t.Errorf("claim %s is prepared and session %s does not run", uid, id)
				}
				expect.Is(t, managers[(i+1)%2].Unprepare(t.Context(), types.UID(uid)), nil)
			}
		})
	}
	wg.Wait()
	b.wantNothing()
	b.wantWarnings()
}

// A server is replaced at once when any of its shares was prepared under such a policy, and
// those of a claim's own devices never are.
func TestReactionToKills(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("before", mpsA))
	expect.Same(t, b.running(wholeA).OnClientKilled, "")
	p := testPolicy()
	p.Default.MPS.OnClientKilled = policy.KilledRestart
	m.SetInventory(inventoryOf(t, testNode(), device.Terms{Policy: p}))
	mustPrepare(t, m, newClaim("after", mpsA))
	mustPrepare(t, m, configure(newClaim("own", wholeB), fromClaim, ownMPSOfOne))
	expect.Same(t, b.running(wholeA).OnClientKilled, mps.RestartServer)
	expect.Same(t, b.running(wholeB).OnClientKilled, "")
}

// belowNormal is a configuration with a priority and nothing else.
const belowNormal = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultClientPriority":"BelowNormal"}}}`

// A session that does not exist any more is made again.
func TestSessionGone(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	own := configure(newClaim("u3", wholeB, wholeC), fromClaim, gpuMPS)
	mustPrepare(t, m, own)
	before := b.state()
	vanish := func() {
		b.locked(func() { clear(b.sessions); b.exclusive["GPU-c"] = false })
	}
	vanish()
	_ = m.cleanUp(t.Context()) // of the GPUs of a session one may be busy with the other
	mustReconcile(t, m)
	b.wantState(t, "started again", before)
	b.wantWarnings([]string{"u1 MPSServerLost", "it was gone"}, []string{"u2 MPSServerLost"}, []string{"u3 MPSServerLost", wholeB})
	mustReconcile(t, m)
	b.wantWarnings()

	// It is told once, however often it cannot be started.
	vanish()
	b.hooks(failTimes("start session", always, errFault), nil)
	for range 2 {
		wantError(t, m.cleanUp(t.Context()), "device "+mpsA)
	}
	b.wantWarnings([]string{"u1 MPSServerLost"}, []string{"u2 MPSServerLost"}, []string{"u3 MPSServerLost"})
	b.hooks(nil, nil)
	mustPrepare(t, m, own)
	_ = m.cleanUp(t.Context())
	mustReconcile(t, m)
	b.wantState(t, "started at last", before)
	b.wantWarnings()
	b.endAll(m, "u1", "u2", "u3")
}

// A supervisor that starts at the same moment is waited for.
func TestSupervisorComes(t *testing.T) {
	b := newBox(t)
	b.away(true)
	asked := 0
	b.onSessions = func() {
		if asked++; asked == 2 {
			b.absent = false
		}
	}
	mustPrepare(t, b.manager(), newClaim("u1", mpsA))
	if b.running(wholeA) == nil {
		t.Error("there is no session")
	}
}

// What nobody has is ended, if it is known whose GPU it is.
func TestSweepSessions(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsB))
	before := b.state()
	stray := func(id, uuid string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.sessions[id] = &runningSession{Spec: mps.Spec{ID: id, Devices: []string{uuid}}, phase: mps.Running}
		b.exclusive[uuid] = strings.HasPrefix(uuid, "GPU-")
	}
	stray(wholeA, "GPU-a")
	stray(sliceB0, "MIG-gone")
	write(t, m.store.Path("damaged"), "{")
	_ = b.bareManager().cleanUp(t.Context()) // it does not know any GPU
	_ = m.cleanUp(t.Context())
	if b.running(wholeA) == nil || b.running(sliceB0) == nil {
		t.Error("a session was ended that may be that of a claim whose record is damaged")
	}
	must.Do(t, os.Remove(m.store.Path("damaged")))
	mustReconcile(t, m)
	b.wantState(t, "swept", before)

	stray("gpu-0000-ff-00-0", "GPU-x")
	strange := b.state()
	mustReconcile(t, m)
	b.wantState(t, "not this node's", strange)
}

// findingsOf are those about MPS, without those about GPUs.
func mpsFindings(s device.Status) []string {
	var lines []string
	for _, c := range s.Conditions {
		if strings.HasPrefix(string(c.Reason), "mps") {
			where := "whole"
			if c.Where != nil {
				where = fmt.Sprintf("%d:%d", c.Where.Start, c.Where.Size)
			}
			lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %s %s %s", c.Reason, c.PCIAddress, where, c.Kind)))
		}
	}
	slices.Sort(lines)
	return lines
}

func TestSurveySessions(t *testing.T) {
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		id    string
		phase mps.Phase
		loses bool
		want  []string
	}{
		"well":         {claim: newClaim("u1", mpsA), id: wholeA, phase: mps.Running, loses: true},
		"faulted":      {newClaim("u1", mpsA), wholeA, mps.Faulted, true, []string{"mps-unhealthy " + pciA + " whole"}},
		"partition":    {newClaim("u1", mpsSliceA0), sliceA0, mps.Failed, true, []string{"mps-unhealthy " + pciA + " 0:1"}},
		"several GPUs": {configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS), wholeA, mps.Failed, true, []string{"mps-unhealthy " + pciA + " whole", "mps-unhealthy " + pciC + " whole"}},
		"starts":       {newClaim("u1", mpsA), wholeA, mps.Starting, false, nil},
		"starts again": {newClaim("u1", mpsA), wholeA, mps.Starting, true, []string{"mps-unhealthy " + pciA + " whole"}},
		"of its own":   {configure(newClaim("u1", sliceA4), fromClaim, migMPS), sliceA4, mps.Faulted, true, []string{"mps-unhealthy " + pciA + " 4:1"}},
		"nobody answers": {claim: newClaim("u1", mpsA), id: wholeA, want: []string{
			"mps-unavailable " + pciA + " whole mps", "mps-unavailable " + pciB + " whole mps", "mps-unavailable " + pciC + " whole mps"}},
	} {
		t.Run(name, func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, test.claim)
			if test.loses {
				b.lose(test.id, test.phase)
			}
			b.running(test.id).phase = test.phase
			b.away(test.phase == "")
			survey(t.Context(), m)
			b.pass((5 * time.Second))
			expect.Same(t, mpsFindings(survey(t.Context(), m)), test.want)
		})
	}
}

// Servers are no users. Nor is anybody on a GPU that others have shares of.
func TestOrphanWithShares(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	server, client := gpu.Process{PID: 4242, InstanceID: -1}, gpu.Process{PID: 77, InstanceID: -1}
	b.run(pciA, server, client)
	b.deleteClaim("u1")
	b.deleteClaim("u2")
	mustReconcile(t, m)
	b.pass(DefaultOrphanGrace)
	err := reconcile(t, m)
	wantError(t, err, "process 77")
	if left := m.claims(); len(left) != 1 {
		t.Errorf("left are %v: one of the two has to go, whichever is first", left)
	}
	b.run(pciA, server)
	mustReconcile(t, m)
	b.run(pciA)
	b.wantNothing()
}

// TestPrepareAgainBehindMuteSupervisor: the kubelet gets a reason before its own time is over.
func TestPrepareAgainBehindMuteSupervisor(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		mustPrepare(t, m, portion("share", mpsA, "1Gi", "10"))
		b.locked(func() { b.mute = true })
		ctx, cancel := context.WithTimeout(t.Context(), kubeletTime)
		defer cancel()
		began := time.Now()
		_, err := m.Prepare(ctx, portion("share", mpsA, "1Gi", "10"))
		t.Logf("after %s: %v", time.Since(began), err)
		if time.Since(began) >= kubeletTime {
			t.Error("the kubelet gets no reason, only its own time limit")
		}
	})
}

// lateObservation has the first observation of a GPU wait until it is told to go on.
type lateObservation struct {
	converge.Partitions
	gpu              string
	once             sync.Once
	observed, resume chan struct{}
}

func (l *lateObservation) State(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	if pciAddress == l.gpu {
		l.once.Do(func() { close(l.observed); <-l.resume })
	}
	return l.Partitions.State(ctx, pciAddress)
}

// TestSessionOfTwoGPUsIsToldOnce: what one GPU of a session has seen is older than what another one has written down.
func TestSessionOfTwoGPUsIsToldOnce(t *testing.T) {
	loses := func(b *box) { b.lose(wholeA, mps.Running) }
	kills := func(b *box) { b.mu.Lock(); defer b.mu.Unlock(); b.sessions[wholeA].kills++ }
	ends := func(b *box) { b.mu.Lock(); defer b.mu.Unlock(); clear(b.sessions) }
	for name, happens := range map[string][2]func(*box){
		"servers lost": {loses, loses}, "server lost, session gone": {loses, ends}, "clients killed": {kills, kills},
	} {
		t.Run(name, func(t *testing.T) {
			b, m := newNode(t)
			mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS))
			l := &lateObservation{Partitions: m.engine.Partitions, gpu: pciA, observed: make(chan struct{}), resume: make(chan struct{})}
			m.engine.Partitions = l
			happens[0](b)
			var behind sync.WaitGroup
			behind.Go(func() { _ = m.cleanUpGPU(t.Context(), pciA) })
			<-l.observed
			happens[1](b)
			_ = m.cleanUpGPU(t.Context(), pciC)
			close(l.resume)
			behind.Wait()
			for range 3 {
				_ = m.cleanUp(t.Context())
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			told := slices.DeleteFunc(slices.Clone(b.warnings), func(w string) bool { return !strings.Contains(w, "MPS") })
			if len(told) != 1 {
				t.Errorf("people are told %d times: %q", len(told), told)
			}
		})
	}
}

// Two shares in one claim: the session has what the larger one needs, and no container can have both.
func TestTwoSharesOfOneClaim(t *testing.T) {
	b, m := newNode(t)
	claim := newClaim("u1", mpsA, mpsA)
	for i, memory := range []string{"1Gi", "2Gi"} {
		claim.Status.Allocation.Devices.Results[i].ConsumedCapacity = portion("", mpsA, memory, "40").Status.Allocation.Devices.Results[0].ConsumedCapacity
	}
	prepared := mustPrepare(t, m, claim)
	if len(prepared) != 2 || prepared[0].CDIDevice == prepared[1].CDIDevice {
		t.Errorf("prepared %+v", prepared)
	}
	b.wantLimits("both", wholeA, 40, 2)
	markers := slices.DeleteFunc(b.edits("u1"), func(line string) bool { return !strings.Contains(line, hook.MPSMarkerPrefix) })
	if len(markers) != 2 || markers[0] == markers[1] {
		t.Errorf("a container with both is not noticed: %v", markers)
	}
	b.endAll(m, "u1")
}

// Whoever loses a server, or goes on with one of which a client was killed, is told, once for each time.
func TestLossesAndKills(t *testing.T) {
	for reason, test := range map[string]struct {
		happens func(*runningSession)
		says    []string
	}{
		"MPSServerLost":   {func(s *runningSession) { s.losses++ }, []string{"the daemon ended", "must be restarted"}},
		"MPSClientKilled": {func(s *runningSession) { s.kills++ }, []string{"one was killed", "undefined"}},
	} {
		b, m := newNode(t)
		mustPrepare(t, m, newClaim("u1", mpsA))
		mustPrepare(t, m, newClaim("u2", mpsA))
		mustPrepare(t, m, newClaim("beside", mpsB))
		told := [][]string{append(test.says, "u1 "+reason, mpsA), {"u2 " + reason, mpsA}}
		for range 2 {
			b.locked(func() { test.happens(b.sessions[wholeA]) })
			mustReconcile(t, m)
			b.wantWarnings(told...)
			mustReconcile(t, m)
			mustReconcile(t, b.manager())
			b.wantWarnings()
		}
		// Nothing of that has happened to who comes later, and no client was killed of a session that was made again.
		mustPrepare(t, m, newClaim("u3", mpsA))
		mustReconcile(t, b.manager())
		b.wantWarnings()
		b.locked(func() { b.sessions[wholeA].kills = 0 })
		mustReconcile(t, m)
		b.wantWarnings()
		b.locked(func() { test.happens(b.sessions[wholeA]) })
		mustReconcile(t, m)
		b.wantWarnings(append(told, []string{"u3 " + reason})...)
	}
}

// A loss is told once although the kubelet asks first, or has to ask again, and while the GPU does not answer: it may be why.
func TestLossIsToldByPrepare(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	for _, fault := range []func(string) error{nil, failTimes("write spec", 2, errFault)} {
		b.lose(wholeA, mps.Running)
		b.hooks(fault, nil)
		_ = runPrepare(t.Context(), m, newClaim("u1", mpsA))
		_ = runPrepare(t.Context(), m, newClaim("u1", mpsA))
		b.wantWarnings([]string{"u1 MPSServerLost"})
		mustReconcile(t, m)
		b.wantWarnings([]string{"u2 MPSServerLost"})
	}
	b.lose(wholeA, mps.Running)
	b.breakDown(pciA, gpu.ErrLost)
	wantError(t, m.cleanUp(t.Context()), pciA)
	b.wantWarnings([]string{"u1 MPSServerLost"}, []string{"u2 MPSServerLost"})
}

// The priority of a session that claims share follows them, also where a supervisor has missed one that went.
func TestPriorityFollowsClaims(t *testing.T) {
	b, m := newNode(t)
	has := func(want policy.ClientPriority) {
		t.Helper()
		expect.Same(t, policy.ClientPriority(b.running(wholeA).ClientPriority), want)
	}
	mustPrepare(t, m, configure(newClaim("batch", mpsA), fromClaim, belowNormal))
	has(policy.PriorityBelowNormal)
	mustPrepare(t, m, newClaim("online", mpsA))
	has(policy.PriorityNormal)
	mustUnprepare(t, m, "online")
	has(policy.PriorityBelowNormal)
	b.running(wholeA).ClientPriority = ""
	mustReconcile(t, m)
	has(policy.PriorityBelowNormal)
}

// Without a supervisor MPS is refused with a reason, and pods end.
func TestNoSupervisor(t *testing.T) {
	onNode(t, func(t *testing.T, b *box, m *Manager) {
		b.away(true)
		for _, claim := range []*resourceapi.ResourceClaim{
			newClaim("u1", mpsA), newClaim("u1", mpsSliceA0), configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuMPS),
		} {
			b.hooks(nil, nil)
			err := runPrepare(cancelled(t), m, claim)
			wantError(t, err, "DaemonSet of the mps-supervisor", "device gpu-0000-")
			expect.Is(t, err, sharing.ErrNoSupervisor)
			b.wantWithoutEffects()
		}
		b.wantNothing()
		mustReconcile(t, m) // nobody needs it
		mustPrepare(t, m, newClaim("u0", turnsC))

		b.away(false)
		mustPrepare(t, m, newClaim("u1", mpsA))
		mustPrepare(t, m, newClaim("u2", mpsA))
		mustPrepare(t, m, newClaim("u3", sliceB0+"-mps"))
		b.away(true)
		first := m.cleanUp(t.Context())
		wantError(t, first, wholeA, wholeB)
		if strings.Count(first.Error(), "is the DaemonSet") != 2 {
			t.Errorf("it is said for each claim, and not for each GPU: %v", first)
		}
		for _, uid := range []types.UID{"u2", "u1", "u3"} {
			mustUnprepare(t, m, uid)
			b.wantNoSpec(uid)
		}
		b.wantRecord("u2", "") // it was not the last of its GPU, so there was nothing to wait for
		wantError(t, m.cleanUp(t.Context()), "claim default/claim-u1", "claim default/claim-u3", "MPS supervisor")
		wantError(t, runPrepare(t.Context(), m, newClaim("whole", wholeA)), "device "+wholeA, mpsA, "being released")
		b.away(false)
		mustPrepare(t, m, newClaim("whole", wholeA))
		mustReconcile(t, m)
		b.endAll(m, "whole", "u0")
	})
}

// A session on several GPUs that nobody has is ended, and their modes are set back.
func TestSweepSessionOfTwoGPUs(t *testing.T) {
	b, m := newNode(t)
	b.sessions[wholeA] = &runningSession{phase: mps.Running, Spec: mps.Spec{ID: wholeA, Devices: []string{"GPU-a", "GPU-c"}}}
	b.exclusive["GPU-a"], b.exclusive["GPU-c"] = true, true
	mustReconcile(t, m)
	b.wantNothing()
}

// A session that may be that of a claim whose record cannot be read holds its device until that is released, which nobody else must get. One
// that a known claim has is that claim's.
func TestSurveySessionOfDamagedRecord(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsB))
	damage(t, m, "u1")
	wantError(t, m.cleanUp(t.Context()), "MPS session "+wholeA, "records/u1.boot-1")
	pending := "release-pending " + pciA + " whole"
	wantFindings(t, m, pending, pending)
	mustUnprepare(t, m, "u1")
	mustReconcile(t, m)
	wantFindings(t, m)
	b.endAll(m, "u2")
}

// What claims had before the machine was started anew they will have again. Of a record that cannot be read nobody knows which devices it is
// about.
func TestInUse(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsA, sliceB0))
	b.boot("boot-2")
	m = b.manager()
	mustPrepare(t, m, admin(newClaim("u2", mpsA)))
	mustPrepare(t, m, newClaim("u3", wholeC))
	got, err := m.InUse()
	expect.Is(t, err, nil)
	expect.Same(t, got, []string{mpsA, sliceB0, wholeC})
	write(t, m.store.Path("u4"), "partage-claim-record/9")
	got, err = m.InUse()
	wantError(t, err, "u4.boot-2")
	expect.Same(t, got, []string{mpsA, sliceB0, wholeC})
}

// TestSupervisorThatBeginsLater is not reported at once: the two start together with the node. One that is away is, until it answers.
func TestSupervisorThatBeginsLater(t *testing.T) {
	b, m := newNode(t)
	want := func(conditions, unobserved int) {
		t.Helper()
		if got := survey(t.Context(), m).Conditions; len(got) != conditions || len(m.Unobserved()) != unobserved {
			t.Errorf("got %+v, unobserved are %v", got, m.Unobserved())
		}
	}
	b.away(true)
	want(0, 3)
	b.pass(5 * time.Second)
	want(3, 0) // one for each GPU
	b.away(false)
	want(0, 0)
	b.away(true)
	want(0, 0) // at once, the second time
}

// TestSessionIsBackForOthers: a session that a claim has started again is there for all that share it, whatever becomes of that claim.
func TestSessionIsBackForOthers(t *testing.T) {
	b, m := newNode(t)
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	b.locked(func() { clear(b.sessions) })
	b.hooks(failTimes("start session", always, errFault), nil)
	wantError(t, m.cleanUp(t.Context()), "device "+mpsA) // people are told
	b.hooks(failTimes("write spec", always, errFault), nil)
	expect.Is(t, runPrepare(t.Context(), m, newClaim("u3", mpsA)), errFault)
	b.hooks(nil, nil)
	mustReconcile(t, m)
	for _, uid := range []string{"u1", "u2"} {
		if s := liveOf(t, m, uid).Session; s == nil || !s.Running {
			t.Errorf("claim %s: session %+v", uid, s)
		}
	}
}

// Somebody removes the partition under its shares.
func TestSharedPartitionGone(t *testing.T) {
	for _, device := range []string{mpsSliceA0, turnSliceA0} {
		runOnNode(t, device, func(t *testing.T, b *box, m *Manager) {
			mustPrepare(t, m, newClaim("u1", device))
			mustPrepare(t, m, newClaim("u2", device))
			b.removeForeign(addressA0)
			for _, uid := range []string{"u3", "u1"} {
				wantError(t, runPrepare(t.Context(), m, newClaim(uid, device)), "device "+device, "claim default/claim-u", "has lost its share")
			}
			if now, found := b.look(addressA0); found {
				t.Errorf("%s: made %+v", device, now)
			}
			survey(t.Context(), m)
			wantError(t, m.cleanUp(t.Context()), "device "+device, "was removed by somebody else")
			for _, uid := range []string{"u1", "u2"} {
				if !slices.ContainsFunc(m.Statements(), func(s Statement) bool { return string(s.Claim.UID) == uid && s.Reason == ReasonPartitionGone }) {
					t.Errorf("nothing is said of claim %s: %+v", uid, m.Statements())
				}
			}
			if b.spec("u1") != nil || b.spec("u2") != nil {
				t.Error("a claim without its partition has a CDI spec")
			}
			// The last one has it again, as one that has a partition alone.
			mustUnprepare(t, m, "u2")
			for _, uid := range []string{"u1", "u3"} {
				mustPrepare(t, m, newClaim(uid, device))
			}
			b.endAll(m, "u3", "u1")
		})
	}
}

func (b *box) wantInterval(when, uuid string, want policy.Interval) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if got := b.intervals[uuid]; got != want {
		b.t.Errorf("%s: the time slice of %s is %q, want %q", when, uuid, got, want)
	}
}

// under is a plugin that publishes devices on these terms.
func (b *box) under(terms device.Terms) *Manager {
	b.t.Helper()
	m := b.manager()
	m.SetInventory(inventoryOf(b.t, testNode(), terms))
	return m
}

// turning is a plugin under a policy with this interval for shares.
func (b *box) turning(interval policy.Interval) *Manager {
	b.t.Helper()
	p := testPolicy()
	p.Default.TimeSlice.Interval = interval
	return b.under(device.Terms{Policy: p})
}

// The GPU has the time slice that its first share found in the policy, until the last one is gone.
func TestIntervalOfFirstShare(t *testing.T) {
	for _, test := range []struct{ first, later, set policy.Interval }{
		{policy.IntervalShort, policy.IntervalShort, policy.IntervalShort},
		{policy.IntervalShort, policy.IntervalLong, policy.IntervalShort},
		{policy.IntervalShort, policy.IntervalDefault, policy.IntervalShort},
		{policy.IntervalDefault, policy.IntervalLong, ""},
	} {
		b := newBox(t)
		mustPrepare(t, b.turning(test.first), newClaim("u1", turnsA))
		m := b.turning(test.later)
		b.hooks(nil, nil)
		for _, uid := range []string{"u2", "u3"} {
			mustPrepare(t, m, newClaim(uid, turnsA))
		}
		if seen := b.onHardware(); len(seen) > 0 {
			t.Errorf("effects of later shares: %v", seen)
		}
		for _, uid := range []types.UID{"u2", "u1", "u3"} {
			b.wantInterval(fmt.Sprintf("%+v", test), "GPU-a", test.set)
			mustUnprepare(t, m, uid)
		}
		b.wantNothing()
	}
}

// TestIntervalBehindUnreadableRecord: who leaves a share to a claim whose record cannot be read keeps the note of the time slice.
func TestIntervalBehindUnreadableRecord(t *testing.T) {
	b := newBox(t)
	dying := b.turning(policy.IntervalShort)
	b.hooks(nil, b.killAt("interval Short"))
	expect.Is(t, runPrepare(t.Context(), dying, newClaim("u1", turnsA)), errKilled)
	b.hooks(nil, nil)
	m := b.turning(policy.IntervalDefault)
	mustPrepare(t, m, newClaim("u2", turnsA))
	mustPrepare(t, m, newClaim("u3", turnsA))
	damage(t, m, "u3")
	mustUnprepare(t, m, "u1")
	mustPrepare(t, m, newClaim("u3", turnsA))
	mustUnprepare(t, m, "u3")
	mustUnprepare(t, m, "u2")
	_ = m.cleanUp(t.Context())
	b.wantNothing()
}

// A time slice that is refused leaves nothing. What somebody has set by hand on the GPU is the driver's by then.
func TestIntervalNotSet(t *testing.T) {
	for _, refusal := range []error{gpu.ErrNoPermission, gpu.ErrNotSupported, gpu.ErrInvalid, fmt.Errorf("no nvidia-smi: %w", fs.ErrNotExist)} {
		b, m := newNode(t)
		b.intervals["GPU-a"], b.intervals["GPU-c"] = policy.IntervalMedium, policy.IntervalMedium
		b.hooks(failTimes("interval Short", always, refusal), nil)
		err := runPrepare(t.Context(), m, newClaim("u1", turnsC))
		expect.Is(t, err, refusal)
		wantError(t, err, "device "+turnsC)
		b.hooks(nil, nil)
		b.wantInterval("of another GPU", "GPU-a", policy.IntervalMedium)
		b.wantRecord("u1", "")
	}
}

// A claim that owns GPUs sets them all, and no others.
func TestOwnInterval(t *testing.T) {
	b, m := newNode(t)
	b.intervals["GPU-b"] = policy.IntervalShort
	before := b.state()
	claim := configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuLong)
	mustPrepare(t, m, claim)
	mustPrepare(t, m, newClaim("u2", wholeB))
	for uuid, want := range map[string]policy.Interval{"GPU-a": policy.IntervalLong, "GPU-b": policy.IntervalShort, "GPU-c": policy.IntervalLong} {
		b.wantInterval("prepared", uuid, want)
	}
	mustUnprepare(t, m, "u1")
	mustUnprepare(t, m, "u2")
	b.wantState(t, "released", before)
}

// TestLimitsComeLater: claims for turns of which the scheduler counted nothing, because nothing limited such
// shares, stay as they are when the operator names an interposer library: prepared again, and after a
// reboot. They are not limited, and claims that come then are.
func TestLimitsComeLater(t *testing.T) {
	b := newBox(t)
	old := newShare("u1", turnsA, map[resourceapi.QualifiedName]string{"shares": "1", "memory": "0", "smPercent": "0", "multiprocessors": "0"})
	mustPrepare(t, b.under(device.Terms{Policy: testPolicy()}), old)
	limiting := device.Terms{Policy: testPolicy(), Limited: true}
	m := b.under(limiting)
	mustPrepare(t, m, old)
	b.boot("boot-2")
	m = b.under(limiting)
	mustPrepare(t, m, old)
	mustPrepare(t, m, newShare("u2", turnsA, map[resourceapi.QualifiedName]string{"memory": "6Gi", "smPercent": "25"}))
	for uid, limited := range map[types.UID]bool{"u1": false, "u2": true} {
		if got := liveOf(t, m, string(uid)).Limits != nil; got != limited {
			t.Errorf("claim %s is limited: %t, want %t", uid, got, limited)
		}
		mustUnprepare(t, m, uid)
	}
	b.wantNothing()
}
