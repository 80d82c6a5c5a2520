// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/claim/step"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
)

// TestRecordIsAdditive: fields may be missing, as an older version left them out,
// and there may be others, as a newer one writes them.
func TestRecordIsAdditive(t *testing.T) {
	const text = `{"apiVersion":"journal.partage.dev/v1","kind":"ClaimRecord","claim":{"uid":"u1","color":"red"},"state":"prepared",
		"tombstone":{"until":"tomorrow"},"devices":[{"device":"d","pciAddress":"0000:1b:00.0","type":"mig","daemon":7,
		"partition":{"profileID":19,"placement":{"start":4,"size":1}}}]}`
	got, err := journal.Parse([]byte(text), "u1")
	if err != nil {
		t.Fatal(err)
	}
	want := &journal.Record{APIVersion: journal.Version, Kind: journal.RecordKind, Claim: Ref{UID: "u1"}, State: journal.Prepared, Devices: []journal.Device{{
		Device: "d", PCIAddress: pciA, Type: device.Partition,
		Partition: &journal.Partition{ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A record of an older version that lacks newer fields is still the same claim:
// it must not be torn down under running pods.
func TestOldRecordIsRecognised(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	r, err := m.store.Read("u1")
	if err != nil {
		t.Fatal(err)
	}
	r.Devices[0].DynamicMIG, r.Devices[0].CDIDevice, r.Devices[0].Partition.Profile = false, "", ""
	if err := m.store.Save(r); err != nil {
		t.Fatal(err)
	}
	b.hooks(nil, nil)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	if diff := cmp.Diff([]string{"write spec", "write prepared"}, b.effects); diff != "" {
		t.Errorf("effects: -want +got:\n%s", diff)
	}
}

func TestParseRecordRefuses(t *testing.T) {
	change := func(f func(*journal.Record)) string {
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
		"other version":   {change(func(r *journal.Record) { r.APIVersion = "journal.partage.dev/v3" }), true},
		"other kind":      {change(func(r *journal.Record) { r.Kind = "Tombstone" }), true},
		"no version":      {change(func(r *journal.Record) { r.APIVersion = "" }), false},
		"other claim":     {change(func(r *journal.Record) { r.Claim.UID = "u2" }), false},
		"unknown state":   {change(func(r *journal.Record) { r.State = "paused" }), true},
		"unknown type":    {change(func(r *journal.Record) { r.Devices[0].Type = "vfio" }), true},
		"no address":      {change(func(r *journal.Record) { r.Devices[0].PCIAddress = "" }), false},
		"no device":       {change(func(r *journal.Record) { r.Devices[1].Device = "" }), false},
		"no partition":    {change(func(r *journal.Record) { r.Devices[0].Partition = nil }), false},
		"no session":      {change(func(r *journal.Record) { r.Sessions = nil }), false},
		"empty session":   {change(func(r *journal.Record) { r.Sessions[0].Devices = nil }), false},
		"extra partition": {change(func(r *journal.Record) { r.Devices[2].Partition = &journal.Partition{} }), false},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := journal.Parse([]byte(test.text), "u1")
			if err == nil {
				t.Fatalf("accepted as %+v", r)
			}
			if got := errors.Is(err, journal.ErrOtherVersion); got != test.other {
				t.Errorf("%v: another version: got %v, want %v", err, got, test.other)
			}
		})
	}
}

func TestUIDs(t *testing.T) {
	dir := t.TempDir()
	j, err := journal.Open(t.Context(), dir, "boot-1", journal.OS{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"b.json", ".b.json.tmp", ".a.json.tmp", "c.json.corrupt-1", "README", "d.txt", ".json"} {
		write(t, filepath.Join(dir, "claims", name), "")
	}
	got, err := j.UIDs()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]types.UID{"a", "b"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// What a process leaves that is killed while it writes its first record.
func TestReconcileRemovesUnfinishedRecord(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	write(t, host.TemporaryName(m.store.Path("u1")), `{"apiV`)
	write(t, filepath.Join(b.dataDir(), "locks", "claim-u7.lock"), "")
	mustReconcile(t, m)
	b.wantNothing()
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
		r, err := journal.Parse(data, "u1")
		if err != nil {
			return
		}
		// Whatever is accepted can be worked with.
		_ = r.Clone().SameOutcome(r)
		for _, g := range step.Groups(r) {
			_ = (&step.Kit{}).Steps(g.Part)
		}
		for i := range r.Devices {
			d := &r.Devices[i]
			if d.Partition != nil {
				_ = d.Address()
			}
			_ = isOn(d, gpu.Process{})
			_ = d.IsIn([]gpu.Instance{{ProfileID: 19}})
		}
	})
}
