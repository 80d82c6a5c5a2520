// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// NVML's states of the registration with an NVLink fabric.
const (
	fabricInProgress = 2
	fabricCompleted  = 3
)

// TestCoherentMemory: a GPU whose memory the driver manages is published without partitions, the log says
// why, and claims of the whole GPU and of shares work. Where the kernel manages it, it has partitions.
func TestCoherentMemory(t *testing.T) {
	t.Parallel()
	for mode, partitions := range map[machine.CoherentMemory]bool{machine.CoherentDriver: false, machine.CoherentNUMA: true} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "gh200-144x1", func(m *machine.Machine) { m.CoherentMemory = mode })
			n.StartSupervisor(t)
			p := n.Start(t)
			p.Ready(t)
			p.UntilPublished(t, n, 0)
			names := n.DevicesOf(t, 0)
			divided := slices.ContainsFunc(names, func(name string) bool { return strings.Contains(name, "-mig-") })
			if divided != partitions {
				t.Errorf("published: %v", names)
			}
			const says = "no partitions are published: the GPU is coherent with the CPU and the driver manages its memory"
			if got := strings.Count(p.Log.String(), says); got != 1-count(partitions) {
				t.Errorf("the log has %d lines about it:\n%s", got, p.Log.String())
			}
			for _, kind := range []harness.ShareKind{"", harness.MPS, harness.TimeSlice} {
				claim := n.Allocate(t, []harness.Device{{Kind: kind}})
				p.MustPrepare(t, claim)
				p.MustUnprepare(t, claim)
			}
			p.UntilClean(t, n)
		})
	}
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// TestFabricAfterPartitions: the driver registers a GPU with the NVLink fabric again after its last
// partition is gone. A claim of the whole GPU waits for that, so that its program does not fail, and claims of the
// other GPU do not.
func TestFabricAfterPartitions(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2", func(m *machine.Machine) {
		for i := range m.GPUs {
			m.GPUs[i].Health.Fabric.State = fabricCompleted
		}
	})
	p := n.Start(t)
	p.Ready(t)
	p.UntilPublished(t, n, 0, 1)
	partition := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	p.MustPrepare(t, partition)
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].Health.Fabric.State = fabricInProgress })
	p.MustUnprepare(t, partition)

	claim := n.AllocateNamed([]string{n.DeviceName(t, 0, "", 0)})
	type answer struct {
		ids []string
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		ids, err := p.TryPrepare(t.Context(), claim, harness.KubeletTimeout)
		answers <- answer{ids, err}
	}()
	p.Until(t, "a claim that waits for the fabric", func(context.Context) error {
		for line := range strings.SplitSeq(p.Log.String(), "\n") {
			if strings.Contains(line, "Waiting") && strings.Contains(line, "NVLink fabric") && strings.Contains(line, n.Address(t, 0)) {
				return nil
			}
		}
		return errors.New("the log has none")
	})
	other := n.AllocateNamed([]string{n.DeviceName(t, 1, "", 0)})
	p.MustPrepare(t, other)
	select {
	case early := <-answers:
		t.Fatalf("the claim did not wait: %+v", early)
	default:
	}
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].Health.Fabric.State = fabricCompleted })
	got := <-answers
	if got.err != nil {
		// On a busy machine the time of the call may be over, and the kubelet comes back.
		got.ids = p.MustPrepare(t, claim)
	}
	// What a program would have met.
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].Health.Fabric.State = fabricInProgress })
	if out, err := n.RunProgram(t, n.Container(t, got.ids...), "info"); err == nil || !strings.Contains(out, "SYSTEM_NOT_READY") {
		t.Errorf("a program before that: %v, %s", err, out)
	}
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].Health.Fabric.State = fabricCompleted })
	n.StartProgram(t, got.ids...)
}

// TestFabricNeverJoined: without a fabric manager no CUDA program starts on the GPU. Claims of the
// whole GPU fail and say why; what the GPU's partitions need is there all the same.
func TestFabricNeverJoined(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1", func(m *machine.Machine) { m.GPUs[0].Health.Fabric.State = fabricInProgress })
	p := n.Start(t)
	p.Ready(t)
	p.UntilPublished(t, n, 0)
	claim := n.AllocateNamed([]string{n.DeviceName(t, 0, "", 0)})
	_, err := p.TryPrepare(t.Context(), claim, harness.KubeletTimeout)
	for _, text := range []string{n.Address(t, 0), "not registered with the NVLink fabric yet (In Progress)", "CUDA programs would not start"} {
		if !strings.Contains(fmt.Sprint(err), text) {
			t.Errorf("the claim's error does not say %q: %v", text, err)
		}
	}
	partition := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	n.StartProgram(t, p.MustPrepare(t, partition)...)
}

// TestInstancesAtBoot: partitions that the NVIDIA driver makes when it is loaded are nobody's claim's. They
// are published as they are, what overlaps them is tainted from the first look on, and nothing changes them.
func TestInstancesAtBoot(t *testing.T) {
	t.Parallel()
	at := harness.Place{Profile: "2g.20gb", Start: 2}
	n := harness.NewNode(t, "h100x2", func(m *machine.Machine) {
		mig := m.GPUs[0].MIG
		mig.Current, mig.Pending = true, true
		for i := range mig.Profiles {
			if p := &mig.Profiles[i]; p.Name == at.Profile {
				in := p.Instance(1, "MIG-6f0c1c54-1f0e-5b8a-9a59-3d3a3a0f3a11")
				all := p.Compute[len(p.Compute)-1]
				in.Compute[0].ProfileID, in.Compute[0].Placement.Size = all.ID, all.Slices
				mig.Instances = []machine.GPUInstance{in}
			}
		}
	})
	before := n.Instances(t)
	p := n.Start(t)
	p.Ready(t)
	name := staticDevice(t, n, p, 0, at)
	p.UntilTainted(t, n, "occupied", n.Overlapping(t, 0, 2, 2))
	whole := n.AllocateNamed([]string{n.DeviceName(t, 0, "", 0)})
	if _, err := p.TryPrepare(t.Context(), whole, harness.KubeletTimeout); err == nil {
		t.Error("the whole GPU was prepared beside a partition")
	}
	p.MustUnprepare(t, whole)

	static := n.AllocateNamed([]string{name})
	beside := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	p.MustPrepare(t, static)
	p.MustPrepare(t, beside)
	p.MustUnprepare(t, beside)
	p.MustUnprepare(t, static)
	if diff := cmp.Diff(before, n.Instances(t)); diff != "" {
		t.Errorf("instances (-at boot +now):\n%s", diff)
	}
	if !n.MIGMode(t)[0] {
		t.Error("MIG mode is off although there is a partition")
	}
}

// TestGPUsThatSayLess: an architecture without a name and a memory that is not reported cost a GPU what
// depends on them, and its neighbours nothing.
func TestGPUsThatSayLess(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x3", func(m *machine.Machine) {
		m.GPUs[0].Architecture = -1 // NVML_DEVICE_ARCH_UNKNOWN
		m.GPUs[1].MemoryBytes, m.GPUs[1].ReservedBytes = 0, 0
	})
	n.StartSupervisor(t)
	p := n.Start(t)
	p.Ready(t)
	p.UntilPublished(t, n, 0, 1, 2)
	all := []harness.ShareKind{"", harness.MPS, harness.TimeSlice}
	var devices []harness.Device
	for gpu, kinds := range [][]harness.ShareKind{all, {"", harness.TimeSlice}, all} {
		for _, kind := range kinds {
			devices = append(devices, harness.Device{GPU: gpu, Kind: kind})
		}
	}
	wanted := n.DeviceNames(t, devices)
	var got []string
	for gpu := range 3 {
		for _, name := range n.DevicesOf(t, gpu) {
			if !strings.HasSuffix(name, "-observer") {
				got = append(got, name)
			}
		}
	}
	slices.Sort(wanted)
	slices.Sort(got)
	if diff := cmp.Diff(wanted, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	p.WantLog(t, "the driver does not report the GPU's memory")
	for _, d := range devices {
		claim := n.Allocate(t, []harness.Device{d})
		p.MustPrepare(t, claim)
		p.MustUnprepare(t, claim)
	}
	p.UntilClean(t, n)
}
