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
		find:       oneFinding(checkBegin),
	},
	{
		ID:         "intrusive.compute-mode",
		Assumption: "in compute mode EXCLUSIVE_PROCESS a second process gets no context, so a client that does not reach MPS gets nothing",
		Expected:   "the second process gets " + unavailable,
		So:         "nothing keeps programs without MPS off a device that is shared",
		Code:       "pkg/driver/sharing/effects.go",
		find: onSubject(func(ctx context.Context, n *Node, g *gpu.GPU) (Finding, error) {
			if inMIG(g) {
				return cannot("the GPU is in MIG mode and has no compute mode"), nil
			}
			got, err := change(ctx, n, "two processes in compute mode EXCLUSIVE_PROCESS", undoOf(g, nil), func(ctx context.Context, m *machine) (string, error) {
				return m.twoProcesses(ctx, g)
			})
			return expect(strings.Contains(got, unavailable), "%s", got), err
		}),
	},
	{
		ID:         "intrusive.mig-mode",
		Assumption: "the MIG mode of this GPU can be changed without a reset, whoever has it open",
		Expected:   "it is on, at once",
		Code:       "pkg/gpu/nvml/mig.go",
		needs:      partitionless,
		find: onSubject(func(ctx context.Context, n *Node, g *gpu.GPU) (Finding, error) {
			if !g.MIG.Dynamic {
				return cannot("changing it needs a reset of the GPU"), nil
			}
			took, err := changeAndKeep(ctx, n, "MIG mode on", undoOf(g, nil), func(ctx context.Context, m *machine) (time.Duration, error) {
				began := time.Now()
				err := m.hardware.SetMIGMode(ctx, g.PCIAddress, true)
				return time.Since(began), err
			})
			return findingOf(expect(true, "after %s", took.Round(time.Millisecond)), err).because("claims for partitions of this GPU fail"), nil
		}),
	},
	{
		ID:         "intrusive.partitions",
		Assumption: "every profile can be made at every placement that the driver reports, and is gone after it was destroyed",
		Expected:   "created and destroyed at every placement",
		Code:       "pkg/driver/partition",
		needs:      partitionless,
		find: func(ctx context.Context, n *Node) (findings []Finding) {
			for _, p := range n.gpu.MIG.Profiles {
				findings = append(findings, checkProfile(ctx, n, n.gpu, p).withSubject(p.Name).because("claims for this profile fail there"))
			}
			return findings
		},
	},
	{
		ID:         "intrusive.partition-mps",
		Assumption: "MPS runs on a partition; a partition cannot be made EXCLUSIVE_PROCESS",
		Expected:   "a client goes on; EXCLUSIVE_PROCESS is not supported",
		So:         "what the driver does about MPS shares of partitions rests on another behaviour",
		Code:       "pkg/driver/sharing",
		needs:      partitionless,
		find: onSubject(func(ctx context.Context, n *Node, g *gpu.GPU) (Finding, error) {
			smallest, at := smallestPartition(g)
			got, err := change(ctx, n, "MPS on "+smallest.Name, undoOf(g, &at), func(ctx context.Context, m *machine) (sliceMPS, error) {
				return m.mpsOn(ctx, g, at)
			})
			contextMemory(&n.measuredOf(g).mps.MIGContextMiB, sliceLimit*mib, got.TakenBytes)
			f := expect(got.Client == goesOn && got.Exclusive == impossible, "the client %s; EXCLUSIVE_PROCESS: %s", got.Client, got.Exclusive)
			return findingOf(f, err).withSubject(smallest.Name), nil
		}),
	},
	{
		ID:         "intrusive.pod",
		Assumption: "the container runtime gives a container the device that a CDI spec of the driver names",
		Expected:   "the program sees that device and no other, and uses it",
		Code:       "pkg/driver/cdi/cdi.go",
		find:       onSubject(checkPod),
	},
	{
		ID:         "intrusive.as-before",
		Assumption: "part C leaves the node as it was: part A finds the same",
		Expected:   "the same GPUs, modes, instances and verdicts",
		So:         "look at these before the node takes pods",
		Code:       "pkg/conformance/act_gpu.go",
		find:       onSubject(checkAsBefore),
	},
}

const unavailable = "CUDA_ERROR_DEVICE_UNAVAILABLE"

// onSubject judges the GPU that may be changed.
func onSubject(judge func(context.Context, *Node, *gpu.GPU) (Finding, error)) func(context.Context, *Node) []Finding {
	return func(ctx context.Context, n *Node) []Finding {
		return unlessEmpty(findingOf(judge(ctx, n, n.gpu)).withSubject(n.gpu.PCIAddress))
	}
}

// checkBegin comes before all that changes something. What an earlier run has left is undone only
// once claims are kept off its GPU and there are none.
func checkBegin(ctx context.Context, n *Node) (Finding, error) {
	missing := n.reserveSubject(ctx)
	if missing == "" {
		node, err := gpus.answer(ctx, n)
		if err == nil {
			_, err = ask(ctx, n, Change, "undo what an earlier run left", func(ctx context.Context, m *machine) (bool, error) {
				return true, m.undoEarlier(ctx, node.GPUs)
			})
		}
		if err != nil {
			n.missing = cannot("what an earlier run left cannot be undone").withSubject(n.header.GPU)
			return failed(err).withSubject(n.header.GPU), nil
		}
		n.before = n.readOnly(ctx)
		n.gpu, missing = n.unusedSubject(ctx)
	}
	if missing != "" {
		n.missing = cannot("%s", missing).withSubject(n.header.GPU)
		return n.missing, nil
	}
	n.changes = true
	return expect(true, "nobody uses it").withSubject(n.gpu.PCIAddress), nil
}

// reserveSubject keeps claims off the GPU for as long as this process lives, and off the GPU
// that an earlier run has changed: that may have a claim by now, whose partition must not be
// taken for the earlier run's. It returns why that is not possible.
func (n *Node) reserveSubject(ctx context.Context) string {
	found, missing := n.candidates(ctx)
	if missing != "" {
		return missing
	}
	claims, why := n.reserve(ctx, found[0], func(m *machine) ([]string, error) {
		left, err := m.readUndo()
		if left == nil {
			return nil, err
		}
		return []string{left.PCIAddress}, nil
	})
	switch {
	case why != "":
		return "the GPU " + why
	case len(claims) > 0:
		return fmt.Sprintf("%d claims are prepared on this node, the first is %s: drain it", len(claims), claims[0].Claim)
	}
	return ""
}

// unusedSubject returns the GPU as it is now, or why it must be left alone.
func (n *Node) unusedSubject(ctx context.Context) (*gpu.GPU, string) {
	found, missing := n.candidates(ctx)
	if missing != "" {
		return nil, missing
	}
	if why := n.inUse(ctx, found[0], listed); why != "" {
		return nil, "the GPU " + why
	}
	return found[0], ""
}

// readOnly runs the checks of part A on what is so now, not on what is known.
func (n *Node) readOnly(ctx context.Context) []Result {
	clear(n.known)
	r := &Report{}
	r.run(ctx, n, n.partA)
	return r.Results
}

// checkProfile stops at the first placement that fails, which is enough to say so of the profile.
func checkProfile(ctx context.Context, n *Node, g *gpu.GPU, p gpu.Profile) Finding {
	var creation, destruction time.Duration
	var ids []int // in the order of the placements
	for _, placement := range slices.SortedFunc(slices.Values(p.Placements), func(a, b gpu.Placement) int { return a.Start - b.Start }) {
		at := partition.Address{PCIAddress: g.PCIAddress, ProfileID: p.ID, Placement: placement}
		question := fmt.Sprintf("create and destroy %s at %d:%d", p.Name, placement.Start, placement.Size)
		took, err := changeAndKeep(ctx, n, question, undoOf(g, &at), func(ctx context.Context, m *machine) (created, error) {
			return m.makePartition(ctx, g, at)
		})
		if err == nil && !strings.HasPrefix(took.UUID, "MIG-") {
			err = fmt.Errorf("its UUID is %q", took.UUID)
		}
		if err != nil {
			return failed(fmt.Errorf("at %d:%d: %w", placement.Start, placement.Size, err))
		}
		creation, destruction = max(creation, took.Create), max(destruction, took.Destroy)
		ids = append(ids, took.InstanceID)
	}
	n.measuredOf(g).instanceIDs[p.Name] = ids
	return expect(true, "%d placements, created in at most %s, destroyed in at most %s",
		len(p.Placements), creation.Round(time.Millisecond), destruction.Round(time.Millisecond))
}

// checkPod gives a container the smallest partition, where there can be one, else the whole GPU.
func checkPod(ctx context.Context, n *Node, g *gpu.GPU) (Finding, error) {
	runtime, err := ask(ctx, n, File, "container runtime, and the image of this container", findRuntime)
	if err != nil {
		return cannot("%v", err), nil
	}
	subject, u := g.PCIAddress, undoOf(g, nil)
	if partitionless(g) == "" {
		smallest, at := smallestPartition(g)
		subject, u = smallest.Name, undoOf(g, &at)
	}
	got, err := change(ctx, n, "a container with a device of the GPU", u, func(ctx context.Context, m *machine) (inPod, error) {
		return m.runPod(ctx, runtime, g, u)
	})
	if err != nil {
		return failed(err).because("pods with claims for such devices do not start").withSubject(subject), nil
	}
	want := strings.TrimPrefix(strings.TrimPrefix(got.UUID, "MIG-"), "GPU-") // as CUDA has it
	right := len(got.Devices) == 1 && got.Devices[0] == want && got.Outcome == goesOn
	observed := fmt.Sprintf("%s: %d device(s), the program %s", runtime.Version, len(got.Devices), got.Outcome)
	if len(got.Devices) > 0 && got.Devices[0] != want {
		observed += fmt.Sprintf("; it sees %s, the device is %s", strings.Join(got.Devices, ", "), want)
	}
	return expect(right, "%s", observed).because("pods do not get what their claims say").withSubject(subject), nil
}

// checkAsBefore runs part A again.
func checkAsBefore(ctx context.Context, n *Node, _ *gpu.GPU) (Finding, error) {
	_, err := ask(ctx, n, Change, "undo", func(ctx context.Context, m *machine) (bool, error) { return true, m.undo(ctx) })
	if err != nil {
		return Finding{}, err
	}
	before, err := gpus.answer(ctx, n)
	if err != nil {
		return Finding{}, err
	}
	again := n.readOnly(ctx)
	after, err := gpus.answer(ctx, n)
	if err != nil {
		return Finding{}, err
	}
	var differences []string
	for i := range before.GPUs {
		if i >= len(after.GPUs) || !reflect.DeepEqual(before.GPUs[i], after.GPUs[i]) {
			differences = append(differences, "GPU "+before.GPUs[i].PCIAddress)
		}
	}
	if _, missing := n.unusedSubject(ctx); missing != "" {
		differences = append(differences, missing)
	}
	for _, earlier := range n.before {
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
		return expect(false, "different: %s", strings.Join(differences, ", ")), nil
	}
	return expect(true, "no difference"), nil
}
