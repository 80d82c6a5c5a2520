// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// divided is a machine of H100s in MIG mode.
func divided(count int) *machine.Machine {
	m := machineOf()
	for i := range count {
		g := h100(i)
		g.MIG.Current, g.MIG.Pending = true, true
		m.GPUs = append(m.GPUs, g)
	}
	return m
}

// strike adds a fault and returns its ID.
func (r *root) strike(f machine.Fault) int {
	r.t.Helper()
	var id int
	r.update(func(m *machine.Machine) { id = state.AddFault(m, f) })
	return id
}

func (r *root) relent(id int) {
	r.t.Helper()
	r.update(func(m *machine.Machine) {
		if !state.RemoveFault(m, id) {
			r.t.Errorf("there is no fault %d", id)
		}
	})
}

// counts is "seen/struck" of all faults in order.
func (r *root) counts() string {
	r.t.Helper()
	var out []string
	for _, f := range r.machine().Faults {
		out = append(out, fmt.Sprintf("%d/%d", f.Seen, f.Struck))
	}
	return strings.Join(out, " ")
}

func (r *root) wantCounts(want string) {
	r.t.Helper()
	expect.Equal(r.t, r.counts(), want, "calls seen and struck")
}

// until waits for something that will happen.
func until(t testing.TB, what string, happened func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !happened(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s does not happen", what)
		}
	}
}

// TestEffects strikes a call that creates an instance, with a latency on top:
// it must not turn up where the call does not happen.
func TestEffects(t *testing.T) {
	for name, c := range map[string]struct {
		fault     machine.Fault
		want      nvml.Return
		instances int
	}{
		"fail":       {machine.Fault{Effect: machine.Fail, Code: int(nvml.ERROR_IN_USE)}, nvml.ERROR_IN_USE, 0},
		"fail after": {machine.Fault{Effect: machine.FailAfter, Code: int(nvml.ERROR_UNKNOWN)}, nvml.ERROR_UNKNOWN, 1},
		"pretend":    {machine.Fault{Effect: machine.Pretend}, nvml.SUCCESS, 0},
		"proceed":    {machine.Fault{Effect: machine.Proceed}, nvml.SUCCESS, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t, divided(1))
			d := device(t, r.open(), 0)
			info := profileInfo(t, d, id1g)
			c.fault.Function, c.fault.Delay = "nvmlDeviceCreateGpuInstance", time.Millisecond
			r.strike(c.fault)
			started := time.Now()
			wants(t, "CreateGpuInstance", code(d.CreateGpuInstance(info)), c.want)
			if passed := time.Since(started); passed < c.fault.Delay {
				t.Errorf("the call took %v, less than its delay", passed)
			}
			expect.Equal(t, len(r.machine().GPUs[0].MIG.Instances), c.instances, "instances")
			r.wantCounts("1/1")
		})
	}
}

func TestPretendLeavesResults(t *testing.T) {
	r, d := oneH100(t)
	r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", Effect: machine.Pretend})
	uuid, ret := d.GetUUID()
	if uuid != "" || ret != nvml.SUCCESS {
		t.Errorf("UUID %q, %v", uuid, ret)
	}
}

// createOne is a helper: it creates one GPU instance.
func createOne(lib nvml.Interface) error {
	d, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		return ret
	}
	info, ret := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
	if ret != nvml.SUCCESS {
		return ret
	}
	if _, ret = d.CreateGpuInstance(&info); ret != nvml.SUCCESS {
		return ret
	}
	return nil
}

func TestKill(t *testing.T) {
	for name, c := range map[string]struct {
		effect    machine.Effect
		instances int
	}{
		"before": {machine.KillBefore, 0},
		"after":  {machine.KillAfter, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t, divided(1))
			r.strike(machine.Fault{Function: "nvmlDeviceCreateGpuInstance", Effect: c.effect, Times: 1})
			cmd := helper(t, "create", library, "GPUSIM_STATE="+r.state())
			err := cmd.Run()
			if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
				t.Errorf("the process ended with %v, want SIGKILL", err)
			}
			m := r.machine()
			expect.Equal(t, len(m.GPUs[0].MIG.Instances), c.instances, "instances")
			expect.Same(t, r.capabilities(), capabilitiesOf(m), "capability files")
			r.wantCounts("1/1")
			// Once only: the next process lives.
			expect.Do(t, helper(t, "create", library, "GPUSIM_STATE="+r.state()).Run(), "the process after it")
		})
	}
}

// pattern calls GetUUID n times: "." for SUCCESS, else the code.
func pattern(d nvml.Device, n int) string {
	var b strings.Builder
	for range n {
		if _, ret := d.GetUUID(); ret == nvml.SUCCESS {
			b.WriteString(".")
		} else {
			fmt.Fprint(&b, int(ret))
		}
	}
	return b.String()
}

func TestSkipAndTimes(t *testing.T) {
	r, d := oneH100(t)
	const function = "nvmlDeviceGetUUID"
	for _, c := range []struct {
		faults []machine.Fault
		want   string
		counts string
	}{
		{[]machine.Fault{{Code: 3}}, "33333333", "8/8"},
		{[]machine.Fault{{Code: 3, Skip: 2}}, "..333333", "8/6"},
		{[]machine.Fault{{Code: 3, Times: 3}}, "333.....", "8/3"},
		{[]machine.Fault{{Code: 3, Skip: 2, Times: 3}}, "..333...", "8/3"},
		// The first that strikes decides, but all count the call.
		{[]machine.Fault{{Code: 3, Skip: 1, Times: 2}, {Code: 6, Skip: 2, Times: 3}}, ".3366...", "8/2 8/2"},
		{[]machine.Fault{{Code: 3, Probability: 1e-300}, {Code: 6, Times: 4}}, "6666....", "8/0 8/4"},
	} {
		r.update(func(m *machine.Machine) {
			m.Faults = nil
			for _, f := range c.faults {
				f.Function = function
				state.AddFault(m, f)
			}
		})
		expect.Equal(t, pattern(d, 8), c.want, c.faults)
		r.wantCounts(c.counts)
		r.update(func(m *machine.Machine) { m.Faults = nil })
	}
	expect.Equal(t, pattern(d, 8), "........", "without faults")
}

// TestCountsSurviveUpdates: another update leaves them alone, a new fault has
// none.
func TestCountsSurviveUpdates(t *testing.T) {
	r, d := oneH100(t)
	fault := machine.Fault{Function: "*", Code: 3, Skip: 3}
	id := r.strike(fault)
	pattern(d, 2)
	r.update(func(m *machine.Machine) {
		m.BootID, m.Faults[0].Code, m.Faults[0].Seen = "another", 4, 77
	})
	expect.Equal(t, pattern(d, 2), ".4", "after the update")
	r.wantCounts("4/1")
	r.relent(id)
	r.strike(fault)
	r.wantCounts("0/0")
	expect.Equal(t, pattern(d, 4), "...3", "with a new fault")
}

// TestCountsStartAtZero for more faults than the file has places for counts.
func TestCountsStartAtZero(t *testing.T) {
	r, d := oneH100(t)
	stays := r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", Effect: machine.Proceed})
	for round := range 300 {
		id := r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", Effect: machine.Proceed})
		if got, want := r.counts(), fmt.Sprintf("%d/%[1]d 0/0", round); got != want {
			t.Fatalf("calls seen and struck at the start of fault %d: %s, want %s", round, got, want)
		}
		pattern(d, 1)
		r.relent(id)
	}
	r.relent(stays)
}

func TestProbability(t *testing.T) {
	r, d := oneH100(t)
	r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", Code: 3, Probability: 0.25})
	const calls = 4000
	struck := strings.Count(pattern(d, calls), "3")
	r.wantCounts(fmt.Sprintf("%d/%d", calls, struck))
	// Ten standard deviations around the expectation of 1000.
	if struck < 726 || struck > 1274 {
		t.Errorf("%d of %d calls struck with probability 1/4", struck, calls)
	}
}

// uuids is a helper: it makes some hundred calls and prints how many failed.
func uuids(lib nvml.Interface) error {
	n, err := strconv.Atoi(os.Getenv("LIBTEST_CALLS"))
	if err != nil {
		return err
	}
	d, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		return ret
	}
	_, err = fmt.Println(strings.Count(pattern(d, n), "3"))
	return err
}

// failures runs the helper uuids to its end.
func failures(t *testing.T, cmd *exec.Cmd, calls int) int {
	t.Helper()
	cmd.Env = append(cmd.Env, fmt.Sprint("LIBTEST_CALLS=", calls))
	out, err := cmd.Output()
	if err != nil {
		t.Error(err)
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(out)))
	expect.Do(t, err)
	return n
}

// TestExactCounts: threads and processes together are struck exactly as often
// as the fault says.
func TestExactCounts(t *testing.T) {
	r, d := oneH100(t)
	// So many that the processes are at it together.
	const processes, threads, calls, times = 3, 2, 100_000, 137
	r.strike(machine.Fault{Function: "nvmlDeviceGetUUID", Code: 3, Skip: 2 * calls, Times: times})
	var failed atomic.Int64
	var wg sync.WaitGroup
	for range processes {
		cmd := helper(t, "uuids", library, "GPUSIM_STATE="+r.state())
		wg.Go(func() { failed.Add(int64(failures(t, cmd, calls))) })
	}
	for range threads {
		wg.Go(func() { failed.Add(int64(strings.Count(pattern(d, calls), "3"))) })
	}
	wg.Wait()
	const total = (processes + threads) * calls
	expect.Equal(t, failed.Load(), times, "calls failed")
	r.wantCounts(fmt.Sprintf("%d/%d", total, times))
	counted := must.Get(r.file().Calls())(t)
	expect.Equal(t, counted["nvmlDeviceGetUUID"], total, "calls counted")
	if counted["nvmlInit_v2"] < processes+1 || counted["nvmlDeviceGetName"] != 0 {
		t.Errorf("calls %v", counted)
	}
}

// TestReadOnlyProcess: who may not write the state is struck by the number of
// calls that others have counted, and adds none.
func TestReadOnlyProcess(t *testing.T) {
	r, d := oneH100(t)
	lib := container(t, r, "nvidiactl", "nvidia0")
	const function = "nvmlDeviceGetUUID"
	r.strike(machine.Fault{Function: function, Code: 3, Times: 1})
	readOnly := func() int { return failures(t, asUser(t, helper(t, "uuids", lib, "GPUSIM_STATE="), lib), 5) }
	expect.Equal(t, readOnly(), 5, "of 5 calls failed before the first that counts")
	r.wantCounts("0/0")
	expect.Equal(t, pattern(d, 2), "3.", "calls that count")
	expect.Equal(t, readOnly(), 0, "of 5 calls failed when the fault was over")
	r.wantCounts("2/1")
	r.update(func(m *machine.Machine) { m.Faults[0].Times, m.GPUs[0].Failure = 0, int(nvml.ERROR_UNINITIALIZED) })
	expect.Equal(t, readOnly(), 5, "of 5 calls failed with a fault without limit")
}
