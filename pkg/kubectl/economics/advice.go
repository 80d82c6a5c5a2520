// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// Query is what is asked.
type Query struct {
	Workload
	// Billions of parameters, 0 if the memory is given.
	Billions  float64
	Quantized bool
	// Asked is the memory as it was given, "" for one that is estimated.
	Asked string
	// Price is that of a GPU and hour, 0 if it is not known.
	Price float64
	// Image is that of the container, "" for that of the template.
	Image string
	// Assumed are flags that were not given.
	Assumed []string
}

// Advice is the answer.
type Advice struct {
	metav1.TypeMeta `json:",inline"`

	Mechanism Mechanism `json:"mechanism"`
	Rule      Rule      `json:"rule"`
	// Isolation is that from others on the GPU, in Partage's own words.
	Isolation     Isolation `json:"isolation"`
	IsolationNote string    `json:"isolationNote,omitempty"`
	// Request is what a replica asks for.
	Request Request `json:"request"`
	Cost    Cost    `json:"cost"`
	// MemoryNote says where the memory comes from.
	MemoryNote   string        `json:"memoryNote,omitempty"`
	Notes        []Rule        `json:"notes,omitempty"`
	Warnings     []string      `json:"warnings,omitempty"`
	Assumed      []string      `json:"assumed,omitempty"`
	Alternatives []Alternative `json:"alternatives,omitempty"`
	// Template is the file that the manifest was made of.
	Template string `json:"template"`
	Manifest string `json:"manifest"`
}

// Request is what a replica asks for.
type Request struct {
	DeviceClass string   `json:"deviceClass"`
	Profiles    []string `json:"profiles,omitempty"`
	Count       int64    `json:"count"`
	MemoryBytes int64    `json:"memoryBytes,omitempty"`
	SMPercent   int      `json:"smPercent,omitempty"`
	// memory is that amount as somebody wrote it, or as manifests have it.
	memory string
	// GPUs are the models that have it.
	GPUs []string `json:"gpus"`
}

// Cost is what the replicas cost, against a GPU for each.
type Cost struct {
	// PerGPU is how many replicas a GPU has room for, 0 if one needs several GPUs.
	PerGPU int `json:"perGPU"`
	// GPUs is how many the replicas need; Unshared is how many they would have alone.
	GPUs     int64 `json:"gpus"`
	Unshared int64 `json:"unshared"`
	// SavingPercent is the part of the unshared GPUs that is not needed.
	SavingPercent float64 `json:"savingPercent"`
	// Overhead is by how much the mechanism slows the work, in percent.
	OverheadPercent Range `json:"overheadPercent"`
	// PerReplica is the price of a replica and hour on a full GPU, with the larger overhead; Month
	// is that of all GPUs. Both are absent without a price.
	PerReplica *float64 `json:"perReplicaAndHour,omitempty"`
	Month      *float64 `json:"month,omitempty"`
}

// Alternative is another mechanism.
type Alternative struct {
	Mechanism Mechanism `json:"mechanism"`
	// Offered says that the fleet has it.
	Offered bool   `json:"offered"`
	Why     string `json:"why"`
}

// Advise says which mechanism suits a workload on the GPUs of a cluster.
func Advise(q Query, m *fleet.Model) (*Advice, error) {
	offers, err := offersOf(m)
	if err != nil {
		return nil, err
	}
	switch {
	case q.Billions == 0:
	case q.Kind == Training:
		q.Memory = TrainingMemory(q.Billions)
	default:
		q.Memory = ModelMemory(q.Billions, q.Quantized)
	}
	all := candidates(m, offers, q.Memory)
	f := fleetOf(offers, all, q.Memory)
	decision := Decide(q.Workload, f)
	if decision.Mechanism == "" {
		return nil, noneFits(decision, all)
	}
	c := all[decision.Mechanism]
	if q.Asked != "" && c.MemoryBytes > 0 && c.Count == 1 {
		// Estimates are rounded.
		c.MemoryBytes, c.memory = q.Memory, q.Asked
	}
	a := &Advice{
		TypeMeta: printer.TypeMeta("Advice"), Mechanism: c.mechanism, Rule: decision.Rule, Isolation: c.Isolation, IsolationNote: c.Note,
		Request: c.Request, Cost: costOf(q, c), MemoryNote: memoryNote(q), Assumed: q.Assumed,
		Warnings: append(lostFaults(q, f, c), warnings(q, c)...), Alternatives: alternatives(q, c.mechanism, all),
		Notes: decision.Notes,
	}
	a.Template, a.Manifest, err = render(q, m.Driver, offers, c)
	return a, err
}

// noneFits says what the rule wanted and why the fleet does not have it.
func noneFits(d Decision, all map[Mechanism]*candidate) error {
	var why []string
	for _, m := range d.Missing {
		why = append(why, fmt.Sprintf("no %s: %s", m, all[m].missing))
	}
	return fmt.Errorf("the fleet has nothing for this workload (rule %s: %s): %s", d.Rule.ID, d.Rule.When, strings.Join(why, "; "))
}

func costOf(q Query, c *candidate) Cost {
	replicas, perGPU := int64(q.Count), int64(c.perGPU)
	cost := Cost{
		PerGPU: c.perGPU, GPUs: (replicas + perGPU - 1) / perGPU * c.Count, Unshared: replicas * c.Count,
		OverheadPercent: Range{100 * c.Overhead.Low, 100 * c.Overhead.High},
	}
	if c.Count > 1 {
		cost.PerGPU = 0
	}
	cost.SavingPercent = RoundHalfUp(100*Saving(float64(cost.GPUs), float64(cost.Unshared)), 0)
	if q.Price > 0 {
		each := CostPerWorkload(q.Price*float64(c.Count), c.Overhead.High, c.perGPU)
		cost.PerReplica = new(RoundHalfUp(each, 2))
		cost.Month = new(RoundHalfUp(float64(cost.GPUs)*q.Price*HoursPerMonth, 0))
	}
	return cost
}

func memoryNote(q Query) string {
	switch {
	case q.Billions == 0:
		return ""
	case q.Kind == Training:
		return fmt.Sprintf("an estimate: %g billion parameters at %d bytes (weights, gradients and states of the optimizer Adam in mixed precision), and a fifth "+
			"of that for activations, which grow with the batch and may need far more. Other optimizers, and adapters such as LoRA, need less: --memory",
			q.Billions, bytesTrained)
	}
	bits := 16
	if q.Quantized {
		bits = 8
	}
	return fmt.Sprintf("an estimate for inference: %g billion parameters at %d bits, and a fifth of that for caches; long contexts and large batches need more", q.Billions, bits)
}

// basic are the mechanisms about which something is said even where there is no such device.
var basic = []Mechanism{Whole, Partition, MPS, TimeSlice}

// alternatives are the other mechanisms, and why not.
func alternatives(q Query, chosen Mechanism, all map[Mechanism]*candidate) []Alternative {
	var others []Alternative
	for _, m := range Mechanisms {
		switch missing := all[m].missing; {
		case m == chosen || missing != "" && !slices.Contains(basic, m):
		case missing != "":
			others = append(others, Alternative{Mechanism: m, Why: missing})
		default:
			others = append(others, Alternative{Mechanism: m, Offered: true, Why: WhyNot(m, q.Workload)})
		}
	}
	return others
}

// lostFaults says that the latency that is wanted has moved the workload to a mechanism that isolates faults less.
func lostFaults(q Query, f Fleet, c *candidate) []string {
	patient := q.Workload
	patient.Latency = ""
	other := Decide(patient, f)
	from, to := Guarantees[other.Mechanism].Fault, c.Fault
	if q.Latency == "" || from == to || from != Guarantees[Partition].Fault {
		return nil
	}
	return []string{fmt.Sprintf("Because of --latency %s this is %s and not %s. Faults are isolated there (%s), and not here (%s); --trust %s gives %[3]s.",
		q.Latency, withArticle(c.mechanism), withArticle(other.Mechanism), from, to, OtherTenants)}
}

// Tables of others put models from 13 to 34 billion parameters into 3g.40gb, where those above
// 16 billion only fit if they are quantized.
const (
	quantizedFrom = 16
	quantizedTo   = 34
)

// warnings are what one should know before one uses the manifest.
func warnings(q Query, c *candidate) []string {
	var w []string
	add := func(when bool, text string) {
		if when {
			w = append(w, text)
		}
	}
	is := func(m ...Mechanism) bool { return slices.Contains(m, c.mechanism) }
	add(is(Whole) && q.untrusted() && !partitioned(c.offers),
		"These GPUs have no MIG: no sharing on them gives what these tenants need.")
	add(is(MPS, PartitionMPS),
		"A fatal fault of one client ends all clients that share the device. Limits are for each process, /dev/shm is shared, a container can have one MPS share only, and pods with hostUsers: false cannot have any.")
	add(is(TimeSlice, PartitionTimeSlice),
		"Nothing is limited: a process that takes all of the memory leaves none to the others. The scheduler counts the memory that claims ask for.")
	add(is(SoftwareLimits), "A statically linked program escapes the limits, and so does one that changes its environment.")
	add(is(Partition) && slices.ContainsFunc(c.offers, func(o *offer) bool { return o.Architecture == "Ampere" }),
		"On Ampere the MIG mode has to be on beforehand; Partage never changes it there. From Hopper on it follows the claims.")
	add(q.Count > c.room, fmt.Sprintf("The fleet has room for %d of the %d replicas, if nothing else runs.", c.room, q.Count))
	add(is(Whole) && q.Kind != Training && q.Billions > quantizedFrom && q.Billions <= quantizedTo && !q.Quantized,
		"Tables that put models of this size into the partition 3g.40gb mean quantized ones: --quantized.")
	add(q.Kind == Training && c.Count == 1 && q.Count > 1, "Pods of one job that must start together need a scheduler that starts all or none, such as Kueue: docs/how-to/kueue.md.")
	add(q.Image == "", "The image in the manifest is that of the demos, which only the local cluster has: use --image.")
	return w
}
