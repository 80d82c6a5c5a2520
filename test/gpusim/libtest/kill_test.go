// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// churn is a helper: it creates and destroys instances until it is killed.
func churn(lib nvml.Interface) error {
	d, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("handle: %w", ret)
	}
	for round := 0; ; round++ {
		if err := clear(d); err != nil {
			return err
		}
		for _, enum := range []int{nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1} {
			if err := fill(d, enum); err != nil {
				return err
			}
		}
		if round == 0 {
			fmt.Println("ready")
		}
	}
}

// fill creates one GPU instance with one compute instance.
func fill(d nvml.Device, enum int) error {
	info, ret := d.GetGpuInstanceProfileInfo(enum)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("profile: %w", ret)
	}
	gi, ret := d.CreateGpuInstance(&info)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("create GPU instance: %w", ret)
	}
	ci, ret := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 0)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("compute profile: %w", ret)
	}
	if _, ret := gi.CreateComputeInstance(&ci); ret != nvml.SUCCESS {
		return fmt.Errorf("create compute instance: %w", ret)
	}
	return nil
}

// clear destroys all instances, also those that a killed predecessor left.
func clear(d nvml.Device) error {
	for id := range 15 {
		gi, ret := d.GetGpuInstanceById(id)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		if ret != nvml.SUCCESS {
			return fmt.Errorf("GPU instance %d: %w", id, ret)
		}
		if ci, ret := gi.GetComputeInstanceById(0); ret == nvml.SUCCESS {
			if ret := ci.Destroy(); ret != nvml.SUCCESS {
				return fmt.Errorf("destroy compute instance: %w", ret)
			}
		}
		if ret := gi.Destroy(); ret != nvml.SUCCESS {
			return fmt.Errorf("destroy GPU instance: %w", ret)
		}
	}
	return nil
}

// start starts a helper and waits until it is at work.
func start(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	out := must.Get(cmd.StdoutPipe())(t)
	must.Do(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("helper said %q: %v", line, err)
	}
}

// sound checks what no moment of death may break.
func sound(m *machine.Machine) error {
	g := m.GPUs[0]
	var layout catalog.Layout
	ids := map[int]bool{}
	for _, in := range g.MIG.Instances {
		layout = append(layout, catalog.Instance{ProfileID: in.ProfileID, Placement: in.Placement})
		if ids[in.ID] {
			return fmt.Errorf("GPU instance %d twice", in.ID)
		}
		ids[in.ID] = true
		for _, ci := range in.Compute {
			if ci.UUID == "" || ci.Placement.Size != 1 {
				return fmt.Errorf("GPU instance %d has compute instance %+v", in.ID, ci)
			}
		}
	}
	return catalog.Legal(&g, layout)
}

// TestKilledWriter kills a process that changes the machine all the time. What
// it leaves has to be a machine, and the next writer has to bring the
// capability files in line with it.
func TestKilledWriter(t *testing.T) {
	g := h100(0)
	g.MIG.Current, g.MIG.Pending = true, true
	r := newRoot(t, machineOf(g))
	rounds := 60
	if testing.Short() {
		rounds = 10
	}
	behind := 0
	for round := range rounds {
		cmd := helper(t, "churn", library, "GPUSIM_STATE="+r.state())
		start(t, cmd)
		// A round of the loop takes about a millisecond, so this hits any point
		// of it. Nothing is expected of the time itself.
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		must.Do(t, cmd.Process.Kill())
		if err := cmd.Wait(); err == nil {
			t.Fatal("helper ended by itself")
		}
		m := r.machine()
		must.Do(t, sound(m), "round", round)
		if !cmp.Equal(capabilitiesOf(m), r.capabilities()) {
			behind++
		}
		r.update(func(*machine.Machine) {}) // the next writer
		if diff := cmp.Diff(capabilitiesOf(r.machine()), r.capabilities()); diff != "" {
			t.Fatalf("round %d: capability files after the next writer (-want +got):\n%s", round, diff)
		}
	}
	t.Logf("%d of %d deaths left capability files to repair", behind, rounds)
}

// TestRepairAtInit: a process that starts after the death finds sound files.
func TestRepairAtInit(t *testing.T) {
	r := newRoot(t, machineOf(h100(0)))
	r.update(func(m *machine.Machine) {
		m.GPUs[0].MIG.Current = true
		m.GPUs[0].MIG.Instances = []machine.GPUInstance{{ID: 7, ProfileID: id1g, Placement: machine.Placement{Size: 1}}}
	})
	// As left by a writer that died before it had written the files.
	for _, change := range []error{
		poke(r.state(), 32, 0), // the generation of the files
		exec.CommandContext(t.Context(), "rm", "-r", r.dir+"/var/lib/gpusim/proc/driver/nvidia/capabilities/gpu0").Run(),
	} {
		if change != nil {
			t.Fatal(change)
		}
	}
	r.open()
	expect.Same(t, r.capabilities(), capabilitiesOf(r.machine()), "capability files")
}

// readForever is a helper: it reads MIG devices until its input ends, and
// fails on an answer that no moment of the machine would give.
func readForever(lib nvml.Interface) error {
	d, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("handle: %w", ret)
	}
	done := make(chan error)
	go func() {
		_, err := io.ReadAll(os.Stdin)
		done <- err
	}()
	fmt.Println("ready")
	for {
		select {
		case err := <-done:
			return err
		default:
		}
		for i := range 3 {
			if err := readOne(d, i); err != nil {
				return err
			}
		}
	}
}

func readOne(d nvml.Device, index int) error {
	mig, ret := d.GetMigDeviceHandleByIndex(index)
	if ret == nvml.ERROR_NOT_FOUND {
		return nil
	}
	if ret != nvml.SUCCESS {
		return fmt.Errorf("MIG device %d: %w", index, ret)
	}
	// The device may be gone by now, but what is answered must be whole.
	uuid, ret := mig.GetUUID()
	if ret != nvml.SUCCESS && ret != nvml.ERROR_INVALID_ARGUMENT {
		return fmt.Errorf("UUID: %w", ret)
	}
	if ret == nvml.SUCCESS && len(uuid) != len("MIG-00000000-0000-0000-0000-000000000000") {
		return fmt.Errorf("torn UUID %q", uuid)
	}
	attributes, ret := mig.GetAttributes()
	if ret != nvml.SUCCESS && ret != nvml.ERROR_INVALID_ARGUMENT {
		return fmt.Errorf("attributes: %w", ret)
	}
	memory := map[uint32]uint64{1: 9984, 2: 20096, 3: 40448}
	if ret == nvml.SUCCESS && memory[attributes.GpuInstanceSliceCount] != attributes.MemorySizeMB {
		return errors.New("torn attributes")
	}
	return nil
}

// TestReaders has processes read while another one writes.
func TestReaders(t *testing.T) {
	g := h100(0)
	g.MIG.Current, g.MIG.Pending = true, true
	r := newRoot(t, machineOf(g))
	var readers []*exec.Cmd
	var inputs []io.Closer
	for range 2 {
		cmd := helper(t, "read", library, "GPUSIM_STATE="+r.state())
		in := must.Get(cmd.StdinPipe())(t)
		start(t, cmd)
		readers, inputs = append(readers, cmd), append(inputs, in)
	}
	d := device(t, r.open(), 0)
	for range 50 {
		for _, enum := range []int{nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1} {
			must.Do(t, fill(d, enum))
		}
		must.Do(t, clear(d))
	}
	for i, in := range inputs {
		must.Do(t, in.Close())
		expect.Do(t, readers[i].Wait(), "reader")
	}
}
