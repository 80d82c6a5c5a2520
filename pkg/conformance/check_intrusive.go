// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/cuda/probe"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/partition"
)

// Change is the kind of the questions of part C, which change the GPU.
const Change Kind = "change"

// intrusiveChecks change one GPU and put it back. They run in this order; the first
// decides whether the others may.
var intrusiveChecks = []Check{
	{
		ID:         "intrusive.begin",
		Assumption: "nobody uses the GPU and no claim has been prepared on this node",
		Code:       "pkg/conformance",
		Needed:     true,
		Run:        checkBegin,
	},
	{
		ID:         "intrusive.compute-mode",
		Assumption: "in compute mode EXCLUSIVE_PROCESS a second process gets no context, so a client that does not reach MPS gets nothing",
		Code:       "pkg/sharing/effects.go",
		Run:        checkExclusive,
	},
	{
		ID:         "intrusive.mig-mode",
		Assumption: "the MIG mode of this GPU can be changed without a reset, whoever has it open",
		Code:       "pkg/gpu/nvml/mig.go",
		Run:        checkMIGSwitch,
	},
	{
		ID:         "intrusive.partitions",
		Assumption: "every profile can be made at every placement that the driver reports, and is gone after it was destroyed",
		Code:       "pkg/partition",
		Run:        checkPartitions,
	},
	{
		ID:         "intrusive.partition-mps",
		Assumption: "MPS runs on a partition; a partition cannot be made EXCLUSIVE_PROCESS",
		Code:       "pkg/sharing",
		Run:        checkPartitionMPS,
	},
	{
		ID:         "intrusive.pod",
		Assumption: "the container runtime gives a container the device that a CDI spec of the driver names",
		Code:       "pkg/cdi/cdi.go",
		Run:        checkPod,
	},
	{
		ID:         "intrusive.as-before",
		Assumption: "part C leaves the node as it was: part A finds the same",
		Code:       "pkg/conformance/undo.go",
		Run:        checkAsBefore,
	},
}

// subject is the GPU that part C works on, and how it was.
type subject struct {
	gpu    *gpu.GPU
	before []Result // of part A
	why    string   // why nothing may be done, if so
}

// forget makes the next check ask again for what is known of the GPUs.
func (n *Node) forget() {
	n.gpus, n.gpusErr = nil, nil
	clear(n.known)
}

// examined runs the checks of part A.
func (n *Node) examined(ctx context.Context) []Result {
	r := &Report{}
	for _, check := range n.partA {
		for _, f := range n.run(ctx, check) {
			r.add(check, f)
		}
	}
	return r.Results
}

// onGPU asks the driver's own access to the GPU for something.
func onGPU[T any](ctx context.Context, n *Node, question string, live func(context.Context, *nvml.Client) (T, error)) (T, error) {
	return Ask(ctx, n, Change, question, func(ctx context.Context) (T, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			var none T
			return none, err
		}
		return live(ctx, hardware)
	})
}

func checkBegin(ctx context.Context, n *Node) []Finding {
	const expected = "no processes, no instances, no prepared claims"
	g, why := n.findSubject(ctx)
	if why == "" {
		why = n.reserve(ctx, g)
	}
	node := n.gpus
	if why != "" {
		n.subject.why = why
		return []Finding{Cannot(n.GPU, expected, "%s", why)}
	}
	_, err := onGPU(ctx, n, "undo what an earlier run left", func(ctx context.Context, hardware *nvml.Client) (bool, error) {
		return true, errors.Join(n.lab.sweep(ctx), n.undoEarlier(ctx, hardware, node.GPUs))
	})
	if err != nil {
		n.subject.why = "what an earlier run left cannot be undone"
		return []Finding{Failed(n.GPU, expected, err)}
	}
	n.forget()
	n.subject.before = n.examined(ctx)
	if g, why = n.findSubject(ctx); why == "" {
		why = n.inUse(ctx, g)
	}
	if why == "" {
		n.subject.gpu = g
		return []Finding{Expect(g.PCIAddress, true, expected, "nobody uses it")}
	}
	n.subject.why = why
	return []Finding{Cannot(n.GPU, expected, "%s", why)}
}

// findSubject returns the GPU, or why there is none.
func (n *Node) findSubject(ctx context.Context) (*gpu.GPU, string) {
	node, err := n.GPUs(ctx)
	if err != nil {
		return nil, fmt.Sprintf("the GPUs cannot be read: %v", err)
	}
	i := slices.IndexFunc(node.GPUs, func(g gpu.GPU) bool { return g.UUID == n.GPU })
	if i < 0 {
		return nil, "there is no GPU " + n.GPU
	}
	return &node.GPUs[i], ""
}

// reserve keeps the driver from preparing claims on the GPU for as long as this process
// lives, and on the GPU that an earlier run has changed: that may have a claim by now, whose
// partition must not be taken for the earlier run's. It returns why that is not possible.
func (n *Node) reserve(ctx context.Context, g *gpu.GPU) string {
	_, err := Ask(ctx, n, File, "lock the GPU against claims", func(ctx context.Context) (bool, error) {
		addresses := []string{g.PCIAddress}
		left, err := n.undoFile().read()
		if err != nil {
			return false, err
		}
		if left != nil && left.PCIAddress != g.PCIAddress {
			addresses = append(addresses, left.PCIAddress)
		}
		return true, n.reserved.take(ctx, n.DataDir, addresses...)
	})
	if err != nil {
		return fmt.Sprintf("the driver cannot be kept from preparing claims on the GPU: %v", err)
	}
	claims, err := n.claims(ctx)
	if err != nil {
		return fmt.Sprintf("the claims of this node cannot be read: %v", err)
	}
	if len(claims) > 0 {
		return fmt.Sprintf("%d claims are prepared on this node, the first is %s: drain it", len(claims), claims[0].Claim)
	}
	return ""
}

// inUse returns why the GPU must be left alone, if so.
func (n *Node) inUse(ctx context.Context, g *gpu.GPU) string {
	state, err := onGPU(ctx, n, "modes, instances and processes", func(ctx context.Context, hardware *nvml.Client) (gpuState, error) {
		return readState(ctx, hardware, g)
	})
	switch {
	case err != nil:
		return fmt.Sprintf("the GPU cannot be read: %v", err)
	case len(state.Processes) > 0:
		return fmt.Sprintf("%d processes use the GPU", len(state.Processes))
	case len(state.MIG.Instances) > 0:
		return fmt.Sprintf("the GPU has %d GPU instances", len(state.MIG.Instances))
	case !state.MIG.Enabled && state.ComputeMode != gpu.ComputeDefault:
		return fmt.Sprintf("the GPU is in compute mode %s", state.ComputeMode)
	}
	return ""
}

// gpuState is what part C may change.
type gpuState struct {
	ComputeMode gpu.ComputeMode `json:"computeMode,omitempty"`
	MIG         gpu.MIGState    `json:"mig"`
	Processes   []gpu.Process   `json:"processes,omitempty"`
}

func readState(ctx context.Context, hardware *nvml.Client, g *gpu.GPU) (gpuState, error) {
	var s gpuState
	var err error
	if g.MIG != nil {
		if s.MIG, err = hardware.MIGState(ctx, g.PCIAddress); err != nil {
			return s, err
		}
	}
	if !s.MIG.Enabled {
		if s.ComputeMode, err = hardware.ComputeMode(ctx, g.PCIAddress, g.UUID); err != nil {
			return s, err
		}
	}
	s.Processes, err = hardware.Processes(ctx, g.PCIAddress)
	return s, err
}

// undoOf describes how the GPU is, with a partition that is going to be made.
func undoOf(g *gpu.GPU, a *partition.Address) *undo {
	return &undo{
		PCIAddress: g.PCIAddress, UUID: g.UUID, ComputeMode: gpu.ComputeDefault,
		MIG: g.MIG != nil && g.MIG.Enabled, Dynamic: g.MIG != nil && g.MIG.Dynamic, Partition: a,
	}
}

// changing runs do, which changes the GPU, and puts the GPU back. keeping leaves it in the
// MIG mode that do has set, unless do fails.
func changing[T any](ctx context.Context, n *Node, question string, u *undo, do func(context.Context, *nvml.Client) (T, error)) (T, error) {
	return keeping(ctx, n, question, u, func(ctx context.Context, hardware *nvml.Client) (T, error) {
		value, err := do(ctx, hardware)
		if err == nil {
			err = n.undo(ctx, hardware)
		}
		return value, err
	})
}

func keeping[T any](ctx context.Context, n *Node, question string, u *undo, do func(context.Context, *nvml.Client) (T, error)) (T, error) {
	return onGPU(ctx, n, question, func(ctx context.Context, hardware *nvml.Client) (T, error) {
		if err := n.undoFile().write(u); err != nil {
			var none T
			return none, err
		}
		value, err := do(ctx, hardware)
		if err != nil {
			return value, errors.Join(err, n.undo(ctx, hardware))
		}
		return value, nil
	})
}

func checkExclusive(ctx context.Context, n *Node) []Finding {
	const expected = "the second process gets CUDA_ERROR_DEVICE_UNAVAILABLE"
	g := n.subject.gpu
	switch {
	case g == nil:
		return []Finding{Cannot(n.GPU, expected, "%s", n.subject.why)}
	case g.MIG != nil && g.MIG.Enabled:
		return []Finding{Cannot(g.PCIAddress, expected, "the GPU is in MIG mode and has no compute mode")}
	}
	got, err := changing(ctx, n, "two processes in compute mode EXCLUSIVE_PROCESS", undoOf(g, nil), func(ctx context.Context, hardware *nvml.Client) (string, error) {
		if err := hardware.SetComputeMode(ctx, g.PCIAddress, g.UUID, gpu.ComputeExclusiveProcess); err != nil {
			return "", err
		}
		return n.twoProcesses(ctx, g)
	})
	if err != nil {
		return []Finding{Failed(g.PCIAddress, expected, err)}
	}
	return []Finding{Expect(g.PCIAddress, strings.Contains(got, "CUDA_ERROR_DEVICE_UNAVAILABLE"), expected, got).
		Because("nothing keeps programs without MPS off a device that is shared")}
}

// twoProcesses makes a context in one process, and another one in a second process.
func (n *Node) twoProcesses(ctx context.Context, g *gpu.GPU) (string, error) {
	n.lab.mu.Lock()
	defer n.lab.mu.Unlock()
	program, o, err := n.lab.alone(g.UUID)
	if err != nil {
		return "", err
	}
	o.Hold = true
	first, err := program.Start(ctx, o)
	if err != nil {
		return "", err
	}
	events, err := first.Until(ctx, probe.Holding)
	if err == nil && said(events) != "" {
		err = fmt.Errorf("the first process gets %s", said(events))
	}
	got := ""
	if err == nil {
		o.Hold = false
		events, err = program.Run(ctx, o)
		got = "the second process " + outcome(events, nil)
	}
	_, endErr := first.Finish(ctx)
	return got, errors.Join(err, endErr)
}

// checkAsBefore runs part A again.
func checkAsBefore(ctx context.Context, n *Node) []Finding {
	const expected = "the same GPUs, modes, instances and verdicts"
	g := n.subject.gpu
	if g == nil {
		return []Finding{Cannot(n.GPU, expected, "%s", n.subject.why)}
	}
	_, err := onGPU(ctx, n, "undo", func(ctx context.Context, hardware *nvml.Client) (bool, error) {
		return true, n.undo(ctx, hardware)
	})
	if err != nil {
		return []Finding{Failed(g.PCIAddress, expected, err)}
	}
	before := n.gpus
	n.forget()
	after, err := n.GPUs(ctx)
	if err != nil {
		return []Finding{Failed(g.PCIAddress, expected, err)}
	}
	var differences []string
	for i := range before.GPUs {
		if i >= len(after.GPUs) || !reflect.DeepEqual(before.GPUs[i], after.GPUs[i]) {
			differences = append(differences, "GPU "+before.GPUs[i].PCIAddress)
		}
	}
	if why := n.inUse(ctx, g); why != "" {
		differences = append(differences, why)
	}
	again := n.examined(ctx)
	for _, result := range n.subject.before {
		if changesByItself(result.Check) {
			continue
		}
		same := func(r Result) bool {
			return r.Check == result.Check && r.Subject == result.Subject && r.Verdict == result.Verdict
		}
		if !slices.ContainsFunc(again, same) {
			differences = append(differences, strings.TrimSpace(result.Check+" "+result.Subject))
		}
	}
	observed := "no difference"
	if len(differences) > 0 {
		observed = "different: " + strings.Join(differences, ", ")
	}
	return []Finding{Expect(g.PCIAddress, len(differences) == 0, expected, observed).Because("look at these before the node takes pods")}
}

// changesByItself reports whether a check may have another verdict at any time: others
// come and go, and take the time of the node.
func changesByItself(check string) bool {
	return strings.HasPrefix(check, "holders.") || check == "hardware.latency"
}
