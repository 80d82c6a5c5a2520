// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// Verdict is how a pod or claim is.
type Verdict string

// Verdicts. A pod or claim that Waits or IsStuck needs somebody.
const (
	// Allocated means that it has its devices.
	Allocated Verdict = "Allocated"
	// Allocatable means that the scheduler would allocate it now.
	Allocatable Verdict = "Allocatable"
	// Waits means that it cannot be allocated as things are.
	Waits Verdict = "Waits"
	// Starting means that it has its devices, and that its containers have not had the time to start.
	Starting Verdict = "Starting"
	// IsStuck means that it has its devices, and its containers do not start or it does not end.
	IsStuck Verdict = "Stuck"
	// Unknown means that something which could contradict it was not looked at, or may not be.
	Unknown Verdict = "Unknown"
	// NoDevices means that it asks for none.
	NoDevices Verdict = "NoDevices"
	// Finished means that the pod has ended, and needs its devices no more.
	Finished Verdict = "Finished"
)

// Cause is why something waits, for programs.
type Cause string

// Causes.
const (
	Gated            Cause = "SchedulingGated"
	Refused          Cause = "RefusedByAPIServer"
	ResourceUnserved Cause = "ExtendedResourceNotProvided"
	VolumeMissing    Cause = "VolumeMissing"
	PodsNotCreated   Cause = "PodsNotCreated"
	ClaimNotCreated  Cause = "ClaimNotCreated"
	ClaimMissing     Cause = "ClaimMissing"
	TemplateMissing  Cause = "TemplateMissing"
	OwnPredecessor   Cause = "WaitsForOwnPredecessor"
	ClaimNotOwned    Cause = "ClaimNotOwned"
	ClaimDeleted     Cause = "ClaimBeingDeleted"
	ClaimFull        Cause = "ClaimReservedByTooMany"
	NotBound         Cause = "BindingConditionsNotMet"
	ClaimInvalid     Cause = "ClaimInvalid"
	AdminForbidden   Cause = "AdminAccessForbidden"
	NoSlices         Cause = "NoResourceSlices"
	SearchTooLong    Cause = "SearchTooLong"
	ClassMissing     Cause = "ClassMissing"
	TooManyResults   Cause = "TooManyDevices"
	ExpressionError  Cause = "SelectorError"
	NotOfClass       Cause = "NoDeviceOfClass"
	NotSelected      Cause = "NoDeviceSelected"
	CapacityUnknown  Cause = "CapacityNotOffered"
	CapacityTooLarge Cause = "CapacityTooLarge"
	TooFewDevices    Cause = "TooFewDevices"
	Unconstrained    Cause = "ConstraintAttributeMissing"
	Tainted          Cause = "DevicesTainted"
	Withdrawn        Cause = "WithdrawnByPolicy"
	TooManyPods      Cause = "TooManyPods"
	Held             Cause = "DeviceHeld"
	CapacityUsed     Cause = "CapacityUsed"
	CountersUsed     Cause = "PartOfGPUHeld"
	NodeExcluded     Cause = "NodeExcluded"
	PoolIncomplete   Cause = "PoolIncomplete"
	PoolInvalid      Cause = "PoolInvalid"
	CannotStart      Cause = "CannotStart"
	NotScheduled     Cause = "SchedulerFindsNoNode"
	NotTogether      Cause = "NotTogether"
	PodFailed        Cause = "PodFailed"
	PodDeleted       Cause = "PodDeleted"
	Unexplained      Cause = "Unexplained"
)

// unallocated is the headline of what says no more.
const unallocated = "waits: its devices cannot be allocated."

// causeGroups are the causes in the order of reasons, the most informative first, with the causeGroups of what waits for them. Of
// alternatives that of the last headline comes nearest to being allocated.
var causeGroups = []struct {
	headline string
	causes   []Cause
}{
	{"waits: the scheduler does not look at it yet.", []Cause{Gated}},
	{"would be refused by the API server.", []Cause{Refused}},
	{"waits: nobody provides a resource that it asks for.", []Cause{ResourceUnserved}},
	{"waits: a volume of it does not exist.", []Cause{VolumeMissing}},
	{"waits: its pods cannot be created.", []Cause{PodsNotCreated}},
	{"waits: its claim is not there.", []Cause{ClaimNotCreated, ClaimMissing, TemplateMissing}},
	{"waits for its own predecessor.", []Cause{OwnPredecessor}},
	{"waits: its claim cannot be used.", []Cause{ClaimNotOwned, ClaimDeleted, ClaimFull, NotBound}},
	{"waits: the API server refuses its claim.", []Cause{ClaimInvalid, AdminForbidden}},
	{"cannot start, even with its devices.", []Cause{CannotStart}},
	{"waits: the scheduler has found no node for it.", []Cause{NotScheduled}},
	{unallocated, []Cause{NoSlices, SearchTooLong}},
	{"waits: no device is what it asks for.", []Cause{
		ClassMissing, TooManyResults, ExpressionError, NotOfClass, NotSelected, CapacityUnknown, CapacityTooLarge, TooFewDevices, Unconstrained}},
	{"waits: the devices that it could use have taints.", []Cause{Tainted}},
	{"waits: the sharing policy does not offer what it asks for any more.", []Cause{Withdrawn}},
	{"waits: what it could use is taken.", []Cause{Held, CapacityUsed, CountersUsed}},
	{"fits, but not as often as it is wanted.", []Cause{TooManyPods}},
	{"waits: something other than devices keeps it from nodes.", []Cause{NodeExcluded}},
	{"has failed, and needs its devices no more.", []Cause{PodFailed}},
	{"is being deleted, and keeps what devices it has until it has ended.", []Cause{PodDeleted}},
	{unallocated, []Cause{PoolIncomplete, PoolInvalid, NotTogether, Unexplained}},
}

// group is the index of a cause's headline.
func group(c Cause) int {
	for i := range causeGroups {
		if slices.Contains(causeGroups[i].causes, c) {
			return i
		}
	}
	return len(causeGroups) - 1
}

// onlyDevices reports whether nothing but devices, or the nodes that have them, keeps something waiting.
func (e *Explanation) onlyDevices() bool {
	return !slices.ContainsFunc(e.Reasons, func(r Reason) bool { return r.Cause != OwnPredecessor && group(r.Cause) < group(NoSlices) })
}

// order is the place of a reason among others. Where there is a node with the devices, what keeps the pod from it
// says more than what other nodes lack.
func order(r *Reason) int {
	const each = 100
	of := group(r.Cause)
	if r.wouldFit {
		return group(NoSlices)*each - 1
	}
	return of*each + slices.Index(causeGroups[of].causes, r.Cause)
}

// kindNamespace is the kind of what is explained where the pods of a namespace, or with no name of all, cannot be read.
const kindNamespace = "Namespace"

// Subject is what is explained.
type Subject struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

// Explanation is what there is to say about a pod or claim.
type Explanation struct {
	metav1.TypeMeta `json:",inline"`

	Subject Subject `json:"subject"`
	Verdict Verdict `json:"verdict"`
	// Unseen is what was not looked at, or may not be, and could contradict that it can be allocated.
	Unseen []string `json:"unseen,omitempty"`
	// Reasons say why it waits, or what has ended it, the most informative first.
	Reasons []Reason `json:"reasons,omitempty"`
	// InTheWay are the claims that have what it could use.
	InTheWay []Holder `json:"inTheWay,omitempty"`
	// Suggestions are what helps with the reasons and, where only devices are missing, changes after which the allocator allocates it, the
	// smallest first.
	Suggestions []Suggestion `json:"suggestions,omitempty"`
	// personal are the names that belong to the pod alone: its own, and those of claims that were made for it.
	personal []string
	// confirmed are the suggestions that the allocator has confirmed. It knows of devices only.
	confirmed []Suggestion
	// FitsOn are the nodes where the scheduler would allocate it.
	FitsOn []string `json:"fitsOn,omitempty"`
	// Allocations are what it got.
	Allocations []Allocation `json:"allocations,omitempty"`
	// Stuck says why containers do not start, or the pod does not end.
	Stuck []stuck.Cause `json:"stuck,omitempty"`
	// Notes are what is not known, and what else is worth knowing.
	Notes []string `json:"notes,omitempty"`
	// Assumptions are about the scheduler.
	Assumptions []string `json:"assumptions,omitempty"`
}

// Reason is why something cannot be allocated.
type Reason struct {
	Cause Cause  `json:"cause"`
	Text  string `json:"text"`
	// Claim and Request are what it is about, "" for the whole.
	Claim   string `json:"claim,omitempty"`
	Request string `json:"request,omitempty"`
	// Devices is how many devices it is about, and Nodes on which nodes.
	Devices int      `json:"devices,omitempty"`
	Nodes   []string `json:"nodes,omitempty"`
	// wouldFit says that the excluded nodes have the devices.
	wouldFit bool
	// order is its place among others, and help what would help with it.
	order int
	help  []Suggestion
}

// Holder is a claim that has a device.
type Holder struct {
	Namespace string           `json:"namespace"`
	Claim     string           `json:"claim"`
	Pods      []string         `json:"pods,omitempty"`
	Node      string           `json:"node"`
	Devices   []string         `json:"devices"`
	Since     *metav1.Time     `json:"since,omitempty"`
	For       *metav1.Duration `json:"for,omitempty"`
	claim     *resourceapi.ResourceClaim
}

// SuggestionKind is what would be changed.
type SuggestionKind string

// Kinds of suggestions.
const (
	ChangeReference SuggestionKind = "ChangeReference"
	CreateObject    SuggestionKind = "CreateObject"
	LabelNamespace  SuggestionKind = "LabelNamespace"
	RemoveGates     SuggestionKind = "RemoveGates"
	ChangeClass     SuggestionKind = "ChangeClass"
	ChangeValue     SuggestionKind = "ChangeValue"
	DropSelector    SuggestionKind = "DropSelector"
	DropCapacity    SuggestionKind = "DropCapacity"
	LowerCapacity   SuggestionKind = "LowerCapacity"
	LowerCount      SuggestionKind = "LowerCount"
	DropConstraint  SuggestionKind = "DropConstraint"
	AddToleration   SuggestionKind = "AddToleration"
	EndClaims       SuggestionKind = "EndClaims"
	EndForeignClaim SuggestionKind = "EndForeignClaim"
	EndTaint        SuggestionKind = "EndTaint"
	ChangeNode      SuggestionKind = "ChangeNode"
	ChangeStrategy  SuggestionKind = "ChangeStrategy"
	RaiseQuota      SuggestionKind = "RaiseQuota"
	RenameCapacity  SuggestionKind = "RenameCapacity"
	UseClaim        SuggestionKind = "UseClaim"
	ChangePod       SuggestionKind = "ChangePod"
	InstallDriver   SuggestionKind = "InstallDriver"
)

// Suggestion is a change that the allocator has confirmed.
type Suggestion struct {
	Kind SuggestionKind `json:"kind"`
	Text string         `json:"text"`
	// Node is where it would be allocated then, as far as can be seen if the explanation has anything unseen.
	Node string `json:"node,omitempty"`
	// Claims would have to end, as namespace/name.
	Claims []string `json:"claims,omitempty"`
}

// Allocation is a device that a claim got.
type Allocation struct {
	Claim   string `json:"claim"`
	Request string `json:"request"`
	Driver  string `json:"driver"`
	Device  string `json:"device"`
	Node    string `json:"node,omitempty"`
	Profile string `json:"profile,omitempty"`
	// Placement are the memory slices of a partition.
	Placement []int `json:"placement,omitempty"`
	// Share is how much of a shared device the claim has.
	Share       map[string]string  `json:"share,omitempty"`
	AdminAccess bool               `json:"adminAccess,omitempty"`
	Data        string             `json:"data,omitempty"`
	Conditions  []metav1.Condition `json:"conditions,omitempty"`
	// Problems are its taints, and that it is not published any more.
	Problems []string `json:"problems,omitempty"`
}

// Found reports whether somebody has to do something, to wait, or to find out.
func (e *Explanation) Found() bool {
	return e.Verdict == Waits || e.Verdict == IsStuck || e.Verdict == Unknown
}
