// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package view makes of a fleet what the page shows: plain values with short names, which
// become JSON. It decides what is drawn where; the page decides how.
package view

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// Meta is what the page shows of the fleet as a whole.
type Meta struct {
	Context string  `json:"context,omitempty"`
	Driver  string  `json:"driver"`
	Summary Summary `json:"summary"`
	// Problems are rights that are missing, and errors of the API server.
	Problems []Gap `json:"problems,omitempty"`
	// Loading says that not everything has been read yet.
	Loading bool `json:"loading,omitempty"`
}

// Summary counts.
type Summary struct {
	Nodes int `json:"nodes"`
	GPUs  int `json:"gpus"`
	// Used are the GPUs of which claims have something, Free those of which nobody has anything
	// and on which something fits.
	// Room are those of which claims have something, and on which something fits beside it.
	Used int `json:"used"`
	Free int `json:"free"`
	// AtLeast says that claims could not be read: more GPUs may be used, by more claims.
	AtLeast bool `json:"atLeast,omitempty"`
	Room    int  `json:"room,omitempty"`
	// Told are the GPUs of which is known how much memory is used, Memory and Of what that is together.
	Told   int   `json:"told,omitempty"`
	Memory int64 `json:"memory,omitempty"`
	Of     int64 `json:"of,omitempty"`
	// Unknown are the GPUs of which nobody is seen to have anything, and somebody may.
	Unknown int `json:"unknown,omitempty"`
	// Unhealthy are the GPUs with a condition that is not normal.
	Unhealthy int `json:"unhealthy"`
	Waiting   int `json:"waiting"`
	Stuck     int `json:"stuck,omitempty"`
	Claims    int `json:"claims"`
}

// Gap is something that the page cannot see at the moment, or sees in part.
type Gap struct {
	// Verb and Resource are the right that is missing, such as "list" and
	// "resourceclaims.resource.k8s.io".
	Verb     string `json:"verb"`
	Resource string `json:"resource"`
	// Namespace is "" where all namespaces were asked for.
	Namespace string `json:"namespace,omitempty"`
	// Forbidden is false if the API server did not answer, or answered with another error.
	Forbidden bool `json:"forbidden,omitempty"`
	// Message is what the API server answered.
	Message string `json:"message"`
	// Unknown is what the page does not know for that reason.
	Unknown string `json:"unknown,omitempty"`
}

// Node is a node with GPUs.
type Node struct {
	Name string `json:"name"`
	// Notes are what is to be known about the node: that it is not ready, that it is cordoned.
	Notes []Badge `json:"notes,omitempty"`
	GPUs  []GPU   `json:"gpus"`
}

// GPU is a GPU with all that is on it.
type GPU struct {
	Name string `json:"name"`
	// Label is what people call it.
	Label  string `json:"label"`
	UUID   string `json:"uuid,omitempty"`
	Model  string `json:"model"`
	PCI    string `json:"pci,omitempty"`
	Driver string `json:"driver,omitempty"`
	CUDA   string `json:"cuda,omitempty"`
	Memory int64  `json:"memory,omitempty"`
	// Slices is how many memory slices are drawn: those with a counter, or 1 where the GPU cannot
	// be partitioned. Cells are their indexes where these are not 0, 1, 2 and so on.
	Slices int   `json:"slices"`
	Cells  []int `json:"cells,omitempty"`
	// Room says that something still fits beside what claims have.
	Room bool `json:"room,omitempty"`
	// Usage is what is used of all of it.
	Usage *Usage `json:"usage,omitempty"`
	// Use is "free", "part", "full", "unknown" or "none": nothing is free, and nobody has it.
	Use string `json:"use"`
	// Blocks cover all slices, in their order.
	Blocks []Block `json:"blocks"`
	// Notes are what taints say: what is wrong with the GPU, and what people keep it for.
	Notes []Badge `json:"notes,omitempty"`
	// Bad says that something is wrong.
	Bad bool `json:"bad,omitempty"`
	// Fits is what can still be allocated.
	Fits []string `json:"fits,omitempty"`
	// Observers are claims with admin access, which take nothing.
	Observers []string `json:"observers,omitempty"`
}

// Kinds of blocks. The others are the types of devices.
const (
	KindFree    = "free"
	KindUnknown = "unknown"
	KindBlocked = "blocked"
)

// Block is a part of a strip: neighbouring memory slices that are one thing.
type Block struct {
	Start int `json:"start"`
	Size  int `json:"size"`
	// Kind is free, unknown, blocked, gpu, mig, mps or timeslice.
	Kind string `json:"kind"`
	// Device is what the claims have.
	Device  string `json:"device,omitempty"`
	Profile string `json:"profile,omitempty"`
	// Parts are the claims, more than one where they share the device.
	Parts []Part `json:"parts,omitempty"`
	// Total is what the parts of a shared device are parts of.
	Total *Amount `json:"total,omitempty"`
	// AtLeast says that claims may have other parts that could not be read.
	AtLeast bool `json:"atLeast,omitempty"`
	// Why says what blocks it.
	Why string `json:"why,omitempty"`
}

// Part is what a claim has of a device.
type Part struct {
	// Claim is its key, Whose who uses it, for people.
	Claim string `json:"claim"`
	Whose string `json:"whose"`
	Amount
	Usage *Usage `json:"usage,omitempty"`
}

// Amount is a part of a shared device.
type Amount struct {
	Memory int64 `json:"memory,omitempty"`
	SM     int64 `json:"sm,omitempty"`
	Shares int64 `json:"shares,omitempty"`
}

// Badge says something in a word or two, and in a sentence.
type Badge struct {
	Text  string `json:"text"`
	Title string `json:"title"`
	// Bad is false for hints.
	Bad bool `json:"bad,omitempty"`
}

// Claim is a claim with devices of the driver, or that waits for some.
type Claim struct {
	Namespace string      `json:"ns"`
	Name      string      `json:"name"`
	Whose     string      `json:"whose"`
	Created   metav1.Time `json:"created,omitzero"`
	// State is "waiting", "allocated", "in use" or "ending".
	State    string    `json:"state"`
	Requests []Request `json:"requests,omitempty"`
	Devices  []Held    `json:"devices,omitempty"`
	// Pods are keys. Others are users of the claim that could not be read.
	Pods   []string `json:"pods,omitempty"`
	Others []string `json:"others,omitempty"`
}

// Request is what a claim asks for.
type Request struct {
	Name string `json:"name"`
	Text string `json:"text"`
	// Selectors are CEL expressions.
	Selectors []string `json:"selectors,omitempty"`
}

// Held is a device that a claim has.
type Held struct {
	Node    string `json:"node,omitempty"`
	GPU     string `json:"gpu,omitempty"`
	Device  string `json:"device"`
	Type    string `json:"type,omitempty"`
	Profile string `json:"profile,omitempty"`
	UUID    string `json:"uuid,omitempty"`
	Amount
	Usage *Usage `json:"usage,omitempty"`
	// Gone says that no slice has the device.
	Gone bool `json:"gone,omitempty"`
	// NotReady is the driver's condition in the claim's status where it says so.
	NotReady *Badge `json:"notReady,omitempty"`
}

// Pod is a pod that uses claims or waits for some.
type Pod struct {
	Namespace string      `json:"ns"`
	Name      string      `json:"name"`
	Node      string      `json:"node,omitempty"`
	Phase     string      `json:"phase"`
	Created   metav1.Time `json:"created,omitzero"`
	Owner     string      `json:"owner,omitempty"`
	Claims    []string    `json:"claims,omitempty"`
	// Waiting says that the scheduler has found no node.
	Waiting bool `json:"waiting,omitempty"`
	// Stuck says that it has a node, and that its containers do not start.
	Stuck       bool         `json:"stuck,omitempty"`
	Explanation *Explanation `json:"explanation,omitempty"`
	// Scheduler is what the scheduler says.
	Scheduler string `json:"scheduler,omitempty"`
	// starting says that it may look stuck because it has not had the time to start.
	starting bool
}

// Explanation says why a pod waits or is stuck.
type Explanation struct {
	// Verdict is one line.
	Verdict string `json:"verdict"`
	// Text is what kubectl gpu explain prints.
	Text string `json:"text,omitempty"`
	// Starting says that a pod which looks stuck has not had the time to start.
	Starting bool `json:"-"`
}

// Objects are the parts of the page by key: "meta", "node/NODE", "claim/NAMESPACE/NAME" and
// "pod/NAMESPACE/NAME". A part that has not changed becomes the same JSON.
type Objects map[string]any

// Input is what a page is made of.
type Input struct {
	Model        *fleet.Model
	Explanations map[string]Explanation // by the key of the pod
	Measured     Measured
	Meta         Meta
}

// New makes all parts.
func New(in Input) Objects {
	all := Objects{}
	usages := newUsages(in.Measured)
	claims, meta := claimsOf(in.Model, usages), in.Meta
	meta.Summary.AtLeast = in.Model.Hides(fleet.ResourceClaims)
	for key, pod := range podsOf(in.Model, claims) {
		e, explained := in.Explanations[key]
		if explained {
			pod.starting = e.Starting
		}
		pod.Stuck = pod.Stuck && !pod.starting
		if explained && (pod.Waiting || pod.Stuck) {
			pod.Explanation = &e
		}
		if pod.Waiting {
			meta.Summary.Waiting++
		}
		if pod.Stuck {
			meta.Summary.Stuck++
		}
		all[key] = pod
	}
	for key, claim := range claims {
		all[key] = claim
		if len(claim.Devices) > 0 {
			meta.Summary.Claims++
		}
	}
	for _, n := range in.Model.Nodes {
		node := nodeOf(n, in.Model.Driver, usages)
		meta.Summary.add(node)
		all["node/"+node.Name] = node
	}
	all["meta"] = meta
	return all
}

func (s *Summary) add(n Node) {
	s.Nodes++
	for i := range n.GPUs {
		g := &n.GPUs[i]
		s.GPUs++
		switch g.Use {
		case "part", "full":
			s.Used++
		case "free":
			s.Free++
		case "unknown":
			s.Unknown++
		}
		if g.Room {
			s.Room++
		}
		if u := g.Usage; u != nil && u.Memory != nil {
			s.Told, s.Memory, s.Of = s.Told+1, s.Memory+*u.Memory, s.Of+u.Of
		}
		if g.Bad {
			s.Unhealthy++
		}
	}
}
