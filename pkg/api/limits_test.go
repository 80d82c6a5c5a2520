// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"errors"
	"strings"
	"testing"

	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

const (
	gpuA = "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"
	gpuB = "GPU-0a1b2c3d-0000-4000-8000-00000000000b"
	migC = "MIG-0a1b2c3d-0000-4000-8000-00000000000c"
)

func TestMPS(t *testing.T) {
	for name, test := range map[string]struct {
		in       string
		want     *MPSConfig
		interval Interval
	}{
		"nothing asked":                {in: gpu(""), interval: IntervalDefault},
		"nothing asked of a partition": {in: mig(""), interval: IntervalDefault},
		"time slices":                  {in: gpu(`"sharing":{"strategy":"TimeSlicing"}`), interval: IntervalDefault},
		"time slices of a partition":   {in: mig(`"sharing":{"strategy":"TimeSlicing"}`), interval: IntervalDefault},
		"short time slices":            {in: gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Short"}}`), interval: IntervalShort},
		"MPS":                          {gpu(`"sharing":{"strategy":"MPS"}`), &MPSConfig{}, IntervalDefault},
		"MPS on a partition":           {mig(`"sharing":{"strategy":"MPS","mpsConfig":{"multiUser":true}}`), &MPSConfig{MultiUser: ptr.To(true)}, IntervalDefault},
	} {
		t.Run(name, func(t *testing.T) {
			config := must.Get(decode(test.in))(t)
			expect.Same(t, config.MPS(), test.want, "MPS")
			expect.Same(t, config.Interval(), test.interval, "interval")
		})
	}
	// Made in Go, without what Decode fills in.
	if c := (&GpuConfig{Sharing: &GpuSharing{Strategy: MPS}}); c.MPS() == nil {
		t.Error("MPS without settings is no MPS")
	}
	if c := (&GpuConfig{Sharing: &GpuSharing{Strategy: TimeSlicing, TimeSlicingConfig: &TimeSlicingConfig{}}}); c.Interval() != IntervalDefault {
		t.Errorf("interval %q", c.Interval())
	}
}

func TestSettings(t *testing.T) {
	none := &MPSConfig{}
	if none.ThreadPercentage() != 0 || none.IsMultiUser() {
		t.Errorf("nothing set: %d, %v", none.ThreadPercentage(), none.IsMultiUser())
	}
	zero := &MPSConfig{DefaultActiveThreadPercentage: ptr.To(0)}
	expect.Same(t, zero.ThreadPercentage(), 0, "zero percent")
	all := &MPSConfig{DefaultActiveThreadPercentage: ptr.To(25), MultiUser: ptr.To(true)}
	if all.ThreadPercentage() != 25 || !all.IsMultiUser() {
		t.Errorf("all set: %d, %v", all.ThreadPercentage(), all.IsMultiUser())
	}
}

func TestMemoryLimits(t *testing.T) {
	limit := ptr.To[MemoryLimit]
	for name, test := range map[string]struct {
		config  MPSConfig
		devices []string
		want    map[string]int64
		err     []string // none: no error
	}{
		"none": {devices: []string{gpuA}, want: map[string]int64{}},
		"for all": {
			config:  MPSConfig{DefaultPinnedDeviceMemoryLimit: limit("10Gi")},
			devices: []string{gpuA, gpuB},
			want:    map[string]int64{gpuA: 10 << 30, gpuB: 10 << 30},
		},
		"by index": {
			config: MPSConfig{
				DefaultPinnedDeviceMemoryLimit:    limit("10Gi"),
				DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{"1": "5Gi"},
			},
			devices: []string{gpuA, gpuB},
			want:    map[string]int64{gpuA: 10 << 30, gpuB: 5 << 30},
		},
		"by UUID": {
			config: MPSConfig{
				DefaultPinnedDeviceMemoryLimit:    limit("10Gi"),
				DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{gpuA: "20Gi", strings.ToUpper(gpuB): "1Mi"},
			},
			devices: []string{gpuA, gpuB},
			want:    map[string]int64{gpuA: 20 << 30, gpuB: 1 << 20},
		},
		"one of two": {
			config:  MPSConfig{DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{"0": "5Gi"}},
			devices: []string{gpuA, gpuB},
			want:    map[string]int64{gpuA: 5 << 30},
		},
		"a partition": {
			config:  MPSConfig{DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{migC: "1G"}},
			devices: []string{migC},
			want:    map[string]int64{migC: 1_000_000_000},
		},
		"index and UUID of one device": {
			config:  MPSConfig{DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{"1": "5Gi", gpuB: "6Gi"}},
			devices: []string{gpuA, gpuB},
			err:     []string{`sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: Invalid value: "` + gpuB + `": names the same device as "1", which is ` + gpuB},
		},
		"one index in two spellings": {
			config:  MPSConfig{DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{"1": "5Gi", "01": "5Gi"}},
			devices: []string{gpuA, gpuB},
			err:     []string{`Invalid value: "1": names the same device as "01", which is ` + gpuB},
		},
		"every fault": {
			config: MPSConfig{DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{
				"2": "5Gi", migC: "6Gi", "all": "1Gi", "-1": "1Gi", "99999999999999999999": "1Gi", "0": "little",
			}},
			devices: []string{gpuA, gpuB},
			err: []string{
				`sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit: Invalid value: "-1": names no device of the claim, which has 0: ` + gpuA + `, 1: ` + gpuB,
				`Invalid value: "` + migC + `": names no device`, `Invalid value: "all": names no device`, `Invalid value: "2": names no device`,
				`Invalid value: "99999999999999999999": names no device`, `defaultPerDevicePinnedMemoryLimit[0]: Invalid value: "little": must be a quantity`,
			},
		},
		"no devices": {
			config: MPSConfig{DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{"0": "5Gi"}},
			err:    []string{`Invalid value: "0": names no device of the claim, which has none`},
		},
		"default that is no quantity": {
			config:  MPSConfig{DefaultPinnedDeviceMemoryLimit: limit("ten")},
			devices: []string{gpuA},
			err:     []string{`sharing.mpsConfig.defaultPinnedDeviceMemoryLimit: Invalid value: "ten"`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := test.config.MemoryLimits(test.devices)
			expect.Same(t, got, test.want, "limits")
			if len(test.err) == 0 && err != nil {
				t.Error(err)
			}
			var fault *InvalidError
			for _, want := range test.err {
				if !errors.As(err, &fault) || !strings.Contains(err.Error(), want) {
					t.Errorf("got  %v\nwant %s", err, want)
				}
			}
		})
	}
}
