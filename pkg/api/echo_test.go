// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/partage-dev/partage/test/must"
)

// hostile are texts that somebody may write into a claim.
var hostile = map[string]string{
	"long":      strings.Repeat("A", 9000),
	"escapes":   "\x1b[31mred\x1b[0m\x07",
	"lines":     "x\nE1122 10:00:00.000000 1 main.go:1] \"forged\"\r\n",
	"direction": "\u202etxet\u2066",
	"quotes":    `" is valid; "`,
	"controls":  strings.Repeat("\x00\x7f\u009b", 700),
	"emoji":     strings.Repeat("\U0001f600", 2000),
}

// positions are all places of a configuration where a text of its author can be. %s is the
// text in JSON, quotes included.
var positions = map[string]string{
	"apiVersion":                `{"apiVersion":%s,"kind":"GpuConfig"}`,
	"kind":                      `{"apiVersion":"resource.nvidia.com/v1beta1","kind":%s}`,
	"all of it":                 `%s`,
	"list":                      `[%s]`,
	"field":                     gpu(`%s:1`),
	"field in sharing":          gpu(`"sharing":{%s:1}`),
	"field in mpsConfig":        gpu(`"sharing":{"strategy":"MPS","mpsConfig":{%s:1}}`),
	"field in timeSlicing":      gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{%s:1}}`),
	"field twice":               gpu(`%[1]s:1,%[1]s:2`),
	"sharing":                   gpu(`"sharing":%s`),
	"strategy":                  gpu(`"sharing":{"strategy":%s}`),
	"strategy of a partition":   mig(`"sharing":{"strategy":%s}`),
	"timeSlicingConfig":         gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":%s}`),
	"interval":                  gpu(`"sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":%s}}`),
	"mpsConfig":                 gpu(`"sharing":{"strategy":"MPS","mpsConfig":%s}`),
	"percentage":                gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":%s}}`),
	"multiUser":                 gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"multiUser":%s}}`),
	"limit":                     gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":%s}}`),
	"limit of a partition":      mig(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPinnedDeviceMemoryLimit":%s}}`),
	"limits":                    gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":%s}}`),
	"key of a limit":            gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{%s:"1Gi"}}}`),
	"key of a limit that fails": gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{%s:"1"}}}`),
	"key of an object":          gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{%s:{}}}}`),
	"key twice":                 gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{%[1]s:"1Gi",%[1]s:"2Gi"}}}`),
	"limit of a device":         gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{"0":%s}}}`),
	"after the document":        gpu(``) + `%s`,
	"not JSON":                  `{"apiVersion":%s`,
}

// checkEcho fails if a message says too much of what somebody else wrote.
func checkEcho(t *testing.T, message string) {
	t.Helper()
	if len(message) > maxMessage || !utf8.ValidString(message) {
		t.Errorf("%d bytes: %.300q", len(message), message)
	}
	if strings.ContainsFunc(message, func(r rune) bool { return !unicode.IsPrint(r) }) {
		t.Errorf("not printable: %.300q", message)
	}
}

// TestEcho: what is wrong with a configuration is said with little of it.
func TestEcho(t *testing.T) {
	t.Parallel()
	cases, refused := 0, 0
	for position, template := range positions {
		for kind, text := range hostile {
			cases++
			encoded := must.Get(json.Marshal(text))(t)
			config, err := decode(fmt.Sprintf(template, encoded))
			if err == nil {
				err = config.Validate()
			}
			if err == nil {
				t.Errorf("%s, %s: accepted", position, kind)
				continue
			}
			refused++
			checkEcho(t, err.Error())
			var invalid *InvalidError
			if !errors.As(err, &invalid) {
				t.Errorf("%s, %s: %T", position, kind, err)
				continue
			}
			for _, fault := range invalid.Unwrap() {
				checkEcho(t, fault.Error())
			}
		}
	}
	if t.Logf("%d cases", cases); refused != 27*7 {
		t.Errorf("%d cases, %d refused", cases, refused)
	}
}

// TestEchoOfKeys: those of limits are only known to be wrong when the devices are.
func TestEchoOfKeys(t *testing.T) {
	t.Parallel()
	devices := make([]string, 16)
	for i := range devices {
		devices[i] = fmt.Sprintf("GPU-0000000%x-0000-0000-0000-000000000000", i)
	}
	for kind, text := range hostile {
		for _, limit := range []MemoryLimit{"1Gi", MemoryLimit(text)} {
			config := &MPSConfig{DefaultPinnedDeviceMemoryLimit: &limit, DefaultPerDevicePinnedMemoryLimit: map[string]MemoryLimit{text: limit, text + "2": limit, "0": limit, "00": limit}}
			_, err := config.MemoryLimits(devices)
			if err == nil {
				t.Errorf("%s: accepted", kind)
				continue
			}
			checkEcho(t, err.Error())
		}
	}
}

// TestManyFaults: the first are named, and how many more there are.
func TestManyFaults(t *testing.T) {
	t.Parallel()
	var fields, keys []string
	for i := range 1200 {
		fields = append(fields, fmt.Sprintf(`"%s":1`, strconv.FormatInt(int64(i), 36)))
	}
	for i := range maxDevices {
		keys = append(keys, fmt.Sprintf(`"k%d":"1"`, i))
	}
	for name, test := range map[string]struct{ in, first, last string }{
		"fields": {gpu(strings.Join(fields, ",")), "[0: Invalid value: unknown field", ", and 1187 more"},
		"keys": {gpu(`"sharing":{"strategy":"MPS","mpsConfig":{"defaultPerDevicePinnedMemoryLimit":{` + strings.Join(keys, ",") + `}}}`),
			`defaultPerDevicePinnedMemoryLimit: Invalid value: "k0": a key must be`, ", and 57 more"},
	} {
		config, err := decode(test.in)
		if err == nil {
			err = config.Validate()
		}
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		checkEcho(t, err.Error())
		if text := err.Error(); !strings.Contains(text, test.first) || !strings.HasSuffix(text, test.last) {
			t.Errorf("%s: %s", name, text)
		}
	}
}
