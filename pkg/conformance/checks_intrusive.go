// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
)

// partitionless returns why no partitions can be made on a GPU, if so.
func partitionless(g *gpu.GPU) string {
	switch {
	case g.MIG == nil:
		return "the GPU has no MIG"
	case !g.MIG.Enabled && !g.MIG.Dynamic:
		return "the MIG mode is off, and changing it needs a reset of the GPU"
	}
	return ""
}

// intrusiveChecks change one GPU and put it back. They run in this order; the first
// decides whether the others may.
var intrusiveChecks = []Check{
	{
		ID:         "intrusive.begin",
		Assumption: "nobody uses the GPU and no claim has been prepared on this node",
		Expected:   "no processes, no instances, no prepared claims",
		Code:       "pkg/conformance",
		Needed:     true,
		find:       one(checkBegin),
	},
	{
		ID:         "intrusive.compute-mode",
		Assumption: "in compute mode EXCLUSIVE_PROCESS a second process gets no context, so a client that does not reach MPS gets nothing",
		Expected:   "the second process gets " + unavailable,
		So:         "nothing keeps programs without MPS off a device that is shared",
		Code:       "pkg/driver/sharing/effects.go",
		find: onSubject(func(q *inquiry, g *gpu.GPU) Finding {
			if inMIG(g) {
				return cannot("the GPU is in MIG mode and has no compute mode")
			}
			got := change(q, "two processes in compute mode EXCLUSIVE_PROCESS", undoOf(g, nil), func(ctx context.Context, m *machine) (string, error) {
				return m.twoProcesses(ctx, g)
			})
			return expect(strings.Contains(got, unavailable), "%s", got)
		}),
	},
	{
		ID:         "intrusive.mig-mode",
		Assumption: "the MIG mode of this GPU can be changed without a reset, whoever has it open",
		Expected:   "it is on, at once",
		So:         "claims for partitions of this GPU fail",
		SoOfErrors: true,
		Code:       "pkg/gpu/nvml/mig.go",
		find: onPartitions(onSubject(func(q *inquiry, g *gpu.GPU) Finding {
			if !g.MIG.Dynamic {
				return cannot("changing it needs a reset of the GPU")
			}
			u := undoOf(g, nil)
			u.keep = true
			took := change(q, "MIG mode on", u, func(ctx context.Context, m *machine) (time.Duration, error) {
				began := time.Now()
				err := m.hardware.SetMIGMode(ctx, g.PCIAddress, true)
				return time.Since(began), err
			})
			return expect(true, "after %s", took.Round(time.Millisecond))
		})),
	},
	{
		ID:         "intrusive.partitions",
		Assumption: "every profile can be made at every placement that the driver reports, and is gone after it was destroyed",
		Expected:   "created and destroyed at every placement",
		So:         "claims for this profile fail there",
		SoOfErrors: true,
		Code:       "pkg/driver/partition",
		find: onPartitions(func(q *inquiry) (findings []Finding) {
			for _, p := range q.gpu.MIG.Profiles {
				findings = append(findings, q.on(p.Name, func(q *inquiry) Finding { return checkProfile(q, p) })...)
			}
			return findings
		}),
	},
	{
		ID:         "intrusive.partition-mps",
		Assumption: "MPS runs on a partition; a partition cannot be made EXCLUSIVE_PROCESS",
		Expected:   "a client goes on; EXCLUSIVE_PROCESS is not supported",
		So:         "what the driver does about MPS shares of partitions rests on another behaviour",
		Code:       "pkg/driver/sharing",
		find: onPartitions(onSubject(func(q *inquiry, g *gpu.GPU) Finding {
			smallest, at := smallestPartition(g)
			got := change(q, "MPS on "+smallest.Name, undoOf(g, &at), func(ctx context.Context, m *machine) (sliceMPS, error) {
				return m.mpsOn(ctx, g, at)
			})
			contextMemory(&q.measuredOf(g).mps.MIGContextMiB, sliceLimit*mib, got.TakenBytes)
			return expect(got.Client == goesOn && got.Exclusive == impossible, "the client %s; EXCLUSIVE_PROCESS: %s", got.Client, got.Exclusive).
				withSubject(smallest.Name)
		})),
	},
	{
		ID:         "intrusive.pod",
		Assumption: "the container runtime gives a container the device that a CDI spec of the driver names",
		Expected:   "the program sees that device and no other, and uses it",
		So:         "pods with claims for such devices do not start, or do not get what their claims say",
		SoOfErrors: true,
		Code:       "pkg/driver/cdi/cdi.go",
		find:       onSubject(checkPod),
	},
	{
		ID:         "intrusive.as-before",
		Assumption: "the intrusive part leaves the node as it was: the read-only checks find the same",
		Expected:   "the same GPUs, modes, instances and verdicts",
		So:         "look at these before the node takes pods",
		Code:       "pkg/conformance/act_gpu.go",
		find:       onSubject(checkAsBefore),
	},
}

const unavailable = "CUDA_ERROR_DEVICE_UNAVAILABLE"

// onSubject judges the GPU that may be changed.
func onSubject(judge func(*inquiry, *gpu.GPU) Finding) func(*inquiry) []Finding {
	return func(q *inquiry) []Finding {
		return q.on(q.gpu.PCIAddress, func(q *inquiry) Finding { return judge(q, q.gpu) })
	}
}

// onPartitions is for checks that make partitions, where the GPU can have some.
func onPartitions(find func(*inquiry) []Finding) func(*inquiry) []Finding {
	return func(q *inquiry) []Finding {
		if why := partitionless(q.gpu); why != "" {
			return []Finding{cannot("%s", why).withSubject(q.header.GPU)}
		}
		return find(q)
	}
}

// checkBegin comes before all that changes something. What an earlier run has left is undone only
// once claims are kept off its GPU and there are none.
func checkBegin(q *inquiry) Finding {
	missing := q.reserveSubject()
	if missing == "" {
		all := gpus.of(q).GPUs
		do(q, Change, "undo what an earlier run left", func(ctx context.Context, m *machine) (bool, error) { return true, m.undoEarlier(ctx, all) })
		if q.err != nil {
			q.missing = cannot("what an earlier run left cannot be undone").withSubject(q.header.GPU)
			return Finding{Subject: q.header.GPU}
		}
		q.before = q.readOnly()
		q.gpu, missing = q.unusedSubject()
	}
	if missing != "" {
		q.before, q.missing = nil, cannot("%s", missing).withSubject(q.header.GPU)
		return q.missing
	}
	return expect(true, "nobody uses it").withSubject(q.gpu.PCIAddress)
}

// reserveSubject keeps claims off the GPU for as long as this process lives, and off the GPU
// that an earlier run has changed: that may have a claim by now, whose partition must not be
// taken for the earlier run's. It returns why that is not possible.
func (q *inquiry) reserveSubject() string {
	found, missing := q.candidates()
	if missing != "" {
		return missing
	}
	claims, err := q.preparedClaims(func(m *machine) ([]string, error) {
		left, err := m.readUndo()
		if left == nil {
			return []string{found[0].PCIAddress}, err
		}
		return []string{left.PCIAddress, found[0].PCIAddress}, nil
	})
	switch {
	case err != nil:
		return fmt.Sprintf("the GPU cannot be kept from claims: %v", err)
	case len(claims) > 0:
		return fmt.Sprintf("%d claims are prepared on this node, the first is %s: drain it", len(claims), claims[0].Claim)
	}
	return ""
}

// unusedSubject returns the GPU as it is now, or why it must be left alone.
func (q *inquiry) unusedSubject() (*gpu.GPU, string) {
	found, missing := q.candidates()
	if missing == "" {
		if missing = q.inUse(found[0], listed); missing == "" {
			return found[0], ""
		}
		missing = "the GPU " + missing
	}
	return nil, missing
}

// readOnly runs the checks of the read-only part on what is so now, not on what is known.
func (q *inquiry) readOnly() []Result {
	clear(q.known)
	r := &Report{}
	r.run(q.ctx, q.Node, readOnlyChecks)
	return r.Results
}

// checkProfile stops at the first placement that fails, which is enough to say so of the profile.
func checkProfile(q *inquiry, p gpu.Profile) Finding {
	var creation, destruction time.Duration
	var ids []int // in the order of the placements
	for _, placement := range slices.SortedFunc(slices.Values(p.Placements), func(a, b gpu.Placement) int { return a.Start - b.Start }) {
		at := partition.Address{PCIAddress: q.gpu.PCIAddress, ProfileID: p.ID, Placement: placement}
		question := fmt.Sprintf("create and destroy %s at %d:%d", p.Name, placement.Start, placement.Size)
		u := undoOf(q.gpu, &at)
		u.keep = true
		took := change(q, question, u, func(ctx context.Context, m *machine) (created, error) { return m.makePartition(ctx, q.gpu, at) })
		if q.err == nil && !strings.HasPrefix(took.UUID, "MIG-") {
			q.err = fmt.Errorf("its UUID is %q", took.UUID)
		}
		if q.err != nil {
			q.err = fmt.Errorf("at %d:%d: %w", placement.Start, placement.Size, q.err)
			return Finding{}
		}
		creation, destruction = max(creation, took.Create), max(destruction, took.Destroy)
		ids = append(ids, took.InstanceID)
	}
	q.measuredOf(q.gpu).instanceIDs[p.Name] = ids
	return expect(true, "%d placements, created in at most %s, destroyed in at most %s",
		len(p.Placements), creation.Round(time.Millisecond), destruction.Round(time.Millisecond))
}

// checkPod gives a container the smallest partition, where there can be one, else the whole GPU.
func checkPod(q *inquiry, g *gpu.GPU) Finding {
	runtime, err := fact[containerRuntime]{File, "container runtime, and the image of this container", findRuntime}.try(q)
	if err != nil {
		return cannot("%v", err)
	}
	subject, u := g.PCIAddress, undoOf(g, nil)
	if partitionless(g) == "" {
		smallest, at := smallestPartition(g)
		subject, u = smallest.Name, undoOf(g, &at)
	}
	u.Runtime = runtime.Socket
	got := change(q, "a container with a device of the GPU", u, func(ctx context.Context, m *machine) (inPod, error) {
		return m.runPod(ctx, runtime, g, u)
	})
	want := strings.TrimPrefix(strings.TrimPrefix(got.UUID, "MIG-"), "GPU-") // as CUDA has it
	right := slices.Equal(got.Devices, []string{want})
	observed := fmt.Sprintf("%s: %d device(s), the program %s", runtime.Version, len(got.Devices), got.Outcome)
	if len(got.Devices) > 0 && !right {
		observed += fmt.Sprintf("; it sees %s, the device is %s", strings.Join(got.Devices, ", "), want)
	}
	return expect(right && got.Outcome == goesOn, "%s", observed).withSubject(subject)
}

// checkAsBefore runs the read-only part again.
func checkAsBefore(q *inquiry, _ *gpu.GPU) Finding {
	do(q, Change, "undo", func(ctx context.Context, m *machine) (bool, error) { return true, m.undo(ctx) })
	before := gpus.of(q)
	if q.err != nil {
		return Finding{}
	}
	again, after := q.readOnly(), gpus.of(q)
	var differences []string
	for i, g := range before.GPUs {
		if i >= len(after.GPUs) || !reflect.DeepEqual(g, after.GPUs[i]) {
			differences = append(differences, "GPU "+g.PCIAddress)
		}
	}
	if _, missing := q.unusedSubject(); missing != "" {
		differences = append(differences, missing)
	}
	for _, earlier := range q.before {
		same := func(r Result) bool {
			return r.Check == earlier.Check && r.Subject == earlier.Subject && r.Verdict == earlier.Verdict
		}
		// Others come and go, and take the time of the node.
		changesByItself := strings.HasPrefix(earlier.Check, "holders.") || earlier.Check == "hardware.latency"
		if !changesByItself && !slices.ContainsFunc(again, same) {
			differences = append(differences, strings.TrimSpace(earlier.Check+" "+earlier.Subject))
		}
	}
	if len(differences) > 0 {
		return expect(false, "different: %s", strings.Join(differences, ", "))
	}
	return expect(true, "no difference")
}
