// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// Demand is what a claim needs of an MPS session, and what a session gives.
type Demand struct {
	// Percent and MemoryBytes are what the clients of one claim may have of a session that claims share. Zero is no limit.
	record.Limits
	Priority       policy.ClientPriority // the highest among the clients, or empty where nobody asks for any
	OnClientKilled policy.OnClientKilled
}

// Part is one device of a claim, or one share of a device.
type Part = record.Device

// Record is what a claim wants or has, on all its GPUs. One that is older than the last release of its claim is Releasing.
type Record struct {
	*record.Record
	// Wanted means that only a call of this process has it, and no file. Calling means that a Prepare for the claim is at work, in any
	// process. Outdated means that this Prepare is younger than the one that wrote the record.
	Wanted, Calling, Outdated bool
	News                      bool // people do not know yet what has become of its MPS sessions
}

// Spec is a CDI spec.
type Spec struct {
	Claim    types.UID
	Outdated bool // another one would be written now, with the same instances
}

// Session is an MPS session that the supervisor has.
type Session struct {
	ID      string
	Demand  Demand
	GPUs    []string // that it has, as far as they are known
	Running bool     // false for one that starts, or does not work
	Unwell  string   // why it does not work, for people, or empty
}

// Hardware is one bounded observation of a GPU.
type Hardware struct {
	Err                  error         // why it has not answered, and nothing is known of it, or nil
	gpu.MIGState                       // the mode, and all GPU instances, foreign ones included
	Profiles             []gpu.Profile // as far as they are known
	Exclusive, OtherMode bool          // the compute mode EXCLUSIVE_PROCESS, or another one that is not DEFAULT
	NoMode               bool          // it has no compute mode that can be changed
	ModeUnknown          bool          // nobody could ask for the compute mode
	IntervalLost         bool          // the driver may have been loaded after a time slice was set, and have forgotten it
	Fabric               string        // why the undivided GPU is not registered with its NVLink fabric yet, or empty
	// Users are the processes on the undivided GPU that no record explains, InstanceUsers those on GPU instances by ID, where
	// Needs asks for them, or nothing: "process 4711 (python), pod team-a/train, container main".
	Users         string
	InstanceUsers map[int]string
	Opened        string // the processes that have had its device node, and nothing else of it, open for so long that they do not count
}

// Observation is everything that is known about one GPU at one moment.
type Observation struct {
	GPU, Boot string // a PCI address, and the kernel's boot ID
	Hardware  Hardware
	// Sessions are those on this GPU. Unsupervised is why the supervisor has not answered, or nil.
	Sessions     []Session
	Unsupervised error
	// Shareable means that shares of the GPU by MPS are offered: there may be sessions that an absent supervisor does not tell of.
	Shareable bool
	Records   []Record       // those with a part on this GPU, and what calls of this process want
	Guards    []record.Guard // those that may be about something on this GPU
	Specs     []Spec         // the CDI specs of claims that have a part on this GPU, and of claims that have no record
	Refused   *Refusal       // what the hardware has refused since the lock was taken, or nil
}

// Refusal is an action that had definitely no effect.
type Refusal struct {
	Action Action
	Err    error // of gpu.ErrInUse it may be possible later: somebody uses the GPU, whom the text names
}

// Needs says which parts of the hardware have to be observed because of what the records say.
type Needs struct {
	Mode, Fabric    bool // the compute mode, the registration with the fabric
	Users, Sessions bool // the processes that no record explains, the MPS sessions
}
