// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// gpu and mig put the fields after the type of a configuration.
func gpu(fields string) string { return typed("GpuConfig", fields) }
func mig(fields string) string { return typed("MigDeviceConfig", fields) }

func typed(kind, fields string) string {
	if fields != "" {
		fields = "," + fields
	}
	return `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"` + kind + `"` + fields + `}`
}

func decode(text string) (Config, error) {
	return Decode(runtime.RawExtension{Raw: []byte(text)})
}

func TestDecode(t *testing.T) {
	gpuType := metav1.TypeMeta{APIVersion: Version, Kind: GpuConfigKind}
	migType := metav1.TypeMeta{APIVersion: Version, Kind: MigDeviceConfigKind}
	for name, test := range map[string]struct {
		in   string
		want Config
	}{
		"gpu, nothing asked": {in: gpu(""), want: &GpuConfig{TypeMeta: gpuType}},
		"mig, nothing asked": {in: mig(""), want: &MigDeviceConfig{TypeMeta: migType}},
		"space around":       {in: "\n " + gpu("") + " \n", want: &GpuConfig{TypeMeta: gpuType}},
		"in lines":           {in: strings.ReplaceAll(gpu(""), ",", "\t,\r\n\t"), want: &GpuConfig{TypeMeta: gpuType}},
		"escapes":            {in: strings.ReplaceAll(gpu(""), "/", `\/`), want: &GpuConfig{TypeMeta: gpuType}},
		"null sharing":       {in: gpu(`"sharing":null`), want: &GpuConfig{TypeMeta: gpuType}},
		"interval by default": {
			in:   gpu(`"sharing":{"strategy":"TimeSlicing"}`),
			want: &GpuConfig{TypeMeta: gpuType, Sharing: &GpuSharing{Strategy: TimeSlicing}},
		},
		"empty timeSlicingConfig": {
			in:   gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`),
			want: &GpuConfig{TypeMeta: gpuType, Sharing: &GpuSharing{Strategy: TimeSlicing, TimeSlicingConfig: &TimeSlicingConfig{}}},
		},
		"mps by default": {
			in:   gpu(`"sharing":{"strategy":"MPS"}`),
			want: &GpuConfig{TypeMeta: gpuType, Sharing: &GpuSharing{Strategy: MPS}},
		},
		"mps in full": {
			in: mig(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50,
				"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"0":"5Gi","1":1073741824},"multiUser":true,"defaultClientPriority":"BelowNormal"}}`),
			want: &MigDeviceConfig{TypeMeta: migType, Sharing: &MigDeviceSharing{Strategy: MPS, MPSConfig: &MPSConfig{
				DefaultActiveThreadPercentage:     ptr.To(50),
				DefaultPinnedDeviceMemoryLimit:    ptr.To(MemoryLimit("10Gi")),
				DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{"0": "5Gi", "1": "1073741824"},
				MultiUser:                         ptr.To(true),
				DefaultClientPriority:             ptr.To(PriorityBelowNormal),
			}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := must.Get(decode(test.in))(t)
			expect.Same(t, got, test.want, "configuration")
			if err := got.Validate(); err != nil {
				t.Errorf("Validate: %v", err)
			}
		})
	}
}

// TestDecodeRefuses: what is wrong with fields is in testdata/corpus.yaml.
func TestDecodeRefuses(t *testing.T) {
	for name, test := range map[string]struct{ in, want string }{
		"empty":           {``, "parameters: Invalid value: must be one JSON object: unexpected end"},
		"null":            {`null`, "parameters: Invalid value: must be an object, is empty"},
		"array":           {`[]`, "parameters: Invalid value: must be an object, is a list"},
		"string":          {`"GpuConfig"`, `parameters: Invalid value: "GpuConfig": must be an object, is a string`},
		"cut off":         {gpu("")[:40], "must be one JSON object"},
		"trailing data":   {gpu("") + `{}`, "after the top-level value"},
		"too long":        {gpu(`"x":"` + strings.Repeat("a", maxBytes) + `"`), "parameters: Too long: may not be more than 10240 bytes"},
		"repeated":        {gpu(`"sharing":null,"sharing":{"strategy":"MPS"}`), "sharing: Invalid value: is given more than once"},
		"repeated kind":   {gpu(`"kind":"GpuConfig"`), "kind: Invalid value: is given more than once"},
		"repeated key":    {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi","0":"2Gi"}}}`), "defaultPerDevicePinnedMemoryLimit[0]: Invalid value: is given more than once"},
		"several at once": {gpu(`"sharing":{"stategy":"MPS","mpsConfig":{"multiUser":1}}`), "[sharing.stategy: Invalid value: unknown field, known here: mpsConfig, strategy, timeSlicingConfig, sharing.mpsConfig.multiUser: Invalid value: 1: must be"},
	} {
		t.Run(name, func(t *testing.T) {
			config, err := decode(test.in)
			if err == nil {
				t.Fatalf("accepted as %+v", config)
			}
			var fault *InvalidError
			if !errors.As(err, &fault) || len(fault.Faults) == 0 {
				t.Errorf("not an InvalidError: %#v", err)
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("got  %v\nwant %s", err, test.want)
			}
		})
	}
}

func TestOnlyClientPriority(t *testing.T) {
	full := reflect.ValueOf(MPSConfig{
		DefaultActiveThreadPercentage: ptr.To(0), DefaultPinnedDeviceMemoryLimit: ptr.To(MemoryLimit("")),
		DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{}, MultiUser: ptr.To(false), DefaultClientPriority: ptr.To(PriorityNormal),
	})
	if (&MPSConfig{}).OnlyClientPriority() {
		t.Error("there is none")
	}
	for i := range full.NumField() {
		c := &MPSConfig{}
		reflect.ValueOf(c).Elem().Field(i).Set(full.Field(i))
		priority := c.DefaultClientPriority != nil
		expect.Same(t, c.OnlyClientPriority(), priority, full.Type().Field(i).Name+" alone")
		if c.DefaultClientPriority = ptr.To(PriorityNormal); c.OnlyClientPriority() != priority {
			t.Errorf("%s and a priority: %v", full.Type().Field(i).Name, !priority)
		}
	}
}

// Configurations built in Go and not by Decode must not panic either.
func TestValidateZeroValues(t *testing.T) {
	for _, config := range []Config{
		&GpuConfig{}, &MigDeviceConfig{},
		&GpuConfig{Sharing: &GpuSharing{Strategy: TimeSlicing, TimeSlicingConfig: &TimeSlicingConfig{}}},
	} {
		if err := config.Validate(); err == nil || !strings.Contains(err.Error(), "apiVersion") {
			t.Errorf("%T: got %v", config, err)
		}
	}
}

func TestBytes(t *testing.T) {
	for in, want := range map[MemoryLimit]int64{
		"1Mi": 1 << 20, "1048576": 1 << 20, "10Gi": 10 << 30, "1.5Gi": 3 << 29, "2G": 2_000_000_000, "2e9": 2_000_000_000,
		"7Ei": 7 << 60, "8191Pi": 8191 << 50,
	} {
		if got, err := in.Bytes(); err != nil || got != want {
			t.Errorf("%s: got %d, %v, want %d", in, got, err, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		gpu(""), mig(""), `null`, `{}`, `[`,
		gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`),
		gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"0":"1e30"}}}`),
		gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi","` + gpuA + `":"2Gi"}}}`),
		mig(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":1e3,"multiUser":null}}`),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		config, err := Decode(runtime.RawExtension{Raw: data})
		if err != nil {
			if config != nil || err.Error() == "" {
				t.Errorf("config %v with error %q", config, err)
			}
			return
		}
		if err := config.Validate(); err != nil {
			return
		}
		checkValid(t, config)
	})
}

// checkValid checks what Prepare relies on for a configuration that is valid.
func checkValid(t *testing.T, config Config) {
	t.Helper()
	if interval := config.Interval(); !slices.Contains([]Interval{IntervalDefault, IntervalShort, IntervalMedium, IntervalLong}, interval) {
		t.Errorf("interval %q", interval)
	}
	settings := config.MPS()
	if settings == nil {
		return
	}
	if p := settings.ThreadPercentage(); p < 0 || p > 100 {
		t.Errorf("%d percent", p)
	}
	for n, devices := range [][]string{nil, {migC}, {gpuA, gpuB}} {
		limits, err := settings.MemoryLimits(devices)
		var fault *InvalidError
		if err != nil && (limits != nil || !errors.As(err, &fault)) {
			t.Errorf("limits %v with error %v", limits, err)
		}
		for uuid, bytes := range limits {
			if bytes < minMemoryLimit || !slices.Contains(devices, uuid) {
				t.Errorf("%d devices: limits %v", n, limits)
			}
		}
	}
}
