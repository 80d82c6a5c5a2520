// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// allocatorLog remembers why the allocator skipped devices.
type allocatorLog struct {
	skipped   map[string]map[string]bool
	allocated map[string]bool
}

func newAllocatorLog() *allocatorLog {
	return &allocatorLog{skipped: map[string]map[string]bool{}, allocated: map[string]bool{}}
}

func (l *allocatorLog) Init(logr.RuntimeInfo)          {}
func (l *allocatorLog) Enabled(level int) bool         { return level <= 7 }
func (l *allocatorLog) WithName(string) logr.LogSink   { return l }
func (l *allocatorLog) WithValues(...any) logr.LogSink { return l }
func (l *allocatorLog) Error(error, string, ...any)    {}

func (l *allocatorLog) Info(_ int, message string, values ...any) {
	for i := 0; i+1 < len(values); i += 2 {
		id, is := values[i+1].(structured.DeviceID)
		if values[i] != "device" || !is {
			continue
		}
		name := id.Device.String()
		switch message {
		case "Device allocated":
			l.allocated[name] = true
		case "Device not selectable", "Device in use", "Insufficient counters", "Device capacity not enough", "Device not usable":
			if l.skipped[name] == nil {
				l.skipped[name] = map[string]bool{}
			}
			l.skipped[name][message] = true
		}
	}
}

// agrees reports whether a cause of ours is what a message of the allocator means.
func agrees(message string, f *finding, also map[string]bool) bool {
	has := func(all ...Cause) bool {
		return slices.ContainsFunc(f.causes, func(c Cause) bool { return slices.Contains(all, c) })
	}
	switch message {
	case "Device not selectable":
		return has(NotOfClass, NotSelected, ExpressionError)
	case "Device in use":
		// The allocator looks at that first, even at devices that nobody selects.
		return has(Held, NotOfClass, NotSelected, ExpressionError)
	case "Insufficient counters":
		return has(CountersUsed)
	case "Device capacity not enough":
		return has(CapacityTooLarge, CapacityUnknown, CapacityUsed)
	case "Device not usable":
		return also["Insufficient counters"] && has(CountersUsed) || has(Tainted, Unconstrained)
	}
	return false
}

// fleets are the states in which boards are compared. A state that a board does not have is left
// out.
var fleets = map[string]func(f *fleettest.Fleet) bool{
	"idle": func(*fleettest.Fleet) bool { return true },
	"partly occupied": func(f *fleettest.Fleet) bool {
		return hold(f, fleettest.Request(mig)) || hold(f, fleettest.Request(whole))
	},
	"full": func(f *fleettest.Fleet) bool {
		any := false
		for hold(f, fleettest.Request(whole)) || hold(f, fleettest.Request(mig)) {
			any = true
		}
		return any
	},
	"shared": func(f *fleettest.Fleet) bool { return hold(f, fleettest.Share(mps, "2Gi", "")) },
	"tainted": func(f *fleettest.Fleet) bool {
		taint(f)
		return true
	},
	"half tainted, half occupied": func(f *fleettest.Fleet) bool {
		if !hold(f, fleettest.Request(whole)) {
			return false
		}
		f.Slices[1] = f.Slices[1].DeepCopy()
		for i := range f.Slices[1].Spec.Devices {
			f.Slices[1].Spec.Devices[i].Taints = []resourceapi.DeviceTaint{{Key: "x", Effect: resourceapi.DeviceTaintEffectNoExecute}}
		}
		return true
	},
}

// hold allocates a claim if it fits.
func hold(f *fleettest.Fleet, r resourceapi.DeviceRequest) bool {
	c := &resourceapi.ResourceClaim{}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{r}
	p := allocation.New(f.Snapshot)
	if p.OnNode(context.Background(), f.Nodes[0], []*resourceapi.ResourceClaim{c}).Verdict != allocation.Fits {
		return false
	}
	f.Held("other", fmt.Sprint("held-", len(f.Claims)), "n", r)
	return true
}

// asked are the requests that are compared.
func asked() map[string]resourceapi.DeviceRequest {
	tolerant := fleettest.Request(whole)
	tolerant.Exactly.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	strange := fleettest.Share(mps, "1Gi", "")
	strange.Exactly.Capacity.Requests["strange"] = strange.Exactly.Capacity.Requests["memory"]
	return map[string]resourceapi.DeviceRequest{
		"whole":            fleettest.Request(whole),
		"whole, tolerant":  tolerant,
		"partition":        fleettest.Request(mig),
		"misspelt":         fleettest.Request(mig, fleettest.Profile("9g.9gb")),
		"large":            fleettest.Request(mig, memory80),
		"share":            fleettest.Share(mps, "1Gi", ""),
		"bytes":            fleettest.Share(mps, "10", ""),
		"odd share":        fleettest.Share(mps, "1500000001", "7"),
		"huge share":       fleettest.Share(mps, "1Ti", ""),
		"most of a GPU":    fleettest.Share(mps, "20Gi", "95"),
		"strange capacity": strange,
		"time slice":       fleettest.Share(slice, "1Gi", ""),
		"fails":            fleettest.Request(mig, "device.attributes['gpu.nvidia.com'].nosuch == 1"),
	}
}

// TestJudgeAgainstAllocator compares the causes of this package with the allocator's verdict and
// its log, for every board and state: nothing fits that the allocator refuses, and each device
// that it skips has a cause which means the same.
func TestJudgeAgainstAllocator(t *testing.T) {
	type counts struct{ boards, states, fits, refused, failed, skipped int }
	var total counts
	for _, board := range fleettest.Boards(t) {
		total.boards++
		for state, fill := range fleets {
			for _, partitioned := range []bool{false, true} {
				f := fleettest.New(t)
				if partitioned {
					f.AddPartitionedNode("n", board, 2)
				} else {
					f.AddNode("n", board, 2)
				}
				if !fill(f) {
					continue
				}
				total.states++
				p := allocation.New(f.Snapshot).Within(time.Hour)
				for name, r := range asked() {
					claim := f.Claim("team", name, r)
					log := newAllocatorLog()
					ctx := klog.NewContext(t.Context(), logr.New(log))
					answer := p.OnNode(ctx, f.Nodes[0], []*resourceapi.ResourceClaim{claim})
					judged, fits, fails := map[string]finding{}, 0, 0
					for _, d := range newJudge(p).onNode(t.Context(), f.Nodes[0], asksOf(claim)[0]) {
						judged[d.Device.Name] = d
						switch d.cause() {
						case "":
							fits++
						case ExpressionError:
							fails++
						}
					}
					where := fmt.Sprintf("%s (partitioned %t), %s, %s", board, partitioned, state, name)
					switch answer.Verdict {
					case allocation.Fits:
						total.fits++
						if got := judged[answer.Results[0].Devices.Results[0].Device]; got.cause() != "" {
							t.Errorf("%s: the allocator took %s, the causes are %v", where, got.Device.Name, got.causes)
						}
					case allocation.Refused:
						total.refused++
						if fits > 0 {
							t.Errorf("%s: the allocator refuses, and %d devices have no cause", where, fits)
						}
					case allocation.Failed:
						total.failed++
						if fails == 0 {
							t.Errorf("%s: the allocator fails: %v", where, answer.Err)
						}
					default:
						t.Errorf("%s: %s: %v", where, answer.Verdict, answer.Err)
					}
					for device, messages := range log.skipped {
						for message := range messages {
							total.skipped++
							if d := judged[device]; !agrees(message, &d, messages) {
								t.Errorf("%s: the allocator skipped %s: %s; the causes are %v", where, device, message, d.causes)
							}
						}
					}
				}
			}
		}
	}
	t.Logf("%+v", total)
	if total.boards < 13 || total.states < 100 || total.fits < 200 || total.refused < 400 || total.failed < 50 || total.skipped < 10000 {
		t.Errorf("compared too little: %+v", total)
	}
}

// TestOddPools: a pool is invalid for the same reasons as for the scheduler, which asks whether counters exist, not whether they
// are enough.
func TestOddPools(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(counters *resourceapi.ResourceSlice, d *resourceapi.Device)
		invalid bool
	}{
		"a counter is used that does not exist": {func(_ *resourceapi.ResourceSlice, d *resourceapi.Device) {
			d.ConsumesCounters[0].Counters["absent"] = resourceapi.Counter{}
		}, true},
		"a set of counters is there twice": {func(s *resourceapi.ResourceSlice, _ *resourceapi.Device) {
			s.Spec.SharedCounters = append(s.Spec.SharedCounters, *s.Spec.SharedCounters[0].DeepCopy())
		}, true},
		"a device needs more than there is": {func(_ *resourceapi.ResourceSlice, d *resourceapi.Device) {
			for name, c := range d.ConsumesCounters[0].Counters {
				c.Value.Add(resource.MustParse("1000Gi"))
				d.ConsumesCounters[0].Counters[name] = c
			}
		}, false},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.Held("team", "other", "n1", fleettest.Request(whole))
		hasCounters := func(s *resourceapi.ResourceSlice) bool { return len(s.Spec.SharedCounters) > 0 }
		for _, s := range f.Slices {
			for i := range s.Spec.Devices {
				if d := &s.Spec.Devices[i]; len(d.ConsumesCounters) > 0 && d.Name != "changed" {
					odd := d.DeepCopy()
					odd.Name = "changed"
					test.change(f.Slices[slices.IndexFunc(f.Slices, hasCounters)], odd)
					s.Spec.Devices = append(s.Spec.Devices, *odd)
					break
				}
			}
		}
		claim := f.Claim("team", "c", fleettest.Request(whole))
		e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pod("team", "p", fleettest.Uses(claim)))
		if got := strings.Contains(text(t, e), "has a name twice, or a counter that does not exist"); got != test.invalid {
			t.Errorf("%s: invalid %t, want %t:\n%s", name, got, test.invalid, text(t, e))
		}
	}
}
