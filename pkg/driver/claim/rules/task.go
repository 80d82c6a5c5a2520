// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/policy"
)

// ActionKind is the kind of an action. Each is one idempotent effect, found again by its address.
type ActionKind uint8

// Kinds of actions. Those up to RemoveSpec need the disk only.
const (
	Nothing      ActionKind = iota
	Start                   // record: these parts are Started; the record is made if there is none
	Announce                // record: MIG mode is turned on for the part; the record is made if there is none
	Unstart                 // record: nothing was made of the part after all
	MarkLost                // record: the partition was seen to be absent
	MarkPrepared            // record: all of the claim is there
	NoteSessions            // record: what has become of its MPS sessions, of which people are told
	Clear                   // record: nothing is left of the claim on this GPU; the record goes with its last part
	ClearGuard              // nothing is left on this GPU of what a file that cannot be read may be about; it goes with the last GPU
	DropGuard               // the file that cannot be read: the claim has another one
	WriteSpec               // the CDI spec, and what belongs to the claim and to no GPU
	RemoveSpec
	EnableMIG
	DisableMIG
	CreateGI
	DropNamesakes // the specs of other claims that name the ID of the instance, before anything can run in it
	CreateCI
	DestroyCI
	DestroyGI
	SetExclusive
	SetDefault
	StartSession // or bring the one that runs to the demand
	StopSession
	SetInterval
	ResetInterval
)

// Action is one effect. A record's claim and GPU are those of the task where it is about all parts there.
type Action struct {
	Kind  ActionKind
	Claim types.UID
	GPU   string
	// Key, Place and Session are those of the part, where it is about one.
	Key     string
	Place   record.Place
	Session string
	// Demand and Interval are what is started, or set.
	Demand   Demand
	Interval policy.Interval
}

// Aim is the purpose of a task.
type Aim uint8

// The aims, in the order in which tasks should be tried: what takes away comes before what makes.
const (
	Repair Aim = iota
	Unguard
	Release
	Make
	Commit // all GPUs of the claim have to propose it at once
)

// Task is what may be done for one claim: all of it in order, until something fails, under the locks of
// With. Only one task is carried out on one observation.
type Task struct {
	Claim   types.UID
	Aim     Aim
	Actions []Action
	Final   []Action // they come after the Actions of all GPUs
	With    []string // the GPUs that have to agree; empty is this one alone
}

// State is what a record has come to on this GPU.
type State uint8

// Values of State.
const (
	Working  State = iota // it goes on, or what it had is gone, as statements say
	Complete              // all of it is there
	Waiting               // another claim, or a process, is in the way and may go
	Refused               // it cannot be had as things are
	Pending               // its release waits, or the GPU does not answer
)

// Verdict is what a call learns about its claim. It is an error unless the claim is Complete.
type Verdict struct {
	Claim types.UID
	State State
	Why   string    // for people; it names the device
	Other types.UID // the claim that is in the way, or empty
	// Cause is one of this package, partition.ErrDivided, partition.ErrForeign, gpu.ErrInUse, gpu.ErrFabricPending, why the GPU or
	// the MPS supervisor has not answered, or nil.
	Cause error
}

func (v *Verdict) Error() string { return v.Why }

func (v *Verdict) Unwrap() error { return v.Cause }

var (
	// ErrTaken means that other claims have the place, or all shares.
	ErrTaken = errors.New("other claims have it")
	// ErrGuarded means that a claim whose record cannot be read may have the place.
	ErrGuarded = errors.New("a record cannot be read")
)

// Reason is what is wrong with a device: a taint, an event, a condition of a claim.
type Reason string

// Reasons that devices are not as they should be.
const (
	Unresponsive     Reason = "Unresponsive"
	ReleasePending   Reason = "ReleasePending"
	Occupied         Reason = "Occupied"
	PartitionGone    Reason = "PartitionGone"
	UsedByOthers     Reason = "UsedByOthers"
	RefusedInUse     Reason = "RefusedInUse" // what the hardware refuses because somebody uses the GPU; not of Decide, which has no memory
	OpenedByOthers   Reason = "OpenedByOthers"
	RecordUnreadable Reason = "RecordUnreadable"
	SessionUnwell    Reason = "SessionUnwell"
	Unsupervised     Reason = "Unsupervised"
)

// Statement says what is wrong where.
type Statement struct {
	Place  record.Place
	Claim  record.Ref // empty where it is about none, and without a name where its record cannot be read
	Device string
	Reason Reason
	Text   string
}

// Plan is what follows from an observation.
type Plan struct {
	Tasks      []Task
	Verdicts   []Verdict
	Statements []Statement
	Static     []device.Static // partitions that somebody else made, and that can be allocated, or that a claim has
}

// Verdict returns what became of a claim: of what its call wants, where it also has something that is released first.
func (p *Plan) Verdict(claim types.UID) (Verdict, bool) {
	for _, v := range slices.Backward(p.Verdicts) {
		if v.Claim == claim {
			return v, true
		}
	}
	return Verdict{}, false
}
