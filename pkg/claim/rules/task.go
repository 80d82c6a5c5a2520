// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

// Do is the kind of an action. Each is one idempotent effect, found again by its address.
type Do uint8

// The actions.
const (
	Nothing       Do = iota
	Start            // record: these parts are Started; the record is made if there is none
	Announce         // record: MIG mode is turned on for the part; the record is made if there is none
	Unstart          // record: nothing was made of the part after all
	MarkLost         // record: the partition was seen to be absent
	MarkPrepared     // record: all of the claim is there
	MarkReleasing    // record: the claim is released
	NoteSessions     // record: what has become of its MPS sessions, of which people are told
	Clear            // record: nothing is left of the claim on this GPU; the record goes with its last part
	DropGuard        // the file that cannot be read
	WriteSpec        // the CDI spec, and what belongs to the claim and to no GPU
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
	Do    Do
	Claim types.UID
	GPU   string
	// Key, Place and Session are those of the part, where it is about one.
	Key     string
	Place   Place
	Session string
	// Demand and Interval are what is started, or set.
	Demand   Demand
	Interval policy.Interval
}

// Aim is what a task is for.
type Aim uint8

// The aims, in the order in which tasks should be tried: what takes away comes before what makes. What is joint needs all
// GPUs of the claim to propose it at once.
const (
	Repair  Aim = iota
	Unguard     // joint
	Release
	Disown // joint
	Make
	Commit // joint
)

// Task is what may be done for one claim: all of it in order, until something fails, under the locks of
// With. Only one task is carried out on one observation.
type Task struct {
	Claim   types.UID
	Aim     Aim
	Actions []Action
	Final   []Action // they come after the Actions of all GPUs; what is joint has some
	With    []string // the GPUs that have to agree; empty is this one alone
}

// State is what a record has come to on this GPU.
type State uint8

// The states.
const (
	Working  State = iota // nothing is in its way, and nothing is said of it
	Complete              // all of it is there
	Waiting               // another claim, or a process, is in the way and may go
	Refused               // it cannot be had as things are
	Missing               // what it had is gone
	Pending               // its release waits
	Unknown               // the GPU does not answer
)

// Verdict is what a call learns about its claim.
type Verdict struct {
	Claim types.UID
	State State
	Why   string    // for people; it names the device
	Other types.UID // the claim that is in the way, or empty
	Code  Code      // for errors.Is in callers
}

// Code is the cause of a verdict.
type Code uint8

// The causes.
const (
	NoCode        Code = iota
	Overlap            // another claim holds the place
	SharesTaken        // other claims have all shares
	Divided            // somebody else has divided the GPU
	Foreign            // an instance of somebody else is in the place
	InUse              // the hardware refuses because somebody uses the GPU
	ModeFixed          // only an administrator changes the MIG mode or the compute mode
	NoSupervisor       // nobody starts MPS
	NotRegistered      // the NVLink fabric
	Guarded            // a record that cannot be read may be about it
	OutOfService       // the GPU does not answer
	Unanswered         // a call on the GPU has failed; another one may not
)

// Reason is what is wrong with a device: a taint, an event, a condition of a claim.
type Reason string

// The reasons.
const (
	Unresponsive     Reason = "Unresponsive"
	ReleasePending   Reason = "ReleasePending"
	Occupied         Reason = "Occupied"
	PartitionGone    Reason = "PartitionGone"
	UsedByOthers     Reason = "UsedByOthers"
	OrphanInUse      Reason = "OrphanInUse"
	RecordUnreadable Reason = "RecordUnreadable"
	SessionUnwell    Reason = "SessionUnwell"
	Unsupervised     Reason = "Unsupervised"
)

// Statement says what is wrong where.
type Statement struct {
	Place  Place
	Claim  types.UID // empty where it is about none
	Device string
	Reason Reason
	Text   string
	Due    bool // nothing is in the way of it
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
