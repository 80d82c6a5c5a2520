// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

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

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/partition"
	"github.com/partage-dev/partage/pkg/policy"
)

const (
	// formats holds what versions of the driver have written. Files are added
	// and never changed: there may be machines that still have such records.
	formats = "testdata/formats"
	// newest is what this version writes of a record with every field. A change
	// of the format needs a new file.
	newest = "6-priority.json"
)

// present is a record with every field of this version.
func present() *Record {
	return &Record{
		APIVersion: SharingVersion, Kind: RecordKind, State: Prepared, BootID: "boot-1", Arrived: 1500 * time.Millisecond,
		Claim: Ref{Namespace: "default", Name: "claim-u1", UID: "u1"},
		Devices: []Device{
			{
				Requests: []string{"r0", "gpu/small"}, Pool: claimtest.PoolName, Device: claimtest.SliceA4, Type: device.Partition, PCIAddress: claimtest.PCIA, DynamicMIG: true, Divisible: true,
				Partition: &Partition{Profile: "1g.10gb", ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1},
					Live: &partition.Live{InstanceID: 7, ComputeID: 0, UUID: "MIG-1"},
					UUID: "MIG-1", Remaking: true},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + claimtest.SliceA4,
			},
			{
				Requests: []string{"r1"}, Pool: claimtest.PoolName, Device: claimtest.StaticA0, Type: Static, PCIAddress: claimtest.PCIA, DynamicMIG: true,
				Partition: &Partition{Profile: "1g.10gb", ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1},
					Live: &partition.Live{InstanceID: 3, ComputeID: 0, UUID: "MIG-2"}},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + claimtest.StaticA0,
			},
			{Requests: []string{"r2"}, Pool: claimtest.PoolName, Device: claimtest.WholeB, Type: device.Whole, PCIAddress: claimtest.PCIB, Admin: true, ShareID: ptr.To(types.UID("s1"))},
			{
				Requests: []string{"r3"}, Pool: claimtest.PoolName, Device: claimtest.WholeB + "-mps", Type: device.MPS, PCIAddress: claimtest.PCIB, ShareID: ptr.To(types.UID("s2")),
				Sharing:   &Sharing{UUID: "GPU-b", Session: claimtest.WholeB, Limits: Limits{Percent: 25, MemoryBytes: 10 << 30}, OnClientKilled: policy.KilledRestart, ClientPriority: policy.PriorityBelowNormal},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + claimtest.WholeB + "-mps-s2",
			},
			{
				Requests: []string{"r4"}, Pool: claimtest.PoolName, Device: claimtest.WholeC + "-timeslice", Type: device.TimeSlice, PCIAddress: claimtest.PCIC, ShareID: ptr.To(types.UID("s3")),
				Sharing:   &Sharing{UUID: "GPU-c", Limits: Limits{Percent: 25, MemoryBytes: 6 << 30}, Interval: "Short", Limited: true},
				CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + claimtest.WholeC + "-timeslice-s3",
			},
		},
		Sessions: []Session{{
			ID: claimtest.WholeB, Shared: true, MultiUser: true, Devices: []SessionDevice{{Device: claimtest.WholeB + "-mps", PCIAddress: claimtest.PCIB, UUID: "GPU-b", MemoryBytes: 4 << 30}},
			Percent: 50, MemoryBytes: map[string]int64{"GPU-b": 20 << 30}, ClientPriority: policy.PriorityBelowNormal,
			PipeDir: "/run/partage/mps/" + claimtest.WholeB + "/pipe", ShmDir: "/run/partage/mps/" + claimtest.WholeB + "/shm", Losses: 1, Kills: 2,
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
	got, err := Parse(want, "u1")
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
	missing := slices.DeleteFunc(fieldsOf(reflect.TypeFor[Record](), ""), func(path string) bool {
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
