// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	fatal "github.com/partage-dev/partage/test/must"
)

// partitioned is a machine with two H100s. On the second, MIG mode is on, with
// one partition and one GPU instance that has no compute instance.
func partitioned(t testing.TB) (*Client, *state.File, instanceIDs) {
	t.Helper()
	m := newMachine(t, "h100-80-sxmx2")
	m.GPUs[1].MIG.Current, m.GPUs[1].MIG.Pending = true, true
	c, file := simulate(t, m)
	ids := instanceIDs{pci: m.GPUs[1].PCIAddress, other: m.GPUs[0].PCIAddress, otherUUID: m.GPUs[0].UUID}
	var err error
	ids.full = fatal.Get(c.CreateInstance(t.Context(), ids.pci, oneSlice, gpu.Placement{Start: 0, Size: 1}))(t)
	ci, err := c.CreateComputeInstance(t.Context(), ids.pci, ids.full)
	fatal.Do(t, err)
	ids.compute, ids.uuid = ci.ID, ci.UUID
	ids.empty = fatal.Get(c.CreateInstance(t.Context(), ids.pci, oneSlice, gpu.Placement{Start: 1, Size: 1}))(t)
	return c, file, ids
}

const oneSlice = 19 // 1g.10gb

// impatient makes the client leave calls behind after this time, until restore is called.
// No call may be under way. It leaves behind what is merely slow as well, which any call
// can be on a machine that has much else to do.
func impatient(c *Client, limit time.Duration) (restore func()) {
	set := func(calls *call.Queues) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.calls = calls
	}
	before := c.calls
	set(call.New(limit))
	return func() { set(before) }
}

type instanceIDs struct {
	pci, other           string
	uuid, otherUUID      string // of the partition, and of the other GPU
	full, compute, empty int
}

// methods are all that talk to GPUs. Discover reports a GPU that does not
// answer in its result.
var methods = map[string]func(context.Context, *Client, instanceIDs) error{
	"Open": func(ctx context.Context, c *Client, _ instanceIDs) error { return c.Open(ctx) },
	"Discover": func(ctx context.Context, c *Client, _ instanceIDs) error {
		node, err := c.Discover(ctx)
		if err != nil {
			return err
		}
		for _, broken := range node.Broken {
			err = errors.Join(err, broken.Err)
		}
		return err
	},
	"MIGState": func(ctx context.Context, c *Client, ids instanceIDs) error {
		_, err := c.MIGState(ctx, ids.pci)
		return err
	},
	"Processes": func(ctx context.Context, c *Client, ids instanceIDs) error {
		_, err := c.Processes(ctx, ids.pci)
		return err
	},
	"SetMIGMode": func(ctx context.Context, c *Client, ids instanceIDs) error {
		return c.SetMIGMode(ctx, ids.other, true)
	},
	"CreateInstance": func(ctx context.Context, c *Client, ids instanceIDs) error {
		_, err := c.CreateInstance(ctx, ids.pci, oneSlice, gpu.Placement{Start: 2, Size: 1})
		return err
	},
	"CreateComputeInstance": func(ctx context.Context, c *Client, ids instanceIDs) error {
		_, err := c.CreateComputeInstance(ctx, ids.pci, ids.empty)
		return err
	},
	"DestroyComputeInstance": func(ctx context.Context, c *Client, ids instanceIDs) error {
		return c.DestroyComputeInstance(ctx, ids.pci, ids.full, ids.compute)
	},
	"ComputeMode": func(ctx context.Context, c *Client, ids instanceIDs) error {
		_, err := c.ComputeMode(ctx, ids.pci, ids.uuid)
		return err
	},
	"SetComputeMode": func(ctx context.Context, c *Client, ids instanceIDs) error {
		return c.SetComputeMode(ctx, ids.pci, ids.uuid, gpu.ComputeProhibited)
	},
	"SetComputeMode of a whole GPU": func(ctx context.Context, c *Client, ids instanceIDs) error {
		return c.SetComputeMode(ctx, ids.other, ids.otherUUID, gpu.ComputeExclusiveProcess)
	},
	"DestroyInstance": func(ctx context.Context, c *Client, ids instanceIDs) error {
		return c.DestroyInstance(ctx, ids.pci, ids.empty)
	},
}

// Whichever of its calls hangs, a method returns when its caller's time is up.
// The calls are those that it makes when nothing is wrong.
func TestSimulatedCallsThatHang(t *testing.T) {
	cases := 0
	for name, method := range methods {
		c, file, ids := partitioned(t)
		saved := snapshot(t, file)
		made := callsOf(t, c, file, ids, method)
		if name == "Open" {
			made = append(made, "nvmlInitWithFlags") // when it is the first
		}
		for _, call := range made {
			cases++
			t.Run(name+"/"+call, func(t *testing.T) {
				// If another call was too slow for the first limit, the next one leaves it more time.
				for limit := 200 * time.Millisecond; ; limit *= 5 {
					update(t, file, func(m *machine.Machine) { *m = *saved })
					if hangAndReturn(t, c, file, call, limit, func(ctx context.Context) error { return method(ctx, c, ids) }) {
						break
					}
					if limit > patience {
						t.Fatal("other calls hang")
					}
				}
			})
		}
		c.Close()
	}
	t.Logf("%d calls hung", cases)
}

// A list that the library refuses to give is not an empty one: the bindings return empty elements with the refusal.
func TestSimulatedRefusedLists(t *testing.T) {
	const whole = 0
	for call, code := range map[string]nvml.Return{
		"nvmlDeviceGetGpuInstances":          nvml.ERROR_GPU_NOT_FOUND,
		"nvmlGpuInstanceGetComputeInstances": nvml.ERROR_UNKNOWN,
	} {
		t.Run(call, func(t *testing.T) {
			m := newMachine(t, "h100-80-sxmx1")
			m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true
			pci := m.GPUs[0].PCIAddress
			c, file := simulate(t, m)
			id := fatal.Get(c.CreateInstance(t.Context(), pci, whole, gpu.Placement{Start: 0, Size: 8}))(t)
			fatal.Get(c.CreateComputeInstance(t.Context(), pci, id))(t)
			want, err := c.MIGState(t.Context(), pci)
			if err != nil || len(want.Instances) != 1 {
				t.Fatalf("%+v, %v", want, err)
			}
			addFault(t, file, machine.Fault{Function: call, GPU: -1, Times: 1, Code: int(code)})
			if got, err := c.MIGState(t.Context(), pci); err == nil {
				t.Errorf("got %+v, want an error", got)
			}
			addFault(t, file, machine.Fault{Function: "nvmlGpuInstanceGetComputeInstances", GPU: -1, Times: 1, Code: int(nvml.ERROR_NOT_FOUND)})
			if got, err := c.MIGState(t.Context(), pci); err != nil || len(got.Instances) != 0 {
				t.Errorf("an instance that is destroyed meanwhile: got %+v, %v", got, err)
			}
		})
	}
}

// TestSimulatedProfileOverlooked: a profile that the library says once that it does not support hides no instance, neither then
// nor later.
func TestSimulatedProfileOverlooked(t *testing.T) {
	const slice = 19
	for _, call := range []string{"nvmlDeviceGetGpuInstanceProfileInfo", "nvmlGpuInstanceGetComputeInstanceProfileInfo"} {
		t.Run(call, func(t *testing.T) {
			m := newMachine(t, "h100-80-sxmx1")
			m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true
			pci := m.GPUs[0].PCIAddress
			c, file := simulate(t, m)
			id, err := c.CreateInstance(t.Context(), pci, slice, gpu.Placement{Start: 0, Size: 1})
			if err == nil {
				_, err = c.CreateComputeInstance(t.Context(), pci, id)
			}
			fatal.Do(t, err)
			c.Close() // what is known is asked for anew
			fatal.Do(t, c.Open(t.Context()))
			addFault(t, file, machine.Fault{Function: call, GPU: -1, Times: 1, Code: int(nvml.ERROR_NOT_SUPPORTED)})
			for range 2 {
				got, err := c.MIGState(t.Context(), pci)
				if err != nil || len(got.Instances) != 1 || len(got.Instances[0].Compute) != 1 {
					t.Errorf("got %+v, %v", got, err)
				}
			}
		})
	}
}

// A driver in trouble that does not tell the names of profiles any more does not give the devices other names.
func TestSimulatedLostProfileNames(t *testing.T) {
	m := newMachine(t, "h100-80-sxmx1")
	c, file := simulate(t, m)
	discover := func() *gpu.Node {
		t.Helper()
		return fatal.Get(c.Discover(t.Context()))(t)
	}
	lost := func() int {
		return addFault(t, file, machine.Fault{Function: "nvmlDeviceGetGpuInstanceProfileInfoV", GPU: -1, Code: int(nvml.ERROR_NOT_SUPPORTED)})
	}
	// One that is in trouble from the start is named when it is out of it.
	fault := lost()
	if got := discover(); len(got.GPUs) != 1 {
		t.Fatalf("without names: %+v", got.Broken)
	}
	removeFault(t, file, fault)
	want := discover()
	if len(want.GPUs) != 1 || want.GPUs[0].MIG.Profiles[0].Name != "7g.80gb" {
		t.Fatalf("with names: %+v", want)
	}
	fault = lost()
	if got := discover(); len(got.Broken) != 1 {
		t.Errorf("without names again: the profiles are %+v", got.GPUs[0].MIG.Profiles)
	}
	removeFault(t, file, fault)
	expect.Same(t, discover(), want, "with names again")
}

// callsOf are the functions of the library that the method calls when the
// client has everything still to ask.
func callsOf(t *testing.T, c *Client, file *state.File, ids instanceIDs, method func(context.Context, *Client, instanceIDs) error) []string {
	t.Helper()
	c.Close()
	fatal.Do(t, c.Open(t.Context()))
	before := calls(t, file)
	fatal.Do(t, method(t.Context(), c, ids))
	made := calls(t, file)
	maps.DeleteFunc(made, func(call string, n uint64) bool { return n == before[call] })
	return slices.Sorted(maps.Keys(made))
}

// hangAndReturn lets the call hang, and reports whether it was made. If another one took
// longer than the limit, it was not.
func hangAndReturn(t *testing.T, c *Client, file *state.File, call string, limit time.Duration, method func(context.Context) error) (made bool) {
	t.Helper()
	c.Close()
	fault := addFault(t, file, machine.Fault{Function: call, GPU: -1, Hang: true, Effect: machine.Proceed})
	defer removeFault(t, file, fault)
	restore := impatient(c, limit)
	err := c.Open(t.Context())
	if err == nil {
		err = method(t.Context())
	}
	hung := c.calls.Pending("nvml")
	made = struck(t, file, fault)
	// A discovery does without the NVLinks.
	optional := strings.HasPrefix(call, "nvmlDeviceGetNvLink") || call == "nvmlDeviceGetGpuFabricInfoV"
	switch {
	case made && (hung == nil || !gpu.IsPending(err) && (err != nil || !optional)):
		t.Fatalf("returned %v, out is %v", err, hung)
	case !made && hung == nil && !gpu.IsPending(err):
		t.Fatalf("the call was not made: %v", err)
	}
	removeFault(t, file, fault)
	for ; hung != nil; hung = c.calls.Pending("nvml") {
		<-hung.Done
	}
	restore()
	fatal.Do(t, c.Open(t.Context()), "afterwards")
	node, err := c.Discover(t.Context())
	if err != nil || len(node.Broken) != 0 {
		t.Errorf("afterwards: %+v, %v", node.Broken, err)
	}
	return made
}

// What was left behind takes effect when it returns, and not before.
func TestSimulatedCreationLeftBehind(t *testing.T) {
	c, file, ids := partitioned(t)
	fault := addFault(t, file, machine.Fault{
		Function: "nvmlDeviceCreateGpuInstanceWithPlacement", GPU: 1, Hang: true, Effect: machine.Proceed,
	})
	restore := impatient(c, 2*time.Second)
	result := make(chan error, 1)
	go func() { result <- methods["CreateInstance"](t.Context(), c, ids) }()
	waitUntilStruck(t, file, fault, result)
	var hung *gpu.PendingError
	if err := <-result; !errors.As(err, &hung) || hung.PCIAddress != ids.pci {
		t.Fatalf("got %v", err)
	}
	restore()
	expect.Len(t, snapshot(t, file).GPUs[1].MIG.Instances, 2, "instances while the call is out")
	expect.Do(t, expect.Err(c.MIGState(t.Context(), ids.other)), "other GPU")
	removeFault(t, file, fault)
	<-hung.Done
	if got, err := c.MIGState(t.Context(), ids.pci); err != nil || len(got.Instances) != 3 {
		t.Errorf("afterwards: %+v, %v", got, err)
	}
}

func TestSimulatedDiscoveryWithHungGPUs(t *testing.T) {
	m := newMachine(t, "dgx-h100")
	hung := []int{1, 4, 5}
	for _, i := range hung {
		state.AddFault(m, machine.Fault{Function: "*", GPU: i, Hang: true, Effect: machine.Proceed})
	}
	c, file := simulateClosed(t, m, Options{Calls: call.New(2 * time.Second)})
	fatal.Do(t, c.Open(t.Context()))
	for range 2 {
		node, err := c.Discover(t.Context())
		if err != nil || len(node.GPUs) != len(m.GPUs)-len(hung) {
			t.Fatalf("%+v, %v", node, err)
		}
		for _, broken := range node.Broken {
			if !slices.Contains(hung, broken.Index) || !gpu.IsPending(broken.Err) {
				t.Errorf("broken: %+v", broken)
			}
		}
	}
	update(t, file, func(m *machine.Machine) { m.Faults = nil })
	for out := c.calls.Pending("nvml"); out != nil; out = c.calls.Pending("nvml") {
		<-out.Done
	}
	if node, err := c.Discover(t.Context()); err != nil || len(node.GPUs) != len(m.GPUs) {
		t.Errorf("afterwards: %+v, %v", node, err)
	}
}

// A GPU that needs a person says so to whoever looks at it, with MIG or not.
func TestSimulatedFailedGPU(t *testing.T) {
	codes := map[nvml.Return]error{
		nvml.ERROR_GPU_IS_LOST: gpu.ErrLost, nvml.ERROR_RESET_REQUIRED: gpu.ErrResetRequired,
	}
	for _, board := range []string{"h100-80-sxmx2", "t4x2"} {
		for code, want := range codes {
			t.Run(fmt.Sprintf("%s/%d", board, code), func(t *testing.T) {
				m := newMachine(t, board)
				pci := m.GPUs[1].PCIAddress
				c, file := simulate(t, m)
				look := func() error {
					_, err := c.MIGState(t.Context(), pci)
					return err
				}
				well := look()
				update(t, file, func(m *machine.Machine) { m.GPUs[1].Failure = int(code) })
				for range 2 {
					expect.Is(t, look(), want)
				}
				node, err := c.Discover(t.Context())
				if err != nil || len(node.GPUs) != 1 || len(node.Broken) != 1 || !errors.Is(node.Broken[0].Err, want) {
					t.Errorf("discovery: %+v, %v", node, err)
				}
				update(t, file, func(m *machine.Machine) { m.GPUs[1].Failure = 0 })
				if err := look(); fmt.Sprint(err) != fmt.Sprint(well) {
					t.Errorf("well again: %v, at first %v", err, well)
				}
			})
		}
	}
}

// The driver is unloaded under the session and comes back.
func TestSimulatedDriverReload(t *testing.T) {
	c, file := simulate(t, newMachine(t, "h100-80-sxmx2"))
	node := fatal.Get(c.Discover(t.Context()))(t)
	control := filepath.Join(c.roots.Driver, "dev", "nvidiactl")
	fatal.Do(t, os.Rename(control, control+"-away"))
	gone := addFault(t, file, machine.Fault{Function: "nvmlDeviceGetCount_v2", GPU: -1, Code: int(nvml.ERROR_DRIVER_NOT_LOADED)})
	for range 2 {
		if err := c.Open(t.Context()); !errors.Is(err, gpu.ErrDriverNotLoaded) {
			t.Fatalf("without a driver: %v", err)
		}
	}
	if _, err := c.MIGState(t.Context(), node.GPUs[0].PCIAddress); !errors.Is(err, gpu.ErrDriverNotLoaded) {
		t.Errorf("a call without a driver: %v", err)
	}
	fatal.Do(t, os.Rename(control+"-away", control))
	removeFault(t, file, gone)
	fatal.Do(t, c.Open(t.Context()))
	expect.Same(t, fatal.Get(c.Discover(t.Context()))(t), node, "after the reload")
	shutdowns, inits := calls(t, file)["nvmlShutdown"], calls(t, file)["nvmlInitWithFlags"]
	if shutdowns != 1 || inits != 4 { // two of them failed
		t.Errorf("%d shutdowns and %d initialisations, want 1 and 4", shutdowns, inits)
	}
}

func calls(t testing.TB, file *state.File) map[string]uint64 {
	t.Helper()
	return fatal.Get(file.Calls())(t)
}

func update(t testing.TB, file *state.File, change func(*machine.Machine)) {
	t.Helper()
	fatal.Do(t, file.Update(func(m *machine.Machine) error { change(m); return nil }))
}

func addFault(t testing.TB, file *state.File, f machine.Fault) (id int) {
	t.Helper()
	update(t, file, func(m *machine.Machine) { id = state.AddFault(m, f) })
	return id
}

func removeFault(t testing.TB, file *state.File, id int) {
	t.Helper()
	update(t, file, func(m *machine.Machine) { state.RemoveFault(m, id) })
}

// waitUntilStruck returns when a call has run into the fault, and fails when
// the method returns without.
func waitUntilStruck(t testing.TB, file *state.File, id int, result <-chan error) {
	t.Helper()
	for {
		if struck(t, file, id) {
			return
		}
		select {
		case err := <-result:
			t.Fatalf("the call was not made: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
}

// struck reports whether a call has run into the fault.
func struck(t testing.TB, file *state.File, id int) bool {
	t.Helper()
	return slices.ContainsFunc(snapshot(t, file).Faults, func(f machine.Fault) bool { return f.ID == id && f.Struck > 0 })
}
