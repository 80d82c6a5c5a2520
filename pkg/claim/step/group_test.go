// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

const (
	pciA = claimtest.PCIA
	pciB = claimtest.PCIB
	pciC = claimtest.PCIC
)

func wholeGPU(name, pciAddress string) journal.Device {
	return journal.Device{Requests: []string{"r-" + name}, Pool: "node-1", Device: name, Type: device.Whole, PCIAddress: pciAddress}
}

// migSlice returns a 1g partition that is not made yet.
func migSlice(name, pciAddress string, start int) journal.Device {
	d := wholeGPU(name, pciAddress)
	d.Type, d.DynamicMIG = device.Partition, true
	d.Partition = &journal.Partition{ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}}
	return d
}

func shareOf(name, pciAddress, id string, kind device.Kind, sharing *journal.Sharing) journal.Device {
	d := wholeGPU(name, pciAddress)
	d.Type, d.ShareID, d.Sharing = kind, ptr.To(types.UID(id)), sharing
	return d
}

func observed(d journal.Device) journal.Device {
	d.Admin = true
	return d
}

func inSession(d journal.Device, id string) journal.Device {
	d.Sharing = &journal.Sharing{Session: id}
	return d
}

func claimOf(uid types.UID, devices ...journal.Device) *journal.Record {
	r := journal.New(journal.Ref{Namespace: "default", Name: "claim-" + string(uid), UID: uid}, "boot-1")
	for _, d := range devices {
		r.Add(d)
	}
	return r.Clone()
}

func sessionOn(id string, devices ...journal.Device) journal.Session {
	s := journal.Session{ID: id}
	for _, d := range devices {
		s.Devices = append(s.Devices, journal.SessionDevice{Device: d.Device, PCIAddress: d.PCIAddress})
	}
	return s
}

// render writes a group as "GPUs: devices; sessions".
func render(g Group) string {
	var devices, sessions []string
	for i := range g.Part.Devices {
		devices = append(devices, g.Part.Devices[i].Key())
	}
	for _, s := range g.Part.Sessions {
		sessions = append(sessions, s.ID)
	}
	return strings.Join(g.GPUs, "+") + ": " + strings.Join(devices, " ") + "; " + strings.Join(sessions, " ")
}

var groupTests = map[string]struct {
	devices  []journal.Device
	sessions []journal.Session
	want     []string
}{
	"nothing":  {},
	"one":      {devices: []journal.Device{wholeGPU("a", pciA)}, want: []string{pciA + ": a; "}},
	"two GPUs": {devices: []journal.Device{wholeGPU("b", pciB), wholeGPU("a", pciA)}, want: []string{pciB + ": b; ", pciA + ": a; "}},
	"partitions of two GPUs": {
		devices: []journal.Device{migSlice("a0", pciA, 0), migSlice("b0", pciB, 0), migSlice("a4", pciA, 4)},
		want:    []string{pciA + ": a0 a4; ", pciB + ": b0; "},
	},
	"a session of two GPUs": {
		devices:  []journal.Device{inSession(wholeGPU("b", pciB), "m"), wholeGPU("c", pciC), inSession(wholeGPU("a", pciA), "m")},
		sessions: []journal.Session{sessionOn("m", wholeGPU("a", pciA), wholeGPU("b", pciB))},
		want:     []string{pciA + "+" + pciB + ": b a; m", pciC + ": c; "},
	},
	"sessions that hang together": {
		devices: []journal.Device{inSession(migSlice("a0", pciA, 0), "m"), inSession(wholeGPU("c", pciC), "n"), inSession(wholeGPU("b", pciB), "m"), inSession(migSlice("a4", pciA, 4), "n")},
		sessions: []journal.Session{
			sessionOn("m", migSlice("a0", pciA, 0), wholeGPU("b", pciB)), sessionOn("n", migSlice("a4", pciA, 4), wholeGPU("c", pciC)),
		},
		want: []string{pciA + "+" + pciB + "+" + pciC + ": a0 c b a4; m n"},
	},
	"a session with a GPU that the claim does not have any more": {
		devices:  []journal.Device{inSession(wholeGPU("a", pciA), "m"), wholeGPU("b", pciB)},
		sessions: []journal.Session{sessionOn("m", wholeGPU("a", pciA), wholeGPU("b", pciB))},
		want:     []string{pciA + "+" + pciB + ": a b; m"},
	},
	"observed GPUs take no lock": {
		devices: []journal.Device{observed(wholeGPU("a", pciA)), observed(wholeGPU("b", pciB)), wholeGPU("c", pciC)},
		want:    []string{": a b; ", pciC + ": c; "},
	},
	"an observed partition does": {devices: []journal.Device{observed(migSlice("a0", pciA, 0))}, want: []string{pciA + ": a0; "}},
	"two shares of a device": {
		devices: []journal.Device{shareOf("t", pciA, "s1", device.TimeSlice, nil), shareOf("t", pciA, "s2", device.TimeSlice, nil)},
		want:    []string{pciA + ": t-s1 t-s2; "},
	},
}

// TestGroups shows which parts of a claim are made under the same locks, that the parts
// put together are the claim, and that each is found again in it.
func TestGroups(t *testing.T) {
	for name, test := range groupTests {
		t.Run(name, func(t *testing.T) {
			r := claimOf("u1", test.devices...)
			r.Sessions = test.sessions
			before := r.Clone()
			groups := Groups(r)
			var got []string
			var parts []*journal.Record
			for _, g := range groups {
				got = append(got, render(g))
				parts = append(parts, g.Part)
				if diff := cmp.Diff(g.Part, PartOf(r, g)); diff != "" {
					t.Errorf("found again: -group +got:\n%s", diff)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if len(parts) > 0 {
				merged := Merge(parts...)
				if !merged.Arrange(r) || !r.PartOf(merged) || len(merged.Sessions) != len(r.Sessions) {
					t.Errorf("put together: got %+v", merged)
				}
			}
			for _, p := range parts {
				p.Devices[0].Requests[0] = "other"
				for i := range p.Sessions {
					p.Sessions[i].Devices[0].UUID = "other"
				}
			}
			if diff := cmp.Diff(before, r); diff != "" {
				t.Errorf("a change of a part has changed the claim: -before +now:\n%s", diff)
			}
		})
	}
}

// TestPartOfRemaining shows what is found of a group of which the claim lost devices.
func TestPartOfRemaining(t *testing.T) {
	groups := Groups(claimOf("u1", migSlice("a0", pciA, 0), migSlice("a4", pciA, 4)))
	part := PartOf(claimOf("u1", migSlice("a4", pciA, 4), wholeGPU("b", pciB)), groups[0])
	if part == nil || len(part.Devices) != 1 || part.Devices[0].Device != "a4" {
		t.Errorf("got %+v", part)
	}
	if part := PartOf(claimOf("u1", wholeGPU("b", pciB)), groups[0]); part != nil {
		t.Errorf("nothing is left, got %+v", part)
	}
}

// TestMerge shows that a session is there once, and that the parts stay as they are.
func TestMerge(t *testing.T) {
	a, b := claimOf("u1", inSession(wholeGPU("a", pciA), "m")), claimOf("u1", inSession(wholeGPU("b", pciB), "m"))
	s := sessionOn("m", wholeGPU("a", pciA), wholeGPU("b", pciB))
	a.Sessions, b.Sessions = []journal.Session{s}, []journal.Session{s}
	merged := Merge(a, b)
	if got := render(Group{Part: merged}); got != ": a b; m" {
		t.Errorf("got %s", got)
	}
	merged.Devices[0].Sharing.Session, merged.Sessions[0].Devices[0].UUID = "x", "x"
	if a.Devices[0].Sharing.Session != "m" || a.Sessions[0].Devices[0].UUID != "" {
		t.Error("a change of the whole has changed a part")
	}
}

// TestSteps shows the steps of a claim and the devices that each is about.
func TestSteps(t *testing.T) {
	static, looked := migSlice("s", pciB, 1), observed(migSlice("o", pciB, 2))
	static.Type = journal.Static
	turns := shareOf("t", pciC, "s1", device.TimeSlice, &journal.Sharing{Interval: "Short", Limited: true})
	r := claimOf("u1", inSession(migSlice("a0", pciA, 0), "m"), wholeGPU("w", pciA), static, looked, turns)
	r.Sessions = []journal.Session{sessionOn("m", migSlice("a0", pciA, 0))}
	kit := &Kit{}
	var got []string
	for _, s := range append(kit.Steps(r), kit.ClaimSteps(r)...) {
		got = append(got, s.Name+": "+strings.Join(s.Keys, " "))
	}
	want := []string{
		"partition a0: a0", "whole w: w", "existing s: s", "existing o: o", "whole t-s1: t-s1", "session m: a0", "interval t-s1: t-s1",
		"soft limits: t-s1", "CDI spec: ",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// FuzzGroups shows that any record that the journal accepts can be divided, and that
// nothing of it is lost.
func FuzzGroups(f *testing.F) {
	files, err := filepath.Glob("../journal/testdata/formats/*.json")
	if err != nil || len(files) == 0 {
		f.Fatalf("no records: %v", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := journal.Parse(data, "u1")
		if err != nil {
			return
		}
		_ = (&Kit{}).ClaimSteps(r)
		devices := 0
		for _, g := range Groups(r) {
			devices += len(g.Part.Devices)
			_ = (&Kit{}).Steps(g.Part)
		}
		if devices != len(r.Devices) {
			t.Errorf("of %d devices, %d are in groups", len(r.Devices), devices)
		}
	})
}

// TestLimitsOwner shows which devices containers get the limits of together.
func TestLimitsOwner(t *testing.T) {
	two := wholeGPU("b", pciB)
	two.Requests = []string{"r0", "r1"}
	r := claimOf("u1", wholeGPU("a", pciA), two, shareOf("c", pciC, "s1", device.TimeSlice, nil), shareOf("c", pciC, "s2", device.TimeSlice, nil), migSlice("p", pciA, 0))
	for i, want := range []string{"u1/r-a", "u1/r0,r1", "u1/c-s1", "u1/c-s2", "u1/r-p"} {
		if got := limitsOwner(r, &r.Devices[i]); got != want {
			t.Errorf("%s: got %s, want %s", r.Devices[i].Key(), got, want)
		}
	}
}
