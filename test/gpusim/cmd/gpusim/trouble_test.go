// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/libtest"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// withLibrary makes a machine whose library is the real one, which the commands find, and returns its root.
func withLibrary(t *testing.T, machineName string) (root string) {
	t.Helper()
	library := must.Get(libtest.Build(t.Context(), t.TempDir()))(t)
	dir := assets(t)
	name := filepath.Join(dir, "lib/libnvidia-ml.so")
	must.Do(t, os.Remove(name))
	must.Do(t, os.Symlink(library, name))
	root = t.TempDir()
	t.Setenv("GPUSIM_ROOT", root)
	mustRun(t, "new", "--machine", machineName, "--assets", dir)
	return root
}

func load(t *testing.T, root string) *machine.Machine {
	t.Helper()
	return must.Get(sysroot.Load(root))(t)
}

func TestFaults(t *testing.T) {
	root := withLibrary(t, "mixed")
	expect.Equal(t, mustRun(t, "fault", "list"), "", "without faults")
	if out := mustRun(t, "fault", "list", "-o", "json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("without faults: %q", out)
	}
	for i, args := range []string{
		"--function nvmlGpuInstanceDestroy --gpu 1 --skip 1 --times 2 --code in_use",
		"--function * --probability 0.25 --effect fail-after --code 999 --delay 1500ms",
		"--function nvmlDeviceSetMigMode --hang --all-gpus",
		"--function nvmlDeviceCreateGpuInstanceWithPlacement --effect kill-after --times 1",
		"--function nvmlComputeInstanceDestroy --effect pretend --delay 10ms --probability 1",
	} {
		id := mustRun(t, append([]string{"fault", "add"}, strings.Fields(args)...)...)
		expect.Equal(t, id, string(rune('1'+i))+"\n", "fault add", args, "ID")
	}
	want := []machine.Fault{
		{ID: 1, Function: "nvmlGpuInstanceDestroy", GPU: 1, Skip: 1, Times: 2, Code: 19},
		{ID: 2, Function: "*", GPU: -1, Probability: 0.25, Effect: machine.FailAfter, Code: 999, Delay: 1500 * time.Millisecond},
		{ID: 3, Function: "nvmlDeviceSetMigMode", GPU: -1, Hang: true, AllGPUs: true, Effect: machine.Proceed},
		{ID: 4, Function: "nvmlDeviceCreateGpuInstanceWithPlacement", GPU: -1, Times: 1, Effect: machine.KillAfter},
		{ID: 5, Function: "nvmlComputeInstanceDestroy", GPU: -1, Probability: 1, Effect: machine.Pretend, Delay: 10 * time.Millisecond},
	}
	expect.Same(t, load(t, root).Faults, want)
	golden(t, "faults.txt", mustRun(t, "fault", "list"))
	golden(t, "faults.yaml", mustRun(t, "fault", "list", "-o", "yaml"))
	expect.Equal(t, mustRun(t, "fault", "held"), "FAULT  FUNCTION  GPUS  PID\n", "nothing is held")

	mustRun(t, "fault", "rm", "2")
	mustRun(t, "fault", "rm", "4", root)
	expect.Same(t, load(t, root).Faults, []machine.Fault{want[0], want[2], want[4]}, "after removing 2 and 4")
	mustRun(t, "fault", "rm", "--all")
	expect.Len(t, load(t, root).Faults, 0, "faults are left")
}

func TestFaultRefusals(t *testing.T) {
	root := withLibrary(t, "l4x2")
	mustRun(t, "fault", "add", "--function", "*", "--code", "19", root)
	refuses(t, "fault", map[string]string{
		"add --code 19":                                              `"function" not set`,
		"add --function nvmlFly --code 19":                           `--function "nvmlFly" is not a function of libnvidia-ml.so, such as nvml`,
		"add --function gpuinstancedestroy --code 19":                "is it nvmlGpuInstanceDestroy",
		"add --function * --code COLD":                               `--code "COLD" is not an NVML error such as GPU_IS_LOST`,
		"add --function * --code 0":                                  `--code "0" is not`,
		"add --function * --code SUCCESS":                            `--code "SUCCESS" is not`,
		"add --function * --code 1000":                               `--code "1000" is not`,
		"add --function *":                                           "say what happens by --code, --effect, --delay or --hang",
		"add --function * --effect proceed":                          "would do nothing",
		"add --function * --effect explode":                          `--effect "explode" is not one of fail, fail-after`,
		"add --function * --effect fail":                             "--effect fail needs --code, an NVML error",
		"add --function * --effect pretend --code 19":                `--code "19" goes with --effect fail or fail-after, not with pretend`,
		"add --function * --hang --gpu 2":                            `--gpu "2" is not the index of a GPU, which are 0 to 1`,
		"add --function * --hang --gpu all":                          `--gpu "all" is not the index`,
		"add --function * --hang --skip many":                        `--skip "many" is not a number from 0 on`,
		"add --function * --hang --times=-1":                         `--times "-1" is not a number from 0 on`,
		"add --function * --hang --times 5000000000":                 `--times "5000000000" is not a number`,
		"add --function * --hang --probability 1.5":                  `--probability "1.5" is not a number above 0 and up to 1`,
		"add --function * --hang --probability NaN":                  `--probability "NaN" is not`,
		"add --function * --delay 3":                                 `--delay "3" is not a duration such as 250ms`,
		"add --function * --delay=-3s":                               `--delay "-3s" is not`,
		"add --function * --hang --delay 3 --skip x --probability 0": `--skip "x" is not`,
		"rm":                 "say which fault by its ID, or --all",
		"rm first":           `"first" is not the ID of a fault`,
		"rm 0":               `"0" is not the ID of a fault`,
		"rm 7":               "there is no fault 7, the machine has [1]",
		"let-go":             "say which fault by its ID",
		"let-go all":         `"all" is not the ID of a fault`,
		"let-go 1 --calls 0": `--calls "0" is not a number from 1 on`,
		"let-go 1":           "fault 1 holds 0 calls, not 1",
		"list -o xml":        "none of table, json, yaml",
		"rm --all a b c":     "one root at a time",
	})
	expect.Len(t, load(t, root).Faults, 1, "what was refused left faults")
}

func TestCodes(t *testing.T) {
	for text, want := range map[string]int{
		"IN_USE": 19, "in_use": 19, "in-use": 19, "NVML_ERROR_IN_USE": 19, "ERROR_IN_USE": 19, "19": 19,
		"GPU_IS_LOST": 15, "RESET_REQUIRED": 16, "UNKNOWN": 999, "NO_PERMISSION": 4, "INSUFFICIENT_RESOURCES": 23,
		"LIB_RM_VERSION_MISMATCH": 18, "TIMEOUT": 10, "500": 500,
	} {
		if got, ok := parseCode(text); !ok || got != want {
			t.Errorf("%s is %d (%v), want %d", text, got, ok, want)
		}
	}
	for code, want := range map[int]string{19: "IN_USE", 15: "GPU_IS_LOST", 999: "UNKNOWN", 500: "500"} {
		expect.Equal(t, codeName(code), want, code)
	}
}

func TestLatency(t *testing.T) {
	root := newNode(t, "l4x2")
	mustRun(t, "latency", "hopper", "--scale", "0.5", root)
	hopper := load(t, root).Latencies
	if len(hopper) == 0 || hopper[0] != (machine.Latency{Function: "nvmlInit_v2", Base: 5 * time.Millisecond}) {
		t.Errorf("half of hopper: %+v", hopper)
	}
	mustRun(t, "latency", "--root", root, "dense")
	if len(load(t, root).Latencies) <= len(hopper) {
		t.Error("dense is no more than hopper")
	}
	mustRun(t, "latency", "zero", root)
	expect.Len(t, load(t, root).Latencies, 0, "latencies are left")
	refuses(t, "latency", map[string]string{
		"":                   "say which profile: zero, hopper, ampere, dense",
		"warp":               `unknown latency profile "warp" (known: zero, hopper`,
		"hopper --scale 0":   "latency scale 0 is not above 0",
		"hopper --scale big": `--scale "big" is not a number, such as 0.1`,
	})
}

func TestFailure(t *testing.T) {
	root := newNode(t, "l4x4")
	for i, failure := range []string{"lost", "reset-required", "unknown", "none"} {
		mustRun(t, "gpu", "--gpu", string(rune('0'+i)), "--failure", failure, root)
	}
	failures := func() (out []int) {
		for _, g := range load(t, root).GPUs {
			out = append(out, g.Failure)
		}
		return out
	}
	expect.Same(t, failures(), []int{15, 16, 999, 0})
	mustRun(t, "reboot", root)
	expect.Same(t, failures(), []int{0, 0, 999, 0}, "after a reboot")
	mustRun(t, "gpu", "--gpu", "2", "--failure", "none", root)
	expect.Same(t, failures(), []int{0, 0, 0, 0}, "after making it well")
	refuses(t, "gpu", map[string]string{
		"--gpu 4 --failure lost":   `--gpu "4" is not the index of a GPU, which are 0 to 3`,
		"--gpu 0 --failure broken": `--failure "broken" is not one of lost, reset-required, none, or an NVML error`,
		"--gpu 0":                  "say what becomes of the GPU",
	})
}

// show adds what goes wrong to what it shows anyway.
func TestShowTrouble(t *testing.T) {
	root := newNode(t, "l4x2")
	change(t, root, func(m *machine.Machine) {
		m.GPUs[1].Failure = 15
		m.GPUs[0].Health = machine.Health{
			VolatileECC: machine.ECCErrors{Corrected: 3, Uncorrected: 1}, RecoveryAction: 1, ClocksReasons: 0x48, Temperature: 92,
			RemappedRows: machine.RemappedRows{Uncorrected: 1, Pending: true, Failed: true}, ChannelRepair: true, Unrepairable: true,
			Fabric: machine.Fabric{State: 3, Mask: 1},
		}
		m.GPUs[0].NoEvents = true
		m.Processes = []machine.Process{{PID: 7, Name: "python3", InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30, SM: 40}}
		m.Faults = []machine.Fault{{ID: 4, Function: "nvmlInit_v2", GPU: -1, Code: 10}}
		m.Latencies = []machine.Latency{
			{Function: "nvmlInit_v2", Base: 10 * time.Millisecond},
			{Function: "nvmlGpuInstanceDestroy", Base: time.Second, PerInstance: 20 * time.Millisecond, Exclusive: true},
		}
	})
	golden(t, "show-trouble.txt", mustRun(t, "show", root))
	golden(t, "show-trouble.yaml", mustRun(t, "show", "-o", "yaml", root))
	var s shown
	must.Do(t, json.Unmarshal([]byte(mustRun(t, "show", "-o", "json", root)), &s))
	if s.GPUs[1].Failure != "GPU_IS_LOST" || s.Faults[0].Code != "TIMEOUT" || !s.Latencies[1].Exclusive {
		t.Errorf("%+v", s)
	}
}

func TestRenumber(t *testing.T) {
	root := newNode(t, "l4x2")
	minors := func() []int { m := load(t, root); return []int{m.GPUs[0].Minor, m.GPUs[1].Minor} }
	before := minors()
	mustRun(t, "reboot", root)
	expect.Same(t, minors(), before, "a plain reboot renumbers")
	mustRun(t, "reboot", "--renumber", root)
	expect.Same(t, minors(), []int{before[1], before[0]})
}
