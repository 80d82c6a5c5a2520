// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	fatal "github.com/partage-dev/partage/test/must"
)

// The tests in this file run the real bindings on the simulated library. A
// process stays with the library that it loaded first, so all of them load the
// same file and tell it by GPUSIM_STATE which machine to show. Hence they run
// one by one.

// buildLibrary makes the simulated library once and returns its folder. A process that has
// oldDriver in its environment uses the library of an old driver.
var buildLibrary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "gpusim-lib-")
	if err != nil {
		return "", err
	}
	cleanup = append(cleanup, dir)
	build := exec.Command("make", "-s", "-C", "../../../test/gpusim/lib", "OUT="+dir, "HIDE="+os.Getenv(oldDriver))
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the simulated library: %w\n%s", err, out)
	}
	if os.Getenv(oldDriver) == "" {
		return dir, nil
	}
	return dir, os.Rename(filepath.Join(dir, "libnvidia-ml-old.so"), filepath.Join(dir, "libnvidia-ml.so"))
})

// oldDriver names functions that the library is to lack.
const oldDriver = "NVML_TEST_OLD_DRIVER"

var cleanup []string

func TestMain(m *testing.M) {
	code := m.Run()
	for _, dir := range cleanup {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// simulate opens a client on a new machine.
func simulate(t testing.TB, m *machine.Machine) (*Client, *state.File) {
	t.Helper()
	c, file := simulateClosed(t, m, Options{})
	fatal.Do(t, c.Open(t.Context()))
	return c, file
}

// simulateClosed makes a new machine and a client of it.
func simulateClosed(t testing.TB, m *machine.Machine, o Options) (*Client, *state.File) {
	t.Helper()
	lib, err := buildLibrary()
	fatal.Do(t, err)
	root := t.TempDir()
	library := filepath.Join(lib, "libnvidia-ml.so")
	// Nobody runs the programs of this machine.
	err = sysroot.Create(root, m, sysroot.Assets{NVML: library, CUDA: library, NVIDIASMI: library})
	if errors.Is(err, fs.ErrPermission) {
		t.Skipf("a simulated machine cannot be made here: %v", err)
	}
	fatal.Do(t, err)
	t.Setenv("GPUSIM_STATE", sysroot.StatePath(root))
	file := fatal.Get(state.Open(sysroot.StatePath(root)))(t)
	t.Cleanup(func() { file.Close() })

	o.Roots = host.Roots{Driver: root, Proc: filepath.Join(root, "proc"), Sys: filepath.Join(root, "sys")}
	c := New(o)
	c.find = func() (string, error) { return library, nil }
	t.Cleanup(c.Close)
	return c, file
}

func newMachine(t testing.TB, name string) *machine.Machine {
	t.Helper()
	return fatal.Get(catalog.Machine(name, catalog.Options{}))(t)
}

func snapshot(t testing.TB, file *state.File) *machine.Machine {
	t.Helper()
	return fatal.Get(file.Snapshot())(t)
}

// What Discover says of a board is what the catalogue says of it.
func TestSimulatedBoards(t *testing.T) {
	for _, board := range catalog.Boards() {
		t.Run(board, func(t *testing.T) {
			m := newMachine(t, board+"x2")
			m.GPUs[1].NUMANode = -1
			c, file := simulate(t, m)
			got := fatal.Get(c.Discover(t.Context()))(t)
			if diff := gocmp.Diff(expectedNode(m), got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("node (-catalogue +discovered):\n%s", diff)
			}
			expect.Len(t, fatal.Get(file.Unmodelled())(t), 0, "functions that the simulated library does not have")
		})
	}
}

// expectedNode says by hand what Discover should make of a machine of the
// catalogue: an independent way from the same facts.
func expectedNode(m *machine.Machine) *gpu.Node {
	archNames := map[int]string{5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace", 9: "Hopper", 10: "Blackwell"}
	brandNames := map[int]string{2: "Tesla", 13: "NvidiaRTX", 14: "Nvidia"}
	modeNames := map[int]string{0: "None", 1: "HMM", 2: "ATS"}
	node := &gpu.Node{
		DriverVersion: m.DriverVersion,
		CUDAVersion:   gpu.Version{Major: m.CUDADriverVersion / 1000, Minor: m.CUDADriverVersion % 1000 / 10},
	}
	for _, s := range m.GPUs {
		g := gpu.GPU{
			PCIAddress: s.PCIAddress, PCIDeviceID: fmt.Sprintf("10de:%04x", s.PCIDeviceID>>16), UUID: s.UUID, Minor: s.Minor, ProductName: s.ProductName,
			Brand:             brandNames[s.Brand],
			Architecture:      archNames[s.Architecture],
			ComputeCapability: gpu.Version{Major: s.ComputeMajor, Minor: s.ComputeMinor},
			Resources:         gpu.Resources{MemoryBytes: s.MemoryBytes},
			ReservedBytes:     s.ReservedBytes,
			AddressingMode:    modeNames[s.AddressingMode], PCIeRoot: s.PCIeRoot,
		}
		if s.NUMANode >= 0 {
			g.NUMANode = &s.NUMANode
		}
		if s.MIG != nil {
			g.MIG = expectedMIG(s.MIG)
			whole := slices.MaxFunc(s.MIG.Profiles, func(a, b machine.GIProfile) int { return cmp.Compare(a.Slices, b.Slices) })
			g.Resources = expectedResources(whole)
			g.Resources.MemoryBytes = s.MemoryBytes
			if s.MIG.Current {
				g.ReservedBytes = 0
			}
		}
		node.GPUs = append(node.GPUs, g)
	}
	return node
}

func expectedMIG(s *machine.MIG) *gpu.MIG {
	mig := &gpu.MIG{Enabled: s.Current, Dynamic: !s.ResetToSwitch, MemorySlices: s.MemorySlices}
	for _, p := range s.Profiles {
		profile := gpu.Profile{
			ID: p.ID, Name: p.Name, Slices: p.Slices, MaxInstances: p.MaxInstances, Resources: expectedResources(p),
		}
		for _, at := range p.Placements {
			profile.Placements = append(profile.Placements, gpu.Placement{Start: at.Start, Size: at.Size})
		}
		mig.Profiles = append(mig.Profiles, profile)
	}
	slices.SortFunc(mig.Profiles, func(a, b gpu.Profile) int { return cmp.Compare(a.ID, b.ID) })
	return mig
}

func expectedResources(p machine.GIProfile) gpu.Resources {
	return gpu.Resources{
		MemoryBytes: p.MemoryMiB << 20, Multiprocessors: p.SMs, CopyEngines: p.CopyEngines,
		Decoders: p.Decoders, Encoders: p.Encoders, JPEGEngines: p.JPEG, OFAEngines: p.OFA,
	}
}

// Every profile can be made at every placement, with a compute instance that
// spans it, and leaves nothing behind.
func TestSimulatedLifeCycle(t *testing.T) {
	for _, board := range catalog.Boards() {
		m := newMachine(t, board+"x2")
		if m.GPUs[0].MIG == nil {
			continue
		}
		t.Run(board, func(t *testing.T) {
			for i := range m.GPUs {
				m.GPUs[i].MIG.Current, m.GPUs[i].MIG.Pending = true, true
			}
			c, file := simulate(t, m)
			node := fatal.Get(c.Discover(t.Context()))(t)
			second := node.GPUs[1]
			for _, profile := range second.MIG.Profiles {
				for _, at := range profile.Placements {
					liveAndDie(t, c, file, second.PCIAddress, profile, at)
				}
			}
		})
	}
}

func liveAndDie(t *testing.T, c *Client, file *state.File, pci string, profile gpu.Profile, at gpu.Placement) {
	t.Helper()
	ctx := t.Context()
	where := fmt.Sprintf("%s at %d:%d", profile.Name, at.Start, at.Size)
	gi, err := c.CreateInstance(ctx, pci, profile.ID, at)
	fatal.Do(t, err, where)
	want := gpu.MIGState{Enabled: true, Pending: true, Instances: []gpu.Instance{{ID: gi, ProfileID: profile.ID, Placement: at}}}
	expectState(t, c, pci, where+" without compute instance", want)

	ci, err := c.CreateComputeInstance(ctx, pci, gi)
	fatal.Do(t, err, where)
	want.Instances[0].Compute = []gpu.ComputeInstance{ci}
	expectState(t, c, pci, where, want)
	expectSpan(t, file, where, profile, ci)

	expect.Is(t, c.DestroyInstance(ctx, pci, gi), gpu.ErrInUse, where, "destroyed with its compute instance in it")
	fatal.Do(t, c.DestroyComputeInstance(ctx, pci, gi, ci.ID), where)
	if err := c.DestroyComputeInstance(ctx, pci, gi, ci.ID); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("%s: compute instance destroyed twice: %v", where, err)
	}
	fatal.Do(t, c.DestroyInstance(ctx, pci, gi), where)
	expect.Is(t, c.DestroyInstance(ctx, pci, gi), gpu.ErrNotFound, where, "destroyed twice")
	expectState(t, c, pci, "after "+where, gpu.MIGState{Enabled: true, Pending: true})
}

func expectState(t *testing.T, c *Client, pci, when string, want gpu.MIGState) {
	t.Helper()
	got, err := c.MIGState(t.Context(), pci)
	fatal.Do(t, err, when)
	if diff := gocmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(gpu.Instance{}, "IDSince")); diff != "" {
		t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

// expectSpan looks into the machine: the compute instance has the UUID that
// was returned and as many multiprocessors as its GPU instance.
func expectSpan(t *testing.T, file *state.File, where string, profile gpu.Profile, ci gpu.ComputeInstance) {
	t.Helper()
	mig := snapshot(t, file).GPUs[1].MIG
	if len(mig.Instances) != 1 || len(mig.Instances[0].Compute) != 1 {
		t.Fatalf("%s: instances %+v", where, mig.Instances)
	}
	live := mig.Instances[0].Compute[0]
	if live.UUID != ci.UUID || live.ID != ci.ID {
		t.Errorf("%s: compute instance %+v, returned %+v", where, live, ci)
	}
	for _, gi := range mig.Profiles {
		for _, p := range gi.Compute {
			if gi.ID == profile.ID && p.ID == live.ProfileID && p.SMs != profile.Resources.Multiprocessors {
				t.Errorf("%s: compute profile %d has %d of %d multiprocessors", where, p.ID, p.SMs, profile.Resources.Multiprocessors)
			}
		}
	}
}

func TestSimulatedRefusals(t *testing.T) {
	c, file := simulate(t, newMachine(t, "h100-80-sxmx1"))
	ctx := t.Context()
	pci := snapshot(t, file).GPUs[0].PCIAddress
	one, three := uint32(19), uint32(9)

	if _, err := c.CreateInstance(ctx, pci, one, gpu.Placement{Start: 4, Size: 1}); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("created with MIG mode off: %v", err)
	}
	fatal.Do(t, c.SetMIGMode(ctx, pci, true))
	expect.Do(t, c.SetMIGMode(ctx, pci, true), "mode that is on")
	gi := fatal.Get(c.CreateInstance(ctx, pci, one, gpu.Placement{Start: 4, Size: 1}))(t)
	if _, err := c.CreateInstance(ctx, pci, three, gpu.Placement{Start: 4, Size: 4}); !errors.Is(err, gpu.ErrNoRoom) {
		t.Errorf("overlapping instance: %v", err)
	}
	if _, err := c.CreateInstance(ctx, pci, 4711, gpu.Placement{Start: 0, Size: 1}); !errors.Is(err, gpu.ErrInvalid) && !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("unknown profile: %v", err)
	}
	expect.Is(t, expect.Err(c.CreateComputeInstance(ctx, pci, gi+1)), gpu.ErrNotFound, "compute instance in nothing")
	expect.Is(t, expect.Err(c.MIGState(ctx, "0000:ff:00.0")), gpu.ErrNotFound, "no such GPU")
}

func TestSimulatedProcessHoldsInstance(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true
	c, file := simulate(t, m)
	ctx, pci := t.Context(), m.GPUs[0].PCIAddress
	gi := fatal.Get(c.CreateInstance(ctx, pci, 19, gpu.Placement{Start: 4, Size: 1}))(t)
	ci, err := c.CreateComputeInstance(ctx, pci, gi)
	fatal.Do(t, err)
	update(t, file, func(m *machine.Machine) {
		m.Processes = []machine.Process{{PID: 4711, Name: "train", GPU: 0, InstanceID: gi, ComputeID: ci.ID}}
	})
	if err := c.DestroyComputeInstance(ctx, pci, gi, ci.ID); !errors.Is(err, gpu.ErrInUse) || !strings.Contains(err.Error(), pci) {
		t.Errorf("destroyed in use: %v", err)
	}
	expect.Same(t, fatal.Get(c.Processes(ctx, pci))(t), []gpu.Process{{PID: 4711, InstanceID: gi}}, "processes")
}

// On Ampere the mode waits for a reset, and the caller learns that.
func TestSimulatedModeThatNeedsReset(t *testing.T) {
	c, file := simulate(t, newMachine(t, "a100-40x1"))
	pci := snapshot(t, file).GPUs[0].PCIAddress
	if err := c.SetMIGMode(t.Context(), pci, true); !errors.Is(err, gpu.ErrResetRequired) {
		t.Fatalf("got %v", err)
	}
	expectState(t, c, pci, "after the refusal", gpu.MIGState{Pending: true})
	expect.Do(t, c.SetMIGMode(t.Context(), pci, false), "take it back")
	expectState(t, c, pci, "taken back", gpu.MIGState{})
}

func TestSimulatedBoardWithoutMIG(t *testing.T) {
	c, file := simulate(t, newMachine(t, "t4x1"))
	pci := snapshot(t, file).GPUs[0].PCIAddress
	expect.Is(t, expect.Err(c.MIGState(t.Context(), pci)), gpu.ErrNotSupported, "state")
	expect.Is(t, c.SetMIGMode(t.Context(), pci, true), gpu.ErrNotSupported, "mode")
}
