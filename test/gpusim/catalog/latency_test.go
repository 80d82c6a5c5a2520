// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// header is the text of nvml.h.
func header(t *testing.T) string {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	must.Do(t, err)
	text := must.Get(os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "pkg/nvml/nvml.h")))(t)
	return string(text)
}

// driverOpen is the one latency that is not of a function: state.DriverOpen.
const driverOpen = "driver_open"

// Every latency is of a function that exists, is positive and says how well it
// is known.
func TestLatencyProfiles(t *testing.T) {
	list := must.Get(latencyProfiles())(t)
	var names []string
	nvml := header(t)
	for _, p := range list {
		names = append(names, p.Name)
		if p.Description == "" {
			t.Errorf("%s has no description", p.Name)
		}
		seen := map[string]bool{}
		for _, c := range p.Calls {
			if c.Function != driverOpen && c.Function != "mps_server_start" && !regexp.MustCompile(`DECLDIR\s+`+regexp.QuoteMeta(c.Function)+`\s*\(`).MatchString(nvml) {
				t.Errorf("%s: nvml.h declares no function %q", p.Name, c.Function)
			}
			if seen[c.Function] {
				t.Errorf("%s: %s is listed twice", p.Name, c.Function)
			}
			seen[c.Function] = true
			if c.Base.Duration <= 0 || c.PerInstance.Duration < 0 {
				t.Errorf("%s: %s takes %v and %v for each instance", p.Name, c.Function, c.Base.Duration, c.PerInstance.Duration)
			}
			checkTags(t, p.Name+": "+c.Function, c)
		}
	}
	expect.Same(t, names, []string{"zero", "hopper", "ampere", "dense"})
	described, err := LatencyProfiles()
	if err != nil || len(described) != len(list) {
		t.Errorf("%v, %v", described, err)
	}
}

func checkTags(t *testing.T, what string, c callLatency) {
	t.Helper()
	for key, s := range c.Except {
		if !slices.Contains(keys(c), key) || s == c.Source {
			t.Errorf("%s: except says %s of %q", what, s, key)
		}
	}
	for _, key := range keys(c) {
		if s := c.Of(key); s != Measured && s != Documented && s != Assumed {
			t.Errorf("%s: %s has the source %q", what, key, s)
		}
	}
}

// total is how long calls of a function take on a GPU with that many instances.
func total(t *testing.T, profile, function string, instances int) time.Duration {
	t.Helper()
	for _, l := range must.Get(Latencies(profile, 1))(t) {
		if l.Function == function {
			return l.Base + time.Duration(instances)*l.PerInstance
		}
	}
	return 0
}

// The dense model adds up to the one observation that it is made from, and is
// nowhere faster than the model that it extends.
func TestDense(t *testing.T) {
	walk := 56 * total(t, "dense", "nvmlDeviceGetMigDeviceHandleByIndex", 7)
	if off := math.Abs(walk.Seconds()/5.4 - 1); off > 0.02 {
		t.Errorf("walking over 56 MIG devices takes %v, not about 5.4 s", walk)
	}
	hopper := must.Get(Latencies("hopper", 1))(t)
	for _, l := range hopper {
		for _, n := range []int{0, 7} {
			if dense := total(t, "dense", l.Function, n); dense < total(t, "hopper", l.Function, n) {
				t.Errorf("%s takes only %v with %d instances", l.Function, dense, n)
			}
		}
	}
}

func TestLatencies(t *testing.T) {
	expect.Len(t, must.Get(Latencies("zero", 1))(t), 0, "zero")
	once := must.Get(Latencies("dense", 1))(t)
	half := must.Get(Latencies("dense", 0.5))(t)
	want := slices.Clone(once)
	for i := range want {
		want[i].Base /= 2
		want[i].PerInstance /= 2
	}
	expect.Same(t, half, want, "half of it")
	destroy := machine.Latency{Function: "nvmlGpuInstanceDestroy", Base: time.Second, PerInstance: 20 * time.Millisecond, Exclusive: true}
	if !slices.Contains(once, destroy) {
		t.Errorf("no %+v in %+v", destroy, once)
	}
	for _, scale := range []float64{0, -1, 1001, math.NaN(), math.Inf(1)} {
		expect.Says(t, expect.Err(Latencies("hopper", scale)), "above 0", "scale", scale)
	}
	expect.Says(t, expect.Err(Latencies("warp", 1)), "zero, hopper, ampere, dense")
}
