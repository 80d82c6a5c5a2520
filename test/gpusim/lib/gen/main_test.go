// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/partage-dev/partage/test/expect"
)

func TestParse(t *testing.T) {
	header := `
/* nvmlReturn_t DECLDIR nvmlInBlockComment(void); */
// nvmlReturn_t DECLDIR nvmlInLineComment(void);
const DECLDIR char* nvmlErrorString(nvmlReturn_t result);
nvmlReturn_t DECLDIR nvmlInit_v2(void);
DEPRECATED(13.0) nvmlReturn_t DECLDIR nvmlOld(nvmlDevice_t device);
nvmlReturn_t DECLDIR nvmlLong(nvmlDevice_t device, //!< which
                              unsigned int *count);
nvmlReturn_t DECLDIR nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device);
nvmlReturn_t DECLDIR nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device);
nvmlReturn_t DECLDIR nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device);
nvmlReturn_t DECLDIR nvmlGet(unsigned int a, nvmlGpuInstance_t g, nvmlDevice_t d, nvmlComputeInstance_t *c);
typedef nvmlReturn_t (*nvmlCallback)(void);
`
	got := parse(header)
	want := map[string]string{
		"nvmlInit_v2":                   "void",
		"nvmlOld":                       "nvmlDevice_t device",
		"nvmlLong":                      "nvmlDevice_t device, unsigned int *count",
		"nvmlDeviceGetHandleByIndex_v2": "unsigned int index, nvmlDevice_t *device",
		"nvmlDeviceGetHandleByUUID":     "const char *uuid, nvmlDevice_t *device",
		"nvmlDeviceGetHandleByUUIDV":    "const nvmlUUID_t *uuid, nvmlDevice_t *device",
		"nvmlGet":                       "unsigned int a, nvmlGpuInstance_t g, nvmlDevice_t d, nvmlComputeInstance_t *c",
	}
	expect.Same(t, got, want, "functions")
	text := string(calls(got)) + string(models(got))
	for _, line := range []string{
		"CALL(nvmlInit_v2, (void), (), NULL, NULL)",
		"CALL(nvmlLong, (nvmlDevice_t device, unsigned int *count), (device, count), gpu_of_handle, device.handle)",
		"CALL(nvmlDeviceGetHandleByIndex_v2, (unsigned int index, nvmlDevice_t *device), (index, device), gpu_of_index, &index)",
		"CALL(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device), (uuid, device), gpu_of_uuid, uuid)",
		"CALL(nvmlDeviceGetHandleByUUIDV, (const nvmlUUID_t *uuid, nvmlDevice_t *device), (uuid, device), gpu_of_typed_uuid, uuid)",
		"CALL(nvmlGet, (unsigned int a, nvmlGpuInstance_t g, nvmlDevice_t d, nvmlComputeInstance_t *c), (a, g, d, c), gpu_of_handle, g.handle)",
		"#define nvmlLong model_nvmlLong",
	} {
		expect.Contains(t, text, line+"\n", "no line", line, "in")
	}
}
