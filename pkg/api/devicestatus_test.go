// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

var fullStatus = DeviceStatus{
	TypeMeta: metav1.TypeMeta{APIVersion: StatusVersion, Kind: DeviceStatusKind},
	Type:     "mps", UUID: "MIG-6d03ee29-ec0f-5846-b43e-98f9a3233506", ParentUUID: "GPU-5c1d8a2e-0b7f-4f0e-9a5c-2f6b1c3d4e5f", PCIBusID: "0000:1b:00.0",
	MIG: &MIGStatus{
		Profile: "1g.10gb", Placement: PlacementStatus{Start: 4, Size: 1}, GPUInstanceID: ptr.To(0), ComputeInstanceID: ptr.To(0),
	},
	Limits:    &LimitsStatus{MemoryBytes: 2 << 30, SMPercent: 25, Multiprocessors: 32, EffectiveSMPercent: 24},
	MPS:       &MPSStatus{Session: "gpu-0000-1b-00-0-mig-1g10gb-4", ServersLost: 1, ClientPriority: PriorityBelowNormal},
	TimeSlice: "Short",
}

// TestDeviceStatusFormat: other programs read this text. A field of the version may neither go
// nor get another name; testdata has what the first release with it wrote.
func TestDeviceStatusFormat(t *testing.T) {
	empty := DeviceStatus{TypeMeta: fullStatus.TypeMeta, Type: "gpu", PCIBusID: "0000:1b:00.0"}
	for name, status := range map[string]DeviceStatus{"full": fullStatus, "least": empty} {
		want := must.Get(os.ReadFile(filepath.Join("testdata", "devicestatus-"+name+".v1alpha1.json")))(t)
		got := must.Get(json.MarshalIndent(status, "", "  "))(t)
		expect.Same(t, string(got), string(bytes.TrimSpace(want)), name)
		var read DeviceStatus
		if err := json.Unmarshal(want, &read); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		expect.Same(t, read, status, name+", read back")
	}
}

// TestFullDeviceStatus: the format above is that of every field there is.
func TestFullDeviceStatus(t *testing.T) {
	fields := 0
	var check func(path string, v reflect.Value)
	check = func(path string, v reflect.Value) {
		if v.Kind() == reflect.Pointer && v.IsNil() || v.Kind() != reflect.Pointer && v.IsZero() {
			t.Errorf("%s is not set", path)
			return
		}
		v = reflect.Indirect(v)
		if v.Kind() != reflect.Struct {
			fields++
			return
		}
		for i := range v.NumField() {
			check(path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	}
	check("DeviceStatus", reflect.ValueOf(&fullStatus))
	expect.Same(t, fields, 19, "fields")
}
