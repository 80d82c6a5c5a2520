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

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// header is the text of nvml.h.
func header(t *testing.T) string {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "pkg/nvml/nvml.h"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// driverOpen is the one latency that is not of a function: state.DriverOpen.
const driverOpen = "driver_open"

// Every latency is of a function that exists, is positive and says how well it
// is known.
func TestLatencyProfiles(t *testing.T) {
	list, err := latencyProfiles()
	if err != nil {
		t.Fatal(err)
	}
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
	if d := cmp.Diff([]string{"zero", "hopper", "ampere", "dense"}, names); d != "" {
		t.Error(d)
	}
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
	list, err := Latencies(profile, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range list {
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
	hopper, err := Latencies("hopper", 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range hopper {
		for _, n := range []int{0, 7} {
			if dense := total(t, "dense", l.Function, n); dense < total(t, "hopper", l.Function, n) {
				t.Errorf("%s takes only %v with %d instances", l.Function, dense, n)
			}
		}
	}
}

func TestLatencies(t *testing.T) {
	none, err := Latencies("zero", 1)
	if err != nil || len(none) != 0 {
		t.Errorf("zero: %v, %v", none, err)
	}
	once, err := Latencies("dense", 1)
	if err != nil {
		t.Fatal(err)
	}
	half, err := Latencies("dense", 0.5)
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Clone(once)
	for i := range want {
		want[i].Base /= 2
		want[i].PerInstance /= 2
	}
	if d := cmp.Diff(want, half); d != "" {
		t.Errorf("half of it: %s", d)
	}
	destroy := machine.Latency{Function: "nvmlGpuInstanceDestroy", Base: time.Second, PerInstance: 20 * time.Millisecond, Exclusive: true}
	if !slices.Contains(once, destroy) {
		t.Errorf("no %+v in %+v", destroy, once)
	}
	for _, scale := range []float64{0, -1, 1001, math.NaN(), math.Inf(1)} {
		if _, err := Latencies("hopper", scale); err == nil || !strings.Contains(err.Error(), "above 0") {
			t.Errorf("scale %v: got error %v", scale, err)
		}
	}
	if _, err := Latencies("warp", 1); err == nil || !strings.Contains(err.Error(), "zero, hopper, ampere, dense") {
		t.Errorf("got error %v", err)
	}
}
