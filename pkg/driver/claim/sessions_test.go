// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
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
)

var ownMPSOfOne = strings.ReplaceAll(ownMPS, `{"1":"5Gi"}`, `{"0":"5Gi"}`)

func portion(uid, device, memory, percent string) *resourceapi.ResourceClaim {
	return newShare(uid, device, map[resourceapi.QualifiedName]string{"memory": memory, "smPercent": percent})
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
		b := newBox(t)
		m := b.manager()
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
		b.hooks(failAt("set limits"), nil)
		mustUnprepare(t, m, "large")
		b.hooks(nil, nil)
		b.wantLimits("not changed", id, 20, 3)
		mustPrepare(t, m, portion("middle", device, "2Gi", "20"))
		b.wantLimits("looked after", id, 20, 2)
		mustUnprepare(t, m, "middle")
		b.wantNothing()
	}
}

// Less memory is offered than claims have, because of another version, policy or what
// the driver keeps: they keep their limits, whatever they are asked for again, and nothing
// of theirs is touched.
func TestLessMemoryIsOffered(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	const most = "79Gi" // of 80, which the fixture's GPU does not offer
	old := []*resourceapi.ResourceClaim{portion("u1", mpsA, most, "25"), portion("u2", mpsA, "1Gi", "25")}
	if d, _ := testInventory(t).Lookup(mpsA); d.Share.MaxMemoryBytes >= 79<<30 {
		t.Fatalf("%d bytes are offered, this test needs less", d.Share.MaxMemoryBytes)
	}
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
		if diff := cmp.Diff(prepared[i], mustPrepare(t, next, claim)); diff != "" {
			t.Errorf("claim %d is prepared otherwise (-before +now):\n%s", i, diff)
		}
	}
	if seen := b.onHardware(); len(seen) > 0 {
		t.Errorf("effects of the new version: %v", seen)
	}
	b.wantLimits("with the new version", wholeA, 25, 79)
	if diff := cmp.Diff(before, b.limitsOfSpec("u1")); diff != "" {
		t.Errorf("limits of the container (-before +now):\n%s", diff)
	}
	mustUnprepare(t, next, "u1")
	b.wantLimits("without the large one", wholeA, 25, 1)
	mustUnprepare(t, next, "u2")
	b.wantNothing()
}

// What could not be tightened when a share was released is tightened later.
func TestLimitsAreAligned(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, portion("small", mpsA, "1Gi", "10"))
	mustPrepare(t, m, portion("large", mpsA, "3Gi", "30"))
	mustPrepare(t, m, configure(newClaim("own", wholeB), fromClaim, ownMPSOfOne))
	b.away(true)
	mustUnprepare(t, m, "large")
	b.away(false)
	b.wantLimits("while the supervisor was away", wholeA, 30, 3)
	mustReconcile(t, m)
	b.wantLimits("later", wholeA, 10, 1)
	b.hooks(nil, nil)
	mustReconcile(t, m)
	if seen := b.onHardware(); len(seen) > 0 {
		t.Errorf("effects of looking again: %v", seen)
	}
	b.wantWarnings()
}

// Two shares in one claim: the session has what the larger one needs.
func TestTwoSharesOfOneClaim(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	claim := newClaim("u1", mpsA, mpsA)
	for i, memory := range []string{"1Gi", "2Gi"} {
		claim.Status.Allocation.Devices.Results[i].ConsumedCapacity = portion("", mpsA, memory, "40").Status.Allocation.Devices.Results[0].ConsumedCapacity
	}
	prepared := mustPrepare(t, m, claim)
	if len(prepared) != 2 || prepared[0].CDIDevice == prepared[1].CDIDevice {
		t.Errorf("prepared %+v", prepared)
	}
	b.wantLimits("both", wholeA, 40, 2)
	var markers []string
	for _, line := range b.edits("u1") {
		if strings.Contains(line, hook.MPSMarkerPrefix) {
			markers = append(markers, line)
		}
	}
	if len(markers) != 2 || markers[0] == markers[1] {
		t.Errorf("a container with both is not noticed: %v", markers)
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// Limits by index count the devices of their configuration, also where each of them is
// in a session of its own.
func TestLimitsByIndex(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	claim := configure(newClaim("u1", wholeB, sliceA0, sliceA4), fromClaim, strings.ReplaceAll(migMPS,
		`"mpsConfig":{`, `"mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi","1":"2Gi"},`))
	for range 2 {
		mustPrepare(t, m, claim)
		b.wantLimits("the first", sliceA0, 0, 1)
		b.wantLimits("the second", sliceA4, 0, 2)
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// A mode that somebody else has set is left alone; one that may be this driver's is
// not.
func TestModeOfOthers(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.exclusive["GPU-a"] = true
	before := b.state()
	_, err := m.Prepare(t.Context(), newClaim("u1", mpsA))
	wantError(t, err, "device "+mpsA, "was not set by this driver")
	b.wantState(t, "refused", before)
	// The claim whose record is damaged may have set it.
	write(t, m.store.Path("u1"), "{")
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustUnprepare(t, m, "u1")
	b.wantNothing()
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
				if err := managers[(i+1)%2].Unprepare(t.Context(), types.UID(uid)); err != nil {
					t.Errorf("unprepare: %v", err)
				}
			}
		})
	}
	wg.Wait()
	b.wantNothing()
	b.wantWarnings()
}

// Whoever loses a server is told, once for each time.
func TestLosses(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	mustPrepare(t, m, newClaim("beside", mpsB))
	told := [][]string{{"u1 MPSServerLost", mpsA, "the daemon ended", "must be restarted"}, {"u2 MPSServerLost", mpsA}}
	for range 2 {
		b.lose(wholeA, mps.Running)
		mustReconcile(t, m)
		b.wantWarnings(told...)
		mustReconcile(t, m)
		mustReconcile(t, b.manager())
		b.wantWarnings()
	}
	// Who comes later has not lost anything.
	mustPrepare(t, m, newClaim("u3", mpsA))
	mustReconcile(t, b.manager())
	b.wantWarnings()

	// Also when the kubelet asks first.
	b.lose(wholeA, mps.Running)
	mustPrepare(t, m, newClaim("u1", mpsA))
	b.wantWarnings(told[0])
	mustReconcile(t, m)
	b.wantWarnings(told[1], []string{"u3 MPSServerLost"})

	// And when it has to ask again.
	b.lose(wholeA, mps.Running)
	b.hooks(failAt("write spec"), nil)
	for range 2 {
		_, err := m.Prepare(t.Context(), newClaim("u1", mpsA))
		wantError(t, err, errFault.Error())
	}
	b.hooks(nil, nil)
	b.wantWarnings(told[0])
	mustReconcile(t, m)
	b.wantWarnings(told[1], []string{"u3 MPSServerLost"})

	// And while the GPU does not answer: it may be why.
	b.lose(wholeA, mps.Running)
	b.breakDown(pciA, gpu.ErrLost)
	wantError(t, m.cleanUp(t.Context()), pciA)
	b.wantWarnings(append(told, []string{"u3 MPSServerLost"})...)
}

// Whoever goes on with a server of which a client was killed is told, once for each time.
func TestKills(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	mustPrepare(t, m, newClaim("beside", mpsB))
	killed := func(kills int) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.sessions[wholeA].kills = kills
	}
	told := [][]string{{"u1 MPSClientKilled", mpsA, "one was killed", "undefined"}, {"u2 MPSClientKilled", mpsA}}
	for kills := range 2 {
		killed(kills + 1)
		mustReconcile(t, m)
		b.wantWarnings(told...)
		mustReconcile(t, m)
		mustReconcile(t, b.manager())
		b.wantWarnings()
	}
	// Who comes later shares no server with those that were killed before.
	mustPrepare(t, m, newClaim("u3", mpsA))
	mustReconcile(t, b.manager())
	b.wantWarnings()
	// The session was made again.
	killed(0)
	mustReconcile(t, m)
	b.wantWarnings()
	killed(1)
	mustReconcile(t, m)
	b.wantWarnings(append(told, []string{"u3 MPSClientKilled"})...)
}

// A server is replaced at once when any of its shares was prepared under such a policy, and
// those of a claim's own devices never are.
func TestReactionToKills(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("before", mpsA))
	if got := b.running(wholeA).OnClientKilled; got != "" {
		t.Errorf("by default, got %q", got)
	}
	p := testPolicy()
	p.Default.MPS.OnClientKilled = policy.KilledRestart
	inventory, err := device.NewInventory(testNode(), device.Terms{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	m.SetInventory(inventory)
	mustPrepare(t, m, newClaim("after", mpsA))
	mustPrepare(t, m, configure(newClaim("own", wholeB), fromClaim, ownMPSOfOne))
	if got := b.running(wholeA).OnClientKilled; got != mps.RestartServer {
		t.Errorf("shared, got %q", got)
	}
	if got := b.running(wholeB).OnClientKilled; got != "" {
		t.Errorf("of one claim, got %q", got)
	}
}

// belowNormal is a configuration with a priority and nothing else.
const belowNormal = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultClientPriority":"BelowNormal"}}}`

// The priority of a session that claims share follows them, also where a supervisor has missed
// one that went.
func TestPriorityFollowsClaims(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	has := func(want policy.ClientPriority) {
		t.Helper()
		if got := b.running(wholeA).ClientPriority; policy.ClientPriority(got) != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	online := newClaim("online", mpsA)
	mustPrepare(t, m, configure(newClaim("batch", mpsA), fromClaim, belowNormal))
	has(policy.PriorityBelowNormal)
	mustPrepare(t, m, online)
	has(policy.PriorityNormal)
	mustUnprepare(t, m, online.UID)
	has(policy.PriorityBelowNormal)
	b.running(wholeA).ClientPriority = ""
	mustReconcile(t, m)
	has(policy.PriorityBelowNormal)
}

// A session that does not exist any more is made again.
func TestSessionGone(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	own := configure(newClaim("u3", wholeB, wholeC), fromClaim, gpuMPS)
	mustPrepare(t, m, own)
	before := b.state()
	vanish := func() {
		b.mu.Lock()
		clear(b.sessions)
		b.exclusive["GPU-c"] = false
		b.mu.Unlock()
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
	b.hooks(failAt("start session"), nil)
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
	for _, uid := range []types.UID{"u1", "u2", "u3"} {
		mustUnprepare(t, m, uid)
	}
	b.wantNothing()
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

// Without a supervisor MPS is refused with a reason, and claims end.
func TestNoSupervisor(t *testing.T) {
	// However slow the machine is, there is time for all that does not wait.
	synctest.Test(t, testNoSupervisor)
}

func testNoSupervisor(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.away(true)
	for _, claim := range []*resourceapi.ResourceClaim{
		newClaim("u1", mpsA), newClaim("u1", mpsSliceA0), configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuMPS),
	} {
		b.hooks(nil, nil)
		soon, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err := m.Prepare(soon, claim)
		cancel()
		wantError(t, err, "MPS supervisor", "DaemonSet of the mps-supervisor", "device gpu-0000-")
		if !errors.Is(err, sharing.ErrNoSupervisor) || len(b.onHardware()) > 0 {
			t.Errorf("got %v after %v", err, b.onHardware())
		}
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
	wantError(t, first, "MPS supervisor", wholeA, wholeB)
	if strings.Count(first.Error(), "is the DaemonSet") != 2 {
		t.Errorf("it is said for each claim, and not for each GPU: %v", first)
	}
	for _, uid := range []types.UID{"u2", "u1", "u3"} {
		mustUnprepare(t, m, uid)
	}
	for _, uid := range []types.UID{"u1", "u2", "u3"} {
		if b.spec(uid) != nil {
			t.Errorf("claim %s has a CDI spec", uid)
		}
	}
	// The first to go was not the last of its GPU, so there is nothing to wait for.
	if r, err := m.store.Read("u2"); r != nil || err != nil {
		t.Errorf("u2: %+v, %v", r, err)
	}
	wantError(t, m.cleanUp(t.Context()), "claim default/claim-u1", "claim default/claim-u3", "MPS supervisor")
	_, err := m.Prepare(t.Context(), newClaim("whole", wholeA))
	wantError(t, err, "device "+wholeA, mpsA, "being released")

	b.away(false)
	mustPrepare(t, m, newClaim("whole", wholeA))
	mustReconcile(t, m)
	mustUnprepare(t, m, "whole")
	mustUnprepare(t, m, "u0")
	b.wantNothing()
}

// What nobody has is ended, if it is known whose GPU it is.
func TestSweepSessions(t *testing.T) {
	b := newBox(t)
	m := b.manager()
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
	if err := os.Remove(m.store.Path("damaged")); err != nil {
		t.Fatal(err)
	}
	mustReconcile(t, m)
	b.wantState(t, "swept", before)

	stray("gpu-0000-ff-00-0", "GPU-x")
	strange := b.state()
	mustReconcile(t, m)
	b.wantState(t, "not this node's", strange)
}

// A session on several GPUs that nobody has is ended, and their modes are set back.
func TestSweepSessionOfTwoGPUs(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	b.sessions[wholeA] = &runningSession{phase: mps.Running, Spec: mps.Spec{ID: wholeA, Devices: []string{"GPU-a", "GPU-c"}}}
	b.exclusive["GPU-a"], b.exclusive["GPU-c"] = true, true
	mustReconcile(t, m)
	b.wantNothing()
}

// Whoever has a record that cannot be read may be a client.
func TestLastKnownShare(t *testing.T) {
	for _, device := range []string{mpsA, mpsSliceA0} {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, newClaim("u1", device))
		mustPrepare(t, m, newClaim("u2", device))
		otherVersion(t, m, "u2")
		mustUnprepare(t, m, "u1")
		wantError(t, m.cleanUp(t.Context()), "claim default/claim-u1", "cannot be read", "u2.boot-1")
		if b.spec("u1") != nil || len(b.sessions) != 1 {
			t.Errorf("left: %v", b.state())
		}
		mustPrepare(t, m, newClaim("u2", device))
		mustReconcile(t, m)
		mustUnprepare(t, m, "u2")
		b.wantNothing()
	}
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
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, test.claim)
			if test.loses {
				b.lose(test.id, test.phase)
			}
			b.running(test.id).phase = test.phase
			b.away(test.phase == "")
			survey(t.Context(), m)
			b.pass((5 * time.Second))
			if diff := cmp.Diff(test.want, mpsFindings(survey(t.Context(), m))); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// A session that may be that of a claim whose record cannot be read holds its device until that is released,
// which nobody else must get. One that a known claim has is that claim's.
func TestSurveySessionOfDamagedRecord(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsB))
	damage(t, m, "u1")
	wantError(t, m.cleanUp(t.Context()), "MPS session "+wholeA, "records/u1.boot-1")
	conditions := survey(t.Context(), m).Conditions
	for _, c := range conditions {
		if c.PCIAddress != pciA || c.Reason != device.ReleasePending || !strings.Contains(c.Message, "records/u1.boot-1") {
			t.Errorf("got %+v", c)
		}
	}
	if len(conditions) != 2 {
		t.Errorf("got %+v", conditions)
	}
	mustUnprepare(t, m, "u1")
	mustReconcile(t, m)
	if conditions := survey(t.Context(), m).Conditions; len(conditions) != 0 {
		t.Errorf("released: %+v", conditions)
	}
	mustUnprepare(t, m, "u2")
	b.wantNothing()
}

// Servers are no users. Nor is anybody on a GPU that others have shares of.
func TestOrphanWithShares(t *testing.T) {
	b := newBox(t)
	m := b.manager()
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

// What claims had before the machine was started anew they will have again.
func TestInUse(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", mpsA, sliceB0))
	b.boot("boot-2")
	m = b.manager()
	mustPrepare(t, m, admin(newClaim("u2", mpsA)))
	mustPrepare(t, m, newClaim("u3", wholeC))
	got, err := m.InUse()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{mpsA, sliceB0, wholeC}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestSupervisorThatBeginsLater is not reported at once: the two start together
// with the node. One that is away is, until it answers.
func TestSupervisorThatBeginsLater(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	tainted := func() int { return len(survey(t.Context(), m).Conditions) }
	b.away(true)
	if got := tainted(); got != 0 || len(m.Unlooked()) != 3 {
		t.Errorf("%d conditions at once, unlooked are %v", got, m.Unlooked())
	}
	b.pass((5 * time.Second))
	if got := tainted(); got != 3 || len(m.Unlooked()) > 0 { // one for each GPU
		t.Errorf("%d conditions while it is away, unlooked are %v", got, m.Unlooked())
	}
	b.away(false)
	if got := tainted(); got != 0 {
		t.Errorf("%d conditions when it is back", got)
	}
	b.away(true)
	if got := tainted(); got != 0 || len(m.Unlooked()) > 0 {
		t.Errorf("%d conditions at once, the second time, unlooked are %v", got, m.Unlooked())
	}
}

// Of a record that cannot be read nobody knows which devices it is about.
func TestInUseNotKnown(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceB0))
	write(t, m.store.Path("u2"), "partage-claim-record/9")
	got, err := m.InUse()
	wantError(t, err, "u2.boot-1")
	if diff := cmp.Diff([]string{sliceB0}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestSessionIsBackForOthers: a session that a claim has started again is there for all that share it, whatever becomes of
// that claim.
func TestSessionIsBackForOthers(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", mpsA))
	mustPrepare(t, m, newClaim("u2", mpsA))
	b.mu.Lock()
	clear(b.sessions)
	b.mu.Unlock()
	b.hooks(failAt("start session"), nil)
	wantError(t, m.cleanUp(t.Context()), "device "+mpsA) // people are told
	b.hooks(failAt("write spec"), nil)
	if err := runPrepare(t.Context(), m, newClaim("u3", mpsA)); err == nil {
		t.Error("the spec cannot be written")
	}
	b.hooks(nil, nil)
	mustReconcile(t, m)
	claims, err := m.Live()
	if err != nil || len(claims) != 2 {
		t.Fatalf("got %+v, %v", claims, err)
	}
	for _, c := range claims {
		if s := c.Devices[0].Session; s == nil || !s.Running {
			t.Errorf("claim %s: session %+v", c.Claim.UID, s)
		}
	}
}

// TestPrepareAgainBehindMuteSupervisor: the kubelet gets a reason before its own time is over.
func TestPrepareAgainBehindMuteSupervisor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		mustPrepare(t, m, portion("share", mpsA, "1Gi", "10"))
		b.mu.Lock()
		b.mute = true
		b.mu.Unlock()
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

// lateLook has the first look at a GPU wait until it is told to go on.
type lateLook struct {
	converge.Partitions
	gpu           string
	once          sync.Once
	looks, resume chan struct{}
}

func (l *lateLook) State(ctx context.Context, pciAddress string) (gpu.MIGState, error) {
	if pciAddress == l.gpu {
		l.once.Do(func() { close(l.looks); <-l.resume })
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
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS))
			l := &lateLook{Partitions: m.engine.Partitions, gpu: pciA, looks: make(chan struct{}), resume: make(chan struct{})}
			m.engine.Partitions = l
			happens[0](b)
			var behind sync.WaitGroup
			behind.Go(func() { _ = m.cleanUpGPU(t.Context(), pciA) })
			<-l.looks
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
