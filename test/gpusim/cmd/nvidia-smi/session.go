// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

const libraryName = "libnvidia-ml.so.1"

// session is an initialized NVML.
type session struct{ lib nvml.Interface }

// open loads the library that lies beside this program, or else the one that
// the loader finds.
func open() (*session, error) {
	s := &session{lib: nvml.New(nvml.WithLibraryPath(libraryPath()))}
	switch ret := s.lib.Init(); ret {
	case nvml.SUCCESS:
		return s, nil
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return nil, fail(exitNoLibrary, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. "+
			"Please make sure that the NVIDIA Display Driver is properly installed and present in your system.\n"+
			"Please also try adding directory that contains libnvidia-ml.so to your system PATH.")
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return nil, fail(exitNoDriver, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "+
			"Make sure that the latest NVIDIA driver is installed and running.")
	default:
		return nil, fail(code(ret), "Failed to initialize NVML: %s", s.text(ret))
	}
}

func (s *session) close() { _ = s.lib.Shutdown() }

// libraryPath is ../lib/<triplet>/libnvidia-ml.so.1 as seen from the program. A
// container that has no loader cache may have the versioned name only.
func libraryPath() string {
	self, err := os.Executable()
	if err != nil {
		return libraryName
	}
	if real, err := filepath.EvalSymlinks(self); err == nil {
		self = real
	}
	for _, name := range []string{libraryName, "libnvidia-ml.so.*"} {
		if found, err := filepath.Glob(filepath.Join(filepath.Dir(self), "../lib/*", name)); err == nil && len(found) > 0 {
			return found[0]
		}
	}
	return libraryName
}

// text is the library's own description of a code.
func (s *session) text(ret nvml.Return) string { return s.lib.ErrorString(ret) }

// code is the exit code for an NVML code.
func code(ret nvml.Return) int {
	switch ret {
	case nvml.ERROR_INVALID_ARGUMENT:
		return exitUsage
	case nvml.ERROR_NOT_SUPPORTED:
		return exitNotSupported
	case nvml.ERROR_NO_PERMISSION:
		return exitPermission
	case nvml.ERROR_NOT_FOUND:
		return exitNotFound
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return exitNoDriver
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return exitNoLibrary
	case nvml.ERROR_GPU_IS_LOST:
		return exitLost
	}
	return exitOther
}

// gpu is a GPU that is visible and selected.
type gpu struct {
	nvml.Device
	index int
	uuid  string
	busID string // "00000000:1B:00.0"
}

// gpus are the GPUs that -i selects, in the order of their indexes.
func (s *session) gpus(c *command) ([]gpu, error) {
	count, ret := s.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fail(code(ret), "Unable to determine the number of GPUs: %s", s.text(ret))
	}
	var all []gpu
	for i := range count {
		g := gpu{index: i}
		var pci nvml.PciInfo
		g.Device, ret = s.lib.DeviceGetHandleByIndex(i)
		if ret == nvml.SUCCESS {
			g.uuid, ret = g.GetUUID()
		}
		if ret == nvml.ERROR_RESET_REQUIRED && c.verb == "-r" {
			ret = nvml.SUCCESS // this is for it
		}
		if ret == nvml.SUCCESS {
			pci, ret = g.GetPciInfo()
		}
		if ret != nvml.SUCCESS {
			return nil, fail(code(ret), "Unable to determine the device handle for GPU%d: %s", i, s.text(ret))
		}
		g.busID = strings.ToUpper(text(pci.BusId[:]))
		all = append(all, g)
	}
	if len(c.ids) > 0 {
		all = slices.DeleteFunc(all, func(g gpu) bool {
			return !slices.ContainsFunc(c.ids, g.is)
		})
	}
	if len(all) == 0 {
		if c.verb == "-L" {
			return nil, fail(exitNotFound, "No devices found.")
		}
		return nil, fail(exitNotFound, "No devices were found")
	}
	return all, nil
}

// is reports whether an argument of -i means this GPU.
func (g gpu) is(id string) bool {
	if parts := strings.Split(strings.ToUpper(id), ":"); len(parts) > 1 { // a bus id, with or without domain
		domain := ""
		if len(parts) == 3 {
			domain = parts[0]
		}
		return g.busID == fmt.Sprintf("%08s:%s", domain, strings.Join(parts[max(0, len(parts)-2):], ":"))
	}
	return id == strconv.Itoa(g.index) || id == g.uuid
}

// text reads a C string.
func text(c []int8) string {
	b := make([]byte, len(c))
	for i, v := range c {
		b[i] = byte(v)
	}
	b, _, _ = bytes.Cut(b, []byte{0})
	return string(b)
}

// migEnabled reports whether the GPU is in MIG mode now, and whether it can be.
func (g gpu) migEnabled() (enabled, supported bool) {
	current, _, ret := g.GetMigMode()
	return current == nvml.DEVICE_MIG_ENABLE, ret == nvml.SUCCESS
}

// profile is a GPU instance profile as the driver describes it.
type profile struct {
	enum int
	info nvml.GpuInstanceProfileInfo_v3
	name string // "MIG 1g.10gb"
}

// v1 is the form in which go-nvml wants a profile named.
func (p profile) v1() *nvml.GpuInstanceProfileInfo {
	return &nvml.GpuInstanceProfileInfo{Id: p.info.Id, InstanceCount: p.info.InstanceCount}
}

// profiles of a GPU in the order of nvidia-smi: by slices, then by kind.
func (g gpu) profiles() []profile {
	var out []profile
	for enum := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := g.GetGpuInstanceProfileInfoV(enum).V3()
		if ret != nvml.SUCCESS {
			continue
		}
		out = append(out, profile{enum, info, text(info.Name[:])})
	}
	slices.SortStableFunc(out, func(a, b profile) int {
		if d := int(a.info.SliceCount) - int(b.info.SliceCount); d != 0 {
			return d
		}
		return rank(a.enum) - rank(b.enum)
	})
	return out
}

// rank orders the kinds of profiles with the same slices: plain, +me, double
// memory, +gfx, +me.all, -me.
func rank(enum int) int {
	switch enum {
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:
		return 1
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2:
		return 2
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX, nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:
		return 3
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME:
		return 4
	case nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:
		return 5
	}
	return 0
}

// migDevices are the MIG devices of a GPU that are visible.
func (g gpu) migDevices() []nvml.Device {
	if enabled, _ := g.migEnabled(); !enabled {
		return nil
	}
	count, ret := g.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil
	}
	var out []nvml.Device
	for i := range count {
		if d, ret := g.GetMigDeviceHandleByIndex(i); ret == nvml.SUCCESS {
			out = append(out, d)
		}
	}
	return out
}

// migName is a MIG device's profile, "1g.10gb". The library has it at the end
// of the device's name.
func migName(d nvml.Device) string {
	name, ret := d.GetName()
	if ret != nvml.SUCCESS {
		return "Unknown"
	}
	_, short, found := strings.Cut(name, " MIG ")
	if !found {
		return fmt.Sprintf("%q", name)
	}
	return short
}
