// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

const (
	maxGPUs      = 2
	maxClaims    = 3
	maxParts     = 3 // of one claim
	maxInstances = 3
	maxQueue     = 14
	maxSessions  = 2
	processes    = 2
)

// Health is how a GPU answers.
type health uint8

const (
	healthy health = iota
	slow
	hung
	lost
)

// kubelet is how far the pod of a claim has come.
type kubelet uint8

const (
	idle kubelet = iota
	wants
	prepared
	running
	ending
)

// instance is a GPU instance. What follows Compute is what only the model knows.
type instance struct {
	ID      int8
	Place   place
	Compute int8
	// By is the claim that it was made for, or a stranger.
	By int8
	// Indistinct is an instance of a stranger that nothing on the machine tells apart from the claim's:
	// it was made in the very place of a record that has begun, and nobody was looking.
	Indistinct bool
	// Unseen was made while a task was at work, which has not looked since.
	Unseen bool
}

const stranger int8 = -1

func (i *instance) there() bool { return i.ID != 0 }

type gpuState struct {
	Health      health
	MIG         bool
	Instances   [maxInstances]instance
	Exclusive   bool
	ExclusiveBy int8
	Slice       int8
	SliceBy     int8
	// SliceLost means that the driver was loaded anew, and has forgotten the time slice.
	SliceLost bool
	// Intruder is a process of nobody's claim that has memory on the undivided GPU.
	Intruder intruder
	// Enabled is how often MIG mode was turned on while that was there.
	Enabled int8
}

// intruder is a process that no claim explains.
type intruder uint8

const (
	nobody intruder = iota
	present
	// unseen has come while a task was at work, which has not looked since.
	unseen
)

// phase is the state of a record.
type phase uint8

const (
	isPreparing phase = iota
	isPrepared
	isReleasing
)

type recordState struct {
	Exists  bool
	Phase   phase
	Boot    int8
	Arrived int8
	Marks   [maxParts]record.Mark
	// Made are the IDs of the instances that the CDI spec named when the record was last written.
	Made [maxParts]int8
	// Slices are the time slices that the record says.
	Slices [maxParts]int8
	// Emptied are the parts whose place a task has emptied that came to its end without saying so here.
	Emptied partSet
}

type specState struct {
	Exists bool
	Boot   int8
	IDs    [maxParts]int8
}

// partSet is a set of the parts of a claim.
type partSet uint8

func (p partSet) has(i int8) bool { return i >= 0 && p&(1<<i) != 0 }

type claimState struct {
	Allocated bool
	Kubelet   kubelet
	// Stays is a process that has outlived its pod, or a handle that it passed on.
	Stays bool
	Clock int8
}

type call struct {
	Process int8
	Arrived int8
}

type release struct {
	Process int8
	Arrived int8
	Stage   int8
	// Memory means that the disk had no room for the tombstone.
	Memory bool
	// Late means that the kubelet does not wait for it any more.
	Late bool
}

// work is a task that a process carries out under the locks of GPUs.
type work struct {
	// Observing means that there is no task yet.
	Observing bool
	// Release means that the task takes something back.
	Release bool
	// Stray means that its claim had no record when that was read: it is looked again before its CDI spec goes.
	Stray bool
	// Process is 0 where there is none.
	Process int8
	Locks   uint8
	Queue   [maxQueue]action
	N       int8
	// IDs are those of the claim's instances, as they were seen or created.
	IDs [maxParts]int8
	// Stuck is a call that does not return; the rest of the task has been given up.
	Stuck bool
	// Destroyed are the parts of its claim whose place this work has emptied.
	Destroyed partSet
	// Arrived is the call that the task is for.
	Arrived int8
}

type budget struct {
	Crash, Stranger, Mode, Hang, Lost, Reboot, Stays, Disk, Unreadable, Fail, Force, Timeout, Again, Orphan, Away, Intrude, Reload int8
	Rounds                                                                                                                         [maxClaims]int8
}

type world struct {
	Boot     int8
	GPU      [maxGPUs]gpuState
	Sessions [maxSessions]int8 // limit, 0 is not running
	Records  [maxClaims]recordState
	Guards   [maxClaims]int8 // when the file was last written
	// Cleared are the GPUs on which nothing is left that the file could be about, as the process knows that cannot read it.
	Cleared [maxClaims]uint8
	Tombs   [maxClaims]int8
	Specs   [maxClaims]specState
	Full    bool
	// Away means that the MPS supervisor does not answer.
	Away     bool
	Reserve  bool
	Claims   [maxClaims]claimState
	Calls    [maxClaims][2]call // what the kubelet waits for, and what it has forgotten
	Releases [maxClaims]release
	Work     [maxGPUs]work
	Left     budget
}

// Scenario is one small configuration.
type Scenario struct {
	Name string
	// States is how many there are, where all were visited once.
	States int
	GPUs   int
	Claims [][]device
	// Places are where strangers make instances.
	Places []place
	// Foreign are instances of strangers that are there from the start, on GPU 0.
	Foreign []place
	// Fixed means that only an administrator changes the MIG mode of the GPUs, which is off.
	Fixed bool
	// Newer are the claims whose records process 1 cannot read, because process 2, a later version, writes them.
	Newer [maxClaims]bool
	// Torn means that things happen in the middle of an observation.
	Torn bool
	// Hasty breaks a rule of act: the CDI spec of a claim that had no record is removed without another look.
	Hasty bool
	// ForeignMode means that an administrator has set EXCLUSIVE_PROCESS on GPU 0.
	ForeignMode bool
	Processes   int
	Budget      budget
	// KeepLocks breaks a rule of act: a call that does not return keeps the locks of all GPUs of its task.
	KeepLocks bool
}

// partOf returns the part that an action is about, or nil.
func (s *Scenario) partOf(a *action) *device {
	if a.Claim < 0 || a.Part < 0 {
		return nil
	}
	return &s.Claims[a.Claim][a.Part]
}

func (s *Scenario) start() world {
	var w world
	w.Boot, w.Left, w.Reserve = 1, s.Budget, true
	for _, p := range s.Foreign {
		w.GPU[0].MIG = true
		w.GPU[0].add(p, stranger, 1)
	}
	if s.ForeignMode {
		w.GPU[0].Exclusive, w.GPU[0].ExclusiveBy = true, stranger
	}
	return w
}

// --- hardware ---

func (g *gpuState) at(p place) *instance {
	for i := range g.Instances {
		if g.Instances[i].there() && g.Instances[i].Place == p {
			return &g.Instances[i]
		}
	}
	return nil
}

func (g *gpuState) byID(id int8) *instance {
	for i := range g.Instances {
		if g.Instances[i].there() && g.Instances[i].ID == id {
			return &g.Instances[i]
		}
	}
	return nil
}

func (g *gpuState) divided() bool {
	for i := range g.Instances {
		if g.Instances[i].there() {
			return true
		}
	}
	return false
}

func (g *gpuState) overlapping(p place) bool {
	for i := range g.Instances {
		if g.Instances[i].there() && g.Instances[i].Place.Overlaps(p) {
			return true
		}
	}
	return false
}

// add makes an instance with the lowest free id: ids are used again.
func (g *gpuState) add(p place, by int8, compute int8) *instance {
	id := int8(1)
	for g.byID(id) != nil {
		id++
	}
	at := 0
	for at < maxInstances && g.Instances[at].there() && less(g.Instances[at].Place, p) {
		at++
	}
	copy(g.Instances[at+1:], g.Instances[at:maxInstances-1])
	g.Instances[at] = instance{ID: id, Place: p, Compute: compute, By: by}
	return &g.Instances[at]
}

func (g *gpuState) remove(p place) {
	for i := range g.Instances {
		if g.Instances[i].there() && g.Instances[i].Place == p {
			copy(g.Instances[i:], g.Instances[i+1:])
			g.Instances[maxInstances-1] = instance{}
			return
		}
	}
}

func less(p, q place) bool {
	return p.Start < q.Start || p.Start == q.Start && p.Size < q.Size
}

// --- what the scenario says ---

// on calls f for each part of a claim on a GPU.
func (s *Scenario) on(c int, g int8, f func(i int, p *device)) {
	for i := range s.Claims[c] {
		if p := &s.Claims[c][i]; p.GPU == g {
			f(i, p)
		}
	}
}

// any reports whether a claim has such a part on a GPU.
func (s *Scenario) any(c int, g int8, is func(i int, p *device) bool) bool {
	for i := range s.Claims[c] {
		if p := &s.Claims[c][i]; p.GPU == g && is(i, p) {
			return true
		}
	}
	return false
}

func (s *Scenario) has(c int, g int8) bool {
	return s.any(c, g, func(int, *device) bool { return true })
}

// conflict reports whether two claims cannot have their devices at the same time.
func (s *Scenario) conflict(a, b int) bool {
	for i := range s.Claims[a] {
		if s.conflicts(b, &s.Claims[a][i]) {
			return true
		}
	}
	return false
}

// conflicts reports whether a claim has a part that cannot be had together with another one.
func (s *Scenario) conflicts(c int, p *device) bool {
	return s.any(c, p.GPU, func(_ int, q *device) bool { return p.Conflicts(q) })
}

// shares reports whether a claim has a share of the same device.
func (s *Scenario) shares(c int, p *device) bool {
	return s.any(c, p.GPU, func(_ int, q *device) bool { return p.SameDevice(q) })
}

// holds reports whether processes of a claim have its devices.
func (w *world) holds(c int) bool { return w.Claims[c].Kubelet == running || w.Claims[c].Stays }

// busy reports whether processes are in a place.
func (s *Scenario) busy(w *world, g int, place place) bool {
	if place == undivided && w.GPU[g].Intruder != nobody {
		return true
	}
	for c := range s.Claims {
		if w.holds(c) && s.any(c, int8(g), func(_ int, p *device) bool { return !p.Admin && p.Place == place }) {
			return true
		}
	}
	return false
}

// ready reports whether a claim may count on what it has: the kubelet was told so, and nobody has
// taken the claim away.
func (w *world) ready(c int) bool {
	k := &w.Claims[c]
	return k.Kubelet == running || k.Kubelet == prepared && k.Allocated
}

// hasRecord reports whether a claim has a record of this boot.
func (w *world) hasRecord(c int) bool { return w.Records[c].Exists && w.Records[c].Boot == w.Boot }

func (w *world) cleared(c int, g int8) bool { return w.Cleared[c]&(1<<g) != 0 }

// calling returns the arrival of the youngest Prepare for a claim that is not out of date, of one
// process or of any (0).
func (w *world) calling(c int, process int8) (arrived int8) {
	for _, k := range w.Calls[c] {
		if k.Process != 0 && (process == 0 || k.Process == process) && k.Arrived > w.Tombs[c] {
			arrived = max(arrived, k.Arrived)
		}
	}
	return arrived
}

// releasing reports whether the record of a claim is one that is being released, as process p knows.
func (w *world) releasing(c int, p int8) bool {
	r := &w.Records[c]
	if r.Phase == isReleasing || r.Boot == w.Boot && r.Arrived < w.Tombs[c] || r.Boot != w.Boot && w.Tombs[c] > 0 {
		return true
	}
	k := &w.Releases[c]
	return k.Process == p && k.Memory && k.Stage > 0 && r.Arrived < k.Arrived
}

// The world is small, so that a state is a few hundred bytes: GPUs, claims and sessions are numbers. The rules get the
// observations that an engine would make of it.

// place is a MIG profile at a placement. The zero value is the undivided GPU.
type place struct{ Profile, Start, Size int8 }

var undivided = place{}

// Overlaps reports whether two places on one GPU have a part in common.
func (p place) Overlaps(q place) bool {
	return p == undivided || q == undivided || p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

func (p place) real() record.Place {
	return record.Place{ProfileID: uint32(p.Profile), Placement: gpu.Placement{Start: int(p.Start), Size: int(p.Size)}}
}

func compact(p record.Place) place {
	return place{Profile: int8(p.ProfileID), Start: int8(p.Start), Size: int8(p.Size)}
}

const (
	// none is no session, noInstance what a spec names in place of an instance.
	none       int8 = 0
	noInstance int8 = -1
)

// kind is how a device comes about.
type kind uint8

const (
	undividedGPU kind = iota
	ofClaims          // a partition that is made for claims
	ofStranger        // a partition that somebody else made
)

// device is what a claim has on one GPU.
type device struct {
	GPU    int8
	Kind   kind
	Place  place
	Shared bool
	Admin  bool
	// Fixed means that only an administrator changes the MIG mode.
	Fixed bool
	// Session is the MPS session that it is in, with the limit that the claim needs.
	Session int8
	Limit   int8
	// Own means that the session is the claim's own.
	Own bool
	// Slice is the time slice that the claim asked for, or 0.
	Slice int8
	// Clients is how many shares the device has, or 0.
	Clients int8
}

// SameDevice reports whether both are slots of one shared device.
func (p *device) SameDevice(q *device) bool {
	return p.Shared && q.Shared && p.GPU == q.GPU && p.Kind == q.Kind && p.Place == q.Place && p.Session == q.Session
}

// Conflicts reports whether two claims cannot have both.
func (p *device) Conflicts(q *device) bool {
	return p.GPU == q.GPU && !p.Admin && !q.Admin && p.Place.Overlaps(q.Place) && !p.SameDevice(q)
}

// action is one of package rules.
type action struct {
	Kind  rules.ActionKind
	Claim int8
	GPU   int8
	// Part is one of the claim's, or -1.
	Part    int8
	Place   place
	Session int8
	// Value is a limit or a time slice.
	Value int8
}

// task is one of package rules.
type task struct {
	Claim   int8
	Aim     rules.Aim
	Actions []action
	Final   []action
	With    []int8
}

var (
	gpuNames     = [maxGPUs]string{"0000:1b:00.0", "0000:3b:00.0"}
	claimNames   = [maxClaims]types.UID{"claim-0", "claim-1", "claim-2"}
	partNames    = [maxParts]types.UID{"part-0", "part-1", "part-2"} // as if each were a share
	sessionNames = [maxSessions]string{"session-1", "session-2"}
	intervals    = [...]policy.Interval{"", policy.IntervalShort, policy.IntervalMedium, policy.IntervalLong}
	boots        = [...]string{"", "boot-1", "boot-2", "boot-3"}
	states       = [...]record.State{record.Preparing, record.Prepared, record.Releasing}
)

func index[T comparable](all []T, one T) int8 {
	for i := range all {
		if all[i] == one {
			return int8(i)
		}
	}
	return -1
}

// partOf is the part of a claim that has this key, or -1.
func partOf(key string) int8 {
	return int8(slices.IndexFunc(partNames[:], func(name types.UID) bool { return strings.HasSuffix(key, "-"+string(name)) }))
}

func compactAction(a *rules.Action) action {
	c := action{Kind: a.Kind, Claim: index(claimNames[:], a.Claim), GPU: index(gpuNames[:], a.GPU), Part: partOf(a.Key), Place: compact(a.Place)}
	if a.Session != "" {
		c.Session = index(sessionNames[:], a.Session) + 1
	}
	switch a.Kind {
	case rules.StartSession:
		c.Value = int8(a.Demand.Percent)
	case rules.SetInterval, rules.Start:
		c.Value = index(intervals[:], a.Interval)
	}
	return c
}

func compactTask(t *rules.Task) task {
	c := task{Claim: index(claimNames[:], t.Claim), Aim: t.Aim}
	for i := range t.Actions {
		c.Actions = append(c.Actions, compactAction(&t.Actions[i]))
	}
	for i := range t.Final {
		c.Final = append(c.Final, compactAction(&t.Final[i]))
	}
	for _, with := range t.With {
		c.With = append(c.With, index(gpuNames[:], with))
	}
	return c
}

// tasks decides, and returns what the world carries out.
func (m *machine) tasks(o *rules.Observation) []task {
	plan := m.decide(*o)
	tasks := make([]task, len(plan.Tasks))
	for i := range plan.Tasks {
		tasks[i] = compactTask(&plan.Tasks[i])
	}
	return tasks
}

// deviceName is the same for shares of one device.
func deviceName(d *device) string {
	kind := "device"
	switch {
	case d.Session != none && d.Shared:
		kind = "mps"
	case d.Shared:
		kind = "timeslice"
	}
	return kind + "-" + gpuNames[d.GPU] + "-" + name(d.Place)
}
