// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestRecordIsAdditive shows that fields may be missing, as an older version left them
// out, and that there may be others, as a newer one writes them.
func TestRecordIsAdditive(t *testing.T) {
	const text = `{"apiVersion":"journal.partage.dev/v1","kind":"ClaimRecord","claim":{"uid":"u1","color":"red"},"state":"prepared",
		"tombstone":{"until":"tomorrow"},"devices":[{"device":"d","pciAddress":"0000:1b:00.0","type":"mig","daemon":7,
		"partition":{"profileID":19,"placement":{"start":4,"size":1}}}]}`
	got, err := Parse([]byte(text), "u1")
	if err != nil {
		t.Fatal(err)
	}
	want := &Record{APIVersion: Version, Kind: RecordKind, Claim: Ref{UID: "u1"}, State: Prepared, Devices: []Device{{
		Device: "d", PCIAddress: claimtest.PCIA, Type: device.Partition,
		Partition: &Partition{ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestParseRecordRefuses(t *testing.T) {
	change := func(f func(*Record)) string {
		r := present()
		f(r)
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for name, test := range map[string]struct {
		text  string
		other bool // of another version, not damaged
	}{
		"empty":           {"", false},
		"null":            {"null", false},
		"array":           {"[]", false},
		"other version":   {change(func(r *Record) { r.APIVersion = "journal.partage.dev/v3" }), true},
		"other kind":      {change(func(r *Record) { r.Kind = "Tombstone" }), true},
		"no version":      {change(func(r *Record) { r.APIVersion = "" }), false},
		"other claim":     {change(func(r *Record) { r.Claim.UID = "u2" }), false},
		"unknown state":   {change(func(r *Record) { r.State = "paused" }), true},
		"unknown type":    {change(func(r *Record) { r.Devices[0].Type = "vfio" }), true},
		"no address":      {change(func(r *Record) { r.Devices[0].PCIAddress = "" }), false},
		"no device":       {change(func(r *Record) { r.Devices[1].Device = "" }), false},
		"no partition":    {change(func(r *Record) { r.Devices[0].Partition = nil }), false},
		"no session":      {change(func(r *Record) { r.Sessions = nil }), false},
		"empty session":   {change(func(r *Record) { r.Sessions[0].Devices = nil }), false},
		"extra partition": {change(func(r *Record) { r.Devices[2].Partition = &Partition{} }), false},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := Parse([]byte(test.text), "u1")
			if err == nil {
				t.Fatalf("accepted as %+v", r)
			}
			if got := errors.Is(err, ErrOtherVersion); got != test.other {
				t.Errorf("%v: another version: got %v, want %v", err, got, test.other)
			}
		})
	}
}

func FuzzParseRecord(f *testing.F) {
	files, err := filepath.Glob(filepath.Join(formats, "*.json"))
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"apiVersion":"journal.partage.dev/v1","kind":"ClaimRecord","claim":{"uid":"u1"},"state":"unpreparing","devices":[{}]}`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		r, err := Parse(data, "u1")
		if err != nil {
			return
		}
		// Whatever is accepted can be worked with.
		_ = r.Clone().SameOutcome(r)
		for i := range r.Sessions {
			r.Sessions[i].Resolve(r)
			_ = r.Sessions[i].Desired([]*Record{r})
		}
		for i := range r.Devices {
			d := &r.Devices[i]
			if d.Partition != nil {
				_ = d.Address()
			}
			_ = d.Sharers([]*Record{r})
			_ = d.IsIn([]gpu.Instance{{ProfileID: 19}})
		}
	})
}
