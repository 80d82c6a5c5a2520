// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func machineOf(t *testing.T, name string) *machine.Machine {
	t.Helper()
	return must.Get(catalog.Machine(name, catalog.Options{}))(t)
}

// container is a root with these nodes.
func container(t *testing.T, nodes ...string) (root string) {
	t.Helper()
	root = t.TempDir()
	for _, n := range append(nodes, "nvidiactl", "nvidia-uvm") {
		path := filepath.Join(root, "dev", n)
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		if errors.Is(err, unix.EPERM) {
			t.Skip(err)
		}
		must.Do(t, err)
	}
	return root
}

// divide puts two 3g.40gb on a GPU, the second with three small compute instances.
func divide(g *machine.GPU) {
	g.MIG.Current, g.MIG.Pending = true, true
	instance := func(id, start int, compute ...machine.ComputeInstance) machine.GPUInstance {
		return machine.GPUInstance{ID: id, ProfileID: 9, Placement: machine.Placement{Start: start, Size: 4}, Compute: compute}
	}
	small := func(id int) machine.ComputeInstance {
		return machine.ComputeInstance{ID: id, ProfileID: 0, Placement: machine.Placement{Start: id, Size: 1}, UUID: fmt.Sprint("MIG-small", id)}
	}
	g.MIG.Instances = []machine.GPUInstance{
		instance(1, 0, machine.ComputeInstance{ProfileID: 2, Placement: machine.Placement{Size: 3}, UUID: "MIG-whole", ComputeMode: ModeExclusiveProcess}),
		instance(2, 4, small(0), small(1), small(2)),
	}
}

func uuids(devices []Device) string {
	var out []string
	for _, d := range devices {
		out = append(out, d.UUID)
	}
	return strings.Join(out, " ")
}

func TestHere(t *testing.T) {
	m := machineOf(t, "dgx-h100")
	a, b, c := &m.GPUs[0], &m.GPUs[1], &m.GPUs[2]
	divide(b)
	node := func(g *machine.GPU) string { return fmt.Sprint("nvidia", g.Minor) }
	caps := func(numbers ...int) (out []string) {
		for _, n := range numbers {
			out = append(out, fmt.Sprint("nvidia-caps/nvidia-cap", n))
		}
		return out
	}
	first := 3 + 135*b.Minor // capabilities of b
	for name, c := range map[string]struct {
		nodes []string
		want  string
	}{
		"nothing":                 {nil, ""},
		"two GPUs":                {[]string{node(a), node(c)}, a.UUID + " " + c.UUID},
		"a MIG device":            {append(caps(first+9, first+10), node(b)), "MIG-whole"},
		"one of three":            {append(caps(first+18, first+20), node(b)), "MIG-small1"},
		"not the instance's node": {append(caps(first+10), node(b)), ""},
		"not the GPU's node":      {caps(first+9, first+10), ""},
		"all":                     {append(caps(1), node(a), node(b)), a.UUID + " MIG-whole MIG-small0 MIG-small1 MIG-small2"},
	} {
		expect.Equal(t, uuids(Here(m, container(t, c.nodes...))), c.want, name)
	}
	if got := Here(m, t.TempDir()); got != nil {
		t.Errorf("without nvidiactl: %v", got)
	}
	noUVM := container(t, append(caps(1), node(a))...)
	must.Do(t, os.Remove(filepath.Join(noUVM, "dev/nvidia-uvm")))
	if got := Here(m, noUVM); got != nil {
		t.Errorf("without nvidia-uvm: %v", got)
	}
	a.Failure = 15
	here := Here(m, container(t, append(caps(1), node(a), node(b), node(c))...))
	want := []Device{
		{UUID: "MIG-whole", Name: "NVIDIA H100 80GB HBM3 MIG 3g.40gb", GPU: 1, Instance: 1, Compute: 0, Minor: b.Minor, Memory: (40448 - 45) << 20,
			ContextMemory: 326 << 20, ServerMemory: 74 << 20,
			Multiprocessors: 60, OfGPU: 132, Major: 9, Mode: ModeExclusiveProcess},
		{UUID: "MIG-small0", Name: "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", GPU: 1, Instance: 2, Compute: 0, Minor: b.Minor, Memory: (40448 - 45) << 20,
			ContextMemory: 326 << 20, ServerMemory: 74 << 20,
			Multiprocessors: 16, OfGPU: 132, Major: 9},
	}
	expect.Same(t, here[:2], want)
	want = []Device{{UUID: c.UUID, Name: "NVIDIA H100 80GB HBM3", GPU: 2, Instance: -1, Compute: -1, Minor: c.Minor,
		Memory: c.MemoryBytes - c.ReservedBytes, ContextMemory: 514 << 20, ServerMemory: 74 << 20, Multiprocessors: 132, OfGPU: 132, Major: 9}}
	expect.Same(t, here[4:], want)
}

// A process that uses devices has their nodes open, and those of no other.
func TestOpen(t *testing.T) {
	m := machineOf(t, "dgx-h100")
	a, b := &m.GPUs[0], &m.GPUs[1]
	divide(b)
	cap := func(n int) string { return fmt.Sprint("nvidia-caps/nvidia-cap", n) }
	nodeA, nodeB, in, ci := fmt.Sprint("nvidia", a.Minor), fmt.Sprint("nvidia", b.Minor), capability(b.Minor, 2), capability(b.Minor, 2)+2
	root := container(t, nodeA, nodeB, cap(1), cap(in), cap(ci), cap(in+1))
	here := Here(m, root)
	for what, test := range map[string]struct {
		device Device
		want   []string
	}{
		"a GPU":                         {here[0], []string{nodeA}},
		"a partition without its nodes": {here[1], []string{nodeB}},
		"a compute instance":            {here[3], []string{nodeB, cap(in), cap(ci)}},
	} {
		nodes := must.Get(Open(root, test.device))(t)
		var got []string
		for _, n := range nodes {
			name := must.Get(filepath.Rel(filepath.Join(root, "dev"), n.Name()))(t)
			got = append(got, name)
		}
		expect.Same(t, got, test.want, what)
		expect.Do(t, nodes.Close())
	}
	expect.Is(t, expect.Err(Open(t.TempDir(), here[0])), os.ErrNotExist, "without nodes")
}

// All boards have the multiprocessors that the catalogue made their cores of.
func TestMultiprocessors(t *testing.T) {
	for _, name := range catalog.Boards() {
		b := must.Get(catalog.Load(name))(t)
		m := machineOf(t, name+"x1")
		d := whole(0, &m.GPUs[0])
		expect.Equal(t, d.Multiprocessors, b.Product.SMs, name)
	}
}

func TestSelect(t *testing.T) {
	gpu := func(n int) Device {
		return Device{UUID: fmt.Sprintf("GPU-%d0000000-1", n), GPU: n, Instance: -1, Compute: -1}
	}
	mig := func(n, gi int) Device { return Device{UUID: fmt.Sprintf("MIG-%d%d", n, gi), GPU: n, Instance: gi} }
	gpus, mixed := []Device{gpu(0), gpu(1), gpu(2)}, []Device{gpu(0), mig(1, 4), mig(1, 5), gpu(2)}
	for _, c := range []struct {
		here       []Device
		list, want string
	}{
		{gpus, "", ""}, {gpus, "0,2", "GPU-00000000-1 GPU-20000000-1"}, {gpus, " 2 , 0", "GPU-20000000-1 GPU-00000000-1"},
		{gpus, "GPU-1", "GPU-10000000-1"}, {gpus, "GPU-", ""}, {gpus, "1,9,0", "GPU-10000000-1"}, {gpus, "-1,0", ""}, {gpus, "void", ""},
		{gpus, "1,1,0", "GPU-10000000-1"},
		{mixed, "0", "GPU-00000000-1"}, {mixed, "1", "MIG-14"}, {mixed, "2", "GPU-20000000-1"}, {mixed, "0,1", "MIG-14"},
		{mixed, "MIG-15", "MIG-15"}, {mixed, "MIG-15,MIG-14", "MIG-15"}, {mixed, "0,2", "GPU-00000000-1 GPU-20000000-1"},
	} {
		if got := uuids(Select(c.here, c.list)); got != c.want {
			t.Errorf("%q of %s: %q, want %q", c.list, uuids(c.here), got, c.want)
		}
	}
	expect.Equal(t, uuids(Enumerate(mixed)), "MIG-14", "enumerated")
	if got := Enumerate(gpus); len(got) != 3 {
		t.Errorf("enumerated %q", uuids(got))
	}
}

func TestFreeAndUsed(t *testing.T) {
	d := Device{GPU: 1, Instance: 2, Compute: 0}
	m := &machine.Machine{Processes: []machine.Process{
		{GPU: 1, InstanceID: 2, ComputeID: 1, MemoryBytes: 5}, {GPU: 1, InstanceID: 3, ComputeID: 0, MemoryBytes: 7},
		{GPU: 0, InstanceID: 2, ComputeID: 0, MemoryBytes: 9},
	}}
	expect.Equal(t, d.Used(m), 5, "bytes in use, which are those of the GPU instance")
	free := func(mode int) error { d.Mode = mode; return d.Free(m) }
	expect.Do(t, errors.Join(free(ModeDefault), free(ModeExclusiveProcess)))
	expect.Is(t, free(ModeProhibited), DeviceUnavailable, "prohibited")
	m.Processes[0].ComputeID = 0
	expect.Is(t, free(ModeExclusiveProcess), DeviceUnavailable, "held")
	expect.Do(t, free(ModeDefault))
}

func TestErrors(t *testing.T) {
	expect.Equal(t, OutOfMemory.Error(), "CUDA_ERROR_OUT_OF_MEMORY: out of memory")
	expect.Equal(t, Error(12345).Error(), "CUDA error 12345")
}

func TestLimited(t *testing.T) {
	for _, c := range []struct {
		of         int
		percentage float64
		want       int
	}{{188, 25, 46}, {132, 25, 32}, {132, 100, 132}, {16, 50, 8}, {60, 33, 18}, {132, 1, 2}, {14, 10, 2}} {
		if got := (Device{Multiprocessors: c.of}).Limited(c.percentage); got != c.want {
			t.Errorf("%v %% of %d: %d, want %d", c.percentage, c.of, got, c.want)
		}
	}
}
