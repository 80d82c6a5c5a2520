// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
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
			in: gpu(`"sharing":{"strategy":"TimeSlicing"}`),
			want: &GpuConfig{TypeMeta: gpuType, Sharing: &GpuSharing{
				Strategy: TimeSlicing, TimeSlicingConfig: &TimeSlicingConfig{Interval: ptr.To(IntervalDefault)}}},
		},
		"empty timeSlicingConfig": {
			in: gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`),
			want: &GpuConfig{TypeMeta: gpuType, Sharing: &GpuSharing{
				Strategy: TimeSlicing, TimeSlicingConfig: &TimeSlicingConfig{Interval: ptr.To(IntervalDefault)}}},
		},
		"mps by default": {
			in:   gpu(`"sharing":{"strategy":"MPS"}`),
			want: &GpuConfig{TypeMeta: gpuType, Sharing: &GpuSharing{Strategy: MPS, MPSConfig: &MPSConfig{}}},
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
			got, err := decode(test.in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if err := got.Validate(); err != nil {
				t.Errorf("Validate: %v", err)
			}
		})
	}
}

func TestDecodeRefuses(t *testing.T) {
	for name, test := range map[string]struct{ in, want string }{
		"empty":               {``, "parameters: Invalid value: must be one JSON object: unexpected end"},
		"null":                {`null`, "parameters: Invalid value: must be an object, is empty"},
		"array":               {`[]`, "parameters: Invalid value: must be an object, is a list"},
		"string":              {`"GpuConfig"`, `parameters: Invalid value: "GpuConfig": must be an object, is a string`},
		"cut off":             {gpu("")[:40], "must be one JSON object"},
		"trailing data":       {gpu("") + `{}`, "after the top-level value"},
		"too long":            {gpu(`"x":"` + strings.Repeat("a", maxBytes) + `"`), "parameters: Too long: may not be more than 10240 bytes"},
		"no version":          {`{"kind":"GpuConfig"}`, `apiVersion: Required value: must be "resource.nvidia.com/v1beta1"`},
		"other version":       {`{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`, `apiVersion: Unsupported value: "resource.nvidia.com/v1": supported values: "resource.nvidia.com/v1beta1"`},
		"no kind":             {`{"apiVersion":"resource.nvidia.com/v1beta1"}`, `kind: Required value: must be one of ["GpuConfig" "MigDeviceConfig"]`},
		"other kind":          {typed("VfioDeviceConfig", ""), `kind: Unsupported value: "VfioDeviceConfig": supported values: "GpuConfig", "MigDeviceConfig"`},
		"kind not text":       {`{"apiVersion":"resource.nvidia.com/v1beta1","kind":7}`, "kind: Invalid value: 7: must be a string, is a whole number"},
		"unknown field":       {gpu(`"shared":{}`), "invalid GpuConfig: shared: Invalid value: unknown field, known here: apiVersion, kind, sharing"},
		"nested":              {gpu(`"sharing":{"stategy":"MPS"}`), "sharing.stategy: Invalid value: unknown field, known here: mpsConfig, strategy, timeSlicingConfig"},
		"deeper":              {mig(`"sharing":{"strategy":"MPS","mpsConfig":{"percentage":3}}`), "sharing.mpsConfig.percentage: Invalid value: unknown field, known here: defaultActiveThreadPercentage,"},
		"other kind's":        {mig(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{}}`), "sharing.timeSlicingConfig: Invalid value: unknown field, known here: mpsConfig, strategy"},
		"wrong case":          {gpu(`"Sharing":{}`), "Sharing: Invalid value: unknown field"},
		"repeated":            {gpu(`"sharing":null,"sharing":{"strategy":"MPS"}`), "sharing: Invalid value: is given more than once"},
		"repeated kind":       {gpu(`"kind":"GpuConfig"`), "kind: Invalid value: is given more than once"},
		"repeated key":        {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi","0":"2Gi"}}}`), "defaultPerDevicePinnedMemoryLimit[0]: Invalid value: is given more than once"},
		"number for text":     {gpu(`"sharing":{"strategy":3}`), "sharing.strategy: Invalid value: 3: must be a string, is a whole number"},
		"text for number":     {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":"50"}}`), `sharing.mpsConfig.defaultActiveThreadPercentage: Invalid value: "50": must be a whole number, is a string`},
		"fraction":            {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50.5}}`), "Invalid value: 50.5: must be a whole number, is a number"},
		"text for object":     {gpu(`"sharing":"MPS"`), `sharing: Invalid value: "MPS": must be an object, is a string`},
		"object for limit":    {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":{}}}`), "defaultPinnedDeviceMemoryLimit: Invalid value: must be a string or a number, is an object"},
		"several at once":     {gpu(`"sharing":{"stategy":"MPS","mpsConfig":{"multiUser":1}}`), "[sharing.stategy: Invalid value: unknown field, known here: mpsConfig, strategy, timeSlicingConfig, sharing.mpsConfig.multiUser: Invalid value: 1: must be"},
		"number for priority": {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultClientPriority":1}}`), `sharing.mpsConfig.defaultClientPriority: Invalid value: 1: must be`},
		"text for boolean":    {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"multiUser":"yes"}}`), `sharing.mpsConfig.multiUser: Invalid value: "yes": must be true or false, is a string`},
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

func TestValidate(t *testing.T) {
	mps := func(fields string) string { return `"sharing":{"strategy":"MPS","mpsConfig":{` + fields + `}}` }
	for name, test := range map[string]struct {
		in   string
		want []string // none: valid
	}{
		"all intervals":           {in: gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}`)},
		"bounds":                  {in: gpu(mps(`"defaultActiveThreadPercentage":1`))},
		"upper bound":             {in: gpu(mps(`"defaultActiveThreadPercentage":100`))},
		"limits":                  {in: gpu(mps(`"defaultPinnedDeviceMemoryLimit":"1Mi","defaultPerDevicePinnedMemoryLimit":{"7":"1.5Gi","GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f":"80e9","MIG-0a1b2c3d-0000-0000-0000-000000000000":1048576}`))},
		"no strategy":             {gpu(`"sharing":{}`), []string{`sharing.strategy: Required value: must be "MPS" or "TimeSlicing"`}},
		"strategy unknown":        {gpu(`"sharing":{"strategy":"mps"}`), []string{`sharing.strategy: Unsupported value: "mps": supported values: "MPS", "TimeSlicing"`}},
		"interval unknown":        {gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"long"}}`), []string{`sharing.timeSlicingConfig.interval: Unsupported value: "long": supported values: "Default", "Short", "Medium", "Long"`}},
		"mps with time-slicing":   {gpu(`"sharing":{"strategy":"TimeSlicing","mpsConfig":{}}`), []string{`sharing.mpsConfig: Forbidden: may be set with strategy "MPS" only`}},
		"time-slicing with mps":   {gpu(`"sharing":{"strategy":"MPS","timeSlicingConfig":{}}`), []string{`sharing.timeSlicingConfig: Forbidden: may be set with strategy "TimeSlicing" only`}},
		"config without strategy": {gpu(`"sharing":{"timeSlicingConfig":{}}`), []string{`sharing.strategy: Required`, `sharing.timeSlicingConfig: Forbidden`}},
		"priority":                {in: mig(mps(`"defaultClientPriority":"Normal"`))},
		"priority unknown":        {gpu(mps(`"defaultClientPriority":"High"`)), []string{`sharing.mpsConfig.defaultClientPriority: Unsupported value: "High": supported values: "Normal", "BelowNormal"`}},
		"zero percent":            {in: gpu(mps(`"defaultActiveThreadPercentage":0`))}, // not set
		"negative percent":        {gpu(mps(`"defaultActiveThreadPercentage":-1`)), []string{`sharing.mpsConfig.defaultActiveThreadPercentage: Invalid value: -1: must be between 0 and 100`}},
		"over 100":                {mig(mps(`"defaultActiveThreadPercentage":101`)), []string{`Invalid value: 101: must be between 0 and 100`}},
		"little memory":           {mig(mps(`"defaultPinnedDeviceMemoryLimit":"1023Ki"`)), []string{`sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: Invalid value: "1023Ki": must be at least 1Mi`}},
		"not a quantity":          {gpu(mps(`"defaultPinnedDeviceMemoryLimit":"ten"`)), []string{`Invalid value: "ten": must be a quantity of memory`}},
		"negative":                {gpu(mps(`"defaultPinnedDeviceMemoryLimit":"-5Gi"`)), []string{`Invalid value: "-5Gi": must be a quantity of memory`}},
		"thousandths":             {gpu(mps(`"defaultPinnedDeviceMemoryLimit":"5m"`)), []string{`Invalid value: "5m": must be a quantity of memory`}},
		"boolean limit":           {gpu(mps(`"defaultPinnedDeviceMemoryLimit":true`)), []string{`Invalid value: "true": must be a quantity of memory`}},
		"vast exponent":           {gpu(mps(`"defaultPinnedDeviceMemoryLimit":"12345678901234567890e999999999"`)), []string{`must be a quantity of memory`}},
		"vast":                    {gpu(mps(`"defaultPinnedDeviceMemoryLimit":"1e99"`)), []string{`Invalid value: "1e99": must be less than 8Ei`}},
		"all that there can be":   {gpu(mps(`"defaultPinnedDeviceMemoryLimit":"8Ei"`)), []string{`Invalid value: "8Ei": must be less than 8Ei`}},
		"more than there can be":  {gpu(mps(`"defaultPerDevicePinnedMemoryLimit":{"0":"16Ei"}`)), []string{`defaultPerDevicePinnedMemoryLimit[0]: Invalid value: "16Ei": must be less than 8Ei`}},
		"null in map":             {gpu(mps(`"defaultPerDevicePinnedMemoryLimit":{"0":null}`)), []string{`defaultPerDevicePinnedMemoryLimit[0]: Invalid value: "null"`}},
		"all faults at once":      {gpu(mps(`"defaultActiveThreadPercentage":-1,"defaultPerDevicePinnedMemoryLimit":{"gpu0":"1","-1":"2Gi"}`)), []string{`Invalid value: -1: must be between`, `Invalid value: "-1": a key must be`, `Invalid value: "gpu0": a key must be`, `defaultPerDevicePinnedMemoryLimit[gpu0]: Invalid value: "1": must be at least 1Mi`}},
	} {
		t.Run(name, func(t *testing.T) {
			config, err := decode(test.in)
			if err != nil {
				t.Fatal(err)
			}
			err = config.Validate()
			if len(test.want) == 0 {
				if err != nil {
					t.Errorf("unexpected: %v", err)
				}
				return
			}
			for _, want := range test.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got  %v\nwant %s", err, want)
				}
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
		if c.OnlyClientPriority() != priority {
			t.Errorf("%s alone: %v", full.Type().Field(i).Name, !priority)
		}
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
