// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/journal"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
)

const (
	// formats holds what versions of the driver have written. Files are added
	// and never changed: there may be machines that still have such records.
	formats = "testdata/journal"
	// newest is what this version writes of a record with every field. A change
	// of the format needs a new file.
	newest = "4-steps.json"
)

// present is a record with every field of this version.
func present() *journal.Record {
	return &journal.Record{
		APIVersion: journal.SharingVersion, Kind: journal.RecordKind, State: journal.Prepared, BootID: "boot-1", Arrived: 1500 * time.Millisecond,
		Claim: Ref{Namespace: "default", Name: "claim-u1", UID: "u1"},
		Devices: []journal.Device{
			{
				Requests: []string{"r0", "gpu/small"}, Pool: poolName, Device: sliceA4, Type: device.Partition, PCIAddress: pciA, DynamicMIG: true, Divisible: true,
				Partition: &journal.Partition{Profile: "1g.10gb", ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1},
					Live: &partition.Live{InstanceID: 7, ComputeID: 0, UUID: "MIG-1"},
					UUID: "MIG-1", Remaking: true},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + sliceA4,
			},
			{
				Requests: []string{"r1"}, Pool: poolName, Device: staticA0, Type: journal.Static, PCIAddress: pciA, DynamicMIG: true,
				Partition: &journal.Partition{Profile: "1g.10gb", ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1},
					Live: &partition.Live{InstanceID: 3, ComputeID: 0, UUID: "MIG-2"}},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + staticA0,
			},
			{Requests: []string{"r2"}, Pool: poolName, Device: wholeB, Type: device.Whole, PCIAddress: pciB, Admin: true, ShareID: ptr.To(types.UID("s1"))},
			{
				Requests: []string{"r3"}, Pool: poolName, Device: wholeB + "-mps", Type: device.MPS, PCIAddress: pciB, ShareID: ptr.To(types.UID("s2")),
				Sharing:   &journal.Sharing{UUID: "GPU-b", Session: wholeB, Limits: journal.Limits{Percent: 25, MemoryBytes: 10 << 30}},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + wholeB + "-mps-s2",
			},
			{
				Requests: []string{"r4"}, Pool: poolName, Device: wholeC + "-timeslice", Type: device.TimeSlice, PCIAddress: pciC, ShareID: ptr.To(types.UID("s3")),
				Sharing:   &journal.Sharing{UUID: "GPU-c", Limits: journal.Limits{Percent: 25, MemoryBytes: 6 << 30}, Interval: "Short", Limited: true},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + wholeC + "-timeslice-s3",
			},
		},
		Sessions: []journal.Session{{
			ID: wholeB, Shared: true, MultiUser: true, Devices: []journal.SessionDevice{{Device: wholeB + "-mps", PCIAddress: pciB, UUID: "GPU-b", MemoryBytes: 4 << 30}},
			Percent: 50, MemoryBytes: map[string]int64{"GPU-b": 20 << 30},
			PipeDir: "/run/partage/mps/" + wholeB + "/pipe", ShmDir: "/run/partage/mps/" + wholeB + "/shm", Losses: 1,
		}},
	}
}

// TestRecordFormat pins what this version writes.
func TestRecordFormat(t *testing.T) {
	data, err := json.MarshalIndent(present(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join(formats, newest))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(data)+"\n"); diff != "" {
		t.Errorf("the format has changed: keep %s, add a file for the new format and name it in newest.\n-file +written:\n%s", newest, diff)
	}
	got, err := journal.Parse(want, "u1")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(present(), got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	var written any
	if err := json.Unmarshal(data, &written); err != nil {
		t.Fatal(err)
	}
	missing := slices.DeleteFunc(fieldsOf(reflect.TypeFor[journal.Record](), ""), func(path string) bool {
		return slices.Contains(pathsOf(written, ""), path)
	})
	if len(missing) > 0 {
		t.Errorf("present() lacks the fields %v", missing)
	}
}

// fieldsOf lists the paths of all JSON fields of a type.
func fieldsOf(of reflect.Type, path string) []string {
	switch of.Kind() {
	case reflect.Pointer, reflect.Slice:
		return fieldsOf(of.Elem(), path)
	case reflect.Struct:
		var paths []string
		for field := range of.Fields() {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			paths = append(paths, path+"."+name)
			paths = append(paths, fieldsOf(field.Type, path+"."+name)...)
		}
		return paths
	}
	return nil
}

// pathsOf lists the paths of all fields of a decoded JSON value.
func pathsOf(value any, path string) []string {
	var paths []string
	switch value := value.(type) {
	case []any:
		for _, v := range value {
			paths = append(paths, pathsOf(v, path)...)
		}
	case map[string]any:
		for name, v := range value {
			paths = append(paths, path+"."+name)
			paths = append(paths, pathsOf(v, path+"."+name)...)
		}
	}
	return paths
}

// TestEveryFormat releases claims by what any version of the driver has written of
// them.
func TestEveryFormat(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(formats, "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			r, err := journal.Parse(data, "u1")
			if err != nil {
				t.Fatal(err)
			}
			b := newBox(t)
			m := b.manager()
			var want []string
			for i := range r.Devices {
				d := &r.Devices[i]
				switch {
				case d.Owned():
					if _, err := b.Ensure(t.Context(), d.Address(), partition.ExpectOurs, true); err != nil {
						t.Fatal(err)
					}
					b.rename(d.Address(), d.Partition.LiveUUID())
				case d.Type == journal.Static:
					b.makeForeign(d.Address())
					want = []string{"MIG mode of " + d.PCIAddress, "instance " + d.Address().String() + " complete=true"}
				}
			}
			write(t, m.store.Path("u1"), string(data))
			if _, err := m.Prepare(t.Context(), newClaim("u2", sliceA1)); err != nil && r.Devices[0].Type != device.Whole {
				t.Errorf("another claim: %v", err)
			}
			mustUnprepare(t, m, "u2")
			mustUnprepare(t, m, "u1")
			b.wantState(t, file, want)
		})
	}
}
