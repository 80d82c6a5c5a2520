// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// slowFile is something beside NVML that takes its time for a claim.
type slowFile struct {
	name string
	// device and config are the claim's, on GPU 0.
	device harness.Device
	config []harness.Config
	// prepared: the claim is prepared before. What happens then is the operation; an observation makes its CDI spec
	// again, which was removed.
	prepared  bool
	operation harness.Operation
	hold      func(*testing.T, *harness.Node) heldFile
	// all GPUs need it, so that a claim on the other one only goes.
	all bool
}

// heldFile is what is held until the test opens it.
type heldFile struct {
	check func() error
	open  func() error
}

func ofFiles(g *harness.FileGate) heldFile {
	return heldFile{func() error { return g.CheckHeld(1) }, func() error { g.Open(); return nil }}
}

func holdProc(t *testing.T, n *harness.Node) heldFile { return ofFiles(n.HoldProc(t, 0)) }

// holdCapabilities holds the files of the partitions that GPU 0 has.
func holdCapabilities(t *testing.T, n *harness.Node) heldFile {
	minor := strconv.Itoa(n.Machine(t).GPUs[0].Minor)
	return ofFiles(harness.HoldFiles(t, filepath.Join(n.Root, "proc/driver/nvidia/capabilities/gpu"+minor)))
}

func holdLibraries(t *testing.T, n *harness.Node) heldFile { return ofFiles(n.HoldLibraries(t)) }

func holdSMI(t *testing.T, n *harness.Node) heldFile {
	g := n.Hold(t, state.SMI, 0)
	return heldFile{func() error { return g.CheckHeld(1) }, func() error { _, err := g.TryRemove(); return err }}
}

func slowFiles() []slowFile {
	partition := harness.Partition(0, "1g.10gb", 4)
	short := []harness.Config{harness.GPUWithShortSlice}
	return []slowFile{
		{name: "proc of the GPU", device: partition, operation: harness.Prepare, hold: holdProc},
		{name: "proc of the GPU, prepared before", device: partition, prepared: true, operation: harness.Prepare, hold: holdProc},
		{name: "proc of the whole GPU", operation: harness.Prepare, hold: holdProc},
		{name: "proc of the partition, prepared before", device: partition, prepared: true, operation: harness.Prepare, hold: holdCapabilities},
		{name: "nvidia-smi", config: short, operation: harness.Prepare, hold: holdSMI},
		{name: "nvidia-smi at the end", config: short, prepared: true, operation: harness.Unprepare, hold: holdSMI},
		{name: "proc of the GPU, cleaning up", device: partition, prepared: true, operation: harness.Observe, hold: holdProc},
		{name: "proc of the partition, cleaning up", device: partition, prepared: true, operation: harness.Observe, hold: holdCapabilities},
		{name: "driver's folder", device: partition, operation: harness.Prepare, hold: holdLibraries, all: true},
	}
}

// TestSlowFiles holds what a claim needs beside NVML: /proc/driver/nvidia, nvidia-smi, and the driver's folder. A
// claim on another GPU comes and goes meanwhile, and when it goes on, the claim is prepared or released as if nothing
// had been.
func TestSlowFiles(t *testing.T) {
	t.Parallel()
	count := harness.Enumerate(t, "slow files", 8)
	for _, c := range harness.Choose(count, slowFiles()) {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			expect.Do(t, c.run(t))
			count.Ran(c.name)
		})
	}
}

func (c slowFile) run(t *testing.T) error {
	n := harness.NewNode(t, "h100x2")
	flags := harness.Quiet
	if c.operation == harness.Observe {
		flags = harness.Frequent
	}
	p := n.Run(t, slices.Concat(flags, patient)...)
	before := n.Snapshot(t)
	l := &worker{faultRig: &faultRig{n: n, p: p}, gpu: 0, neighbour: 1}
	// The driver's folder is looked through twice before what is found is kept, so this is one of the two.
	beside, _ := p.NewClaim(t, n, harness.Device{GPU: 1})
	claim := n.Allocate(t, []harness.Device{c.device}, c.config...)
	if c.prepared {
		p.MustPrepare(t, claim)
	}
	held := c.hold(t, n)
	answer := c.begin(t, l, claim)
	err := harness.Eventually(t.Context(), held.check)
	if err == nil {
		err = c.neighbour(t, l, beside)
	}
	err = errors.Join(err, held.open())
	a := <-answer
	if err != nil || a.err != nil {
		return errors.Join(err, a.err)
	}
	if c.operation != harness.Unprepare {
		if err := n.CheckPrepared(claim.GetUid(), a.ids, 0, harness.Place{Profile: c.device.Profile, Start: c.device.Start}); err != nil {
			return err
		}
		p.MustUnprepare(t, claim)
	}
	p.UntilSnapshot(t, n, before)
	return nil
}

// begin does what is held on the way.
func (c slowFile) begin(t *testing.T, l *worker, claim *drapb.Claim) <-chan answered {
	t.Helper()
	if c.operation != harness.Observe {
		return l.answer(t.Context(), c.operation, claim)
	}
	var spec string
	for _, name := range l.n.CDISpecs(t) {
		if strings.Contains(name, claim.GetUid()) {
			spec = filepath.Join(l.n.CDIDir, name)
		}
	}
	must.Do(t, os.Remove(spec))
	answer := make(chan answered, 1)
	go func() {
		a := answered{err: harness.Eventually(t.Context(), func() error {
			_, err := os.Stat(spec)
			return err
		})}
		if a.err == nil {
			a = <-l.answer(t.Context(), harness.Prepare, claim)
		}
		answer <- a
	}()
	return answer
}

// neighbour has the claim on the other GPU go, and another one come and go.
func (c slowFile) neighbour(t *testing.T, l *worker, beside *drapb.Claim) error {
	if err := l.p.TryUnprepare(t.Context(), beside, enoughTime); err != nil {
		return fmt.Errorf("release on GPU 1, which needs nothing that is held: %w", err)
	}
	if c.all {
		return nil
	}
	return l.neighbourGoes(t.Context())
}
