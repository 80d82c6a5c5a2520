// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

const unknown = "Unknown"

// architectures are spelled as NVIDIA's DRA driver publishes them, because selectors in
// use compare with these strings.
var architectures = map[nvml.DeviceArchitecture]string{
	nvml.DEVICE_ARCH_KEPLER:    "Kepler",
	nvml.DEVICE_ARCH_MAXWELL:   "Maxwell",
	nvml.DEVICE_ARCH_PASCAL:    "Pascal",
	nvml.DEVICE_ARCH_VOLTA:     "Volta",
	nvml.DEVICE_ARCH_TURING:    "Turing",
	nvml.DEVICE_ARCH_AMPERE:    "Ampere",
	nvml.DEVICE_ARCH_ADA:       "Ada Lovelace",
	nvml.DEVICE_ARCH_HOPPER:    "Hopper",
	nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
	nvml.DEVICE_ARCH_RUBIN:     "Rubin",
}

// brands are spelled as NVIDIA's DRA driver publishes them.
var brands = map[nvml.BrandType]string{
	nvml.BRAND_QUADRO:              "Quadro",
	nvml.BRAND_TESLA:               "Tesla",
	nvml.BRAND_NVS:                 "NVS",
	nvml.BRAND_GRID:                "Grid",
	nvml.BRAND_GEFORCE:             "GeForce",
	nvml.BRAND_TITAN:               "Titan",
	nvml.BRAND_NVIDIA_VAPPS:        "NvidiaVApps",
	nvml.BRAND_NVIDIA_VPC:          "NvidiaVPC",
	nvml.BRAND_NVIDIA_VCS:          "NvidiaVCS",
	nvml.BRAND_NVIDIA_VWS:          "NvidiaVWS",
	nvml.BRAND_NVIDIA_CLOUD_GAMING: "NvidiaCloudGaming",
	nvml.BRAND_QUADRO_RTX:          "QuadroRTX",
	nvml.BRAND_NVIDIA_RTX:          "NvidiaRTX",
	nvml.BRAND_NVIDIA:              "Nvidia",
	nvml.BRAND_GEFORCE_RTX:         "GeForceRTX",
	nvml.BRAND_TITAN_RTX:           "TitanRTX",
}

// addressingModes has no name for values newer than this code: the attribute is then
// omitted, and no selector matches it by accident.
var addressingModes = map[uint32]string{
	uint32(nvml.DEVICE_ADDRESSING_MODE_NONE): "None",
	uint32(nvml.DEVICE_ADDRESSING_MODE_HMM):  "HMM",
	uint32(nvml.DEVICE_ADDRESSING_MODE_ATS):  "ATS",
}

// pciAddress converts NVML's bus id ("00000000:1B:00.0") to the kernel's spelling
// ("0000:1b:00.0"). The kernel prints four digits of the domain, or more for the
// larger numbers of some hypervisors.
func pciAddress(busID string) (string, error) {
	var domain, bus, device, function uint32
	if _, err := fmt.Sscanf(busID, "%x:%x:%x.%x", &domain, &bus, &device, &function); err != nil {
		return "", fmt.Errorf("PCI bus id %q: want domain:bus:device.function: %w", busID, err)
	}
	return fmt.Sprintf("%04x:%02x:%02x.%x", domain, bus, device, function), nil
}

// pciDeviceID formats NVML's combined number, device above vendor, as lspci -nn does:
// "10de:2330".
func pciDeviceID(combined uint32) string {
	if combined == 0 {
		return ""
	}
	return fmt.Sprintf("%04x:%04x", combined&0xffff, combined>>16)
}

// cString converts a zero-terminated string of the bindings.
func cString(chars []int8) string {
	var b strings.Builder
	for _, c := range chars {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}
