// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// list is -L.
func list(s *session, gpus []gpu, _ *command, out io.Writer) error {
	for _, g := range gpus {
		name, ret := g.GetName()
		if ret != nvml.SUCCESS {
			return fail(code(ret), "Unable to read the name of GPU %s: %s", g.busID, s.text(ret))
		}
		fmt.Fprintf(out, "GPU %d: %s (UUID: %s)\n", g.index, name, g.uuid)
		for i, d := range g.migDevices() {
			uuid, ret := d.GetUUID()
			if ret != nvml.SUCCESS {
				return fail(code(ret), "Unable to read the UUID of MIG device %d of GPU %s: %s", i, g.busID, s.text(ret))
			}
			fmt.Fprintf(out, "  MIG %-11s Device %2d: (UUID: %s)\n", migName(d), i, uuid)
		}
	}
	return nil
}

var (
	brandNames = map[nvml.BrandType]string{
		nvml.BRAND_TESLA: "Tesla", nvml.BRAND_NVIDIA: "NVIDIA", nvml.BRAND_NVIDIA_RTX: "NVIDIA RTX",
	}
	architectureNames = map[nvml.DeviceArchitecture]string{
		nvml.DEVICE_ARCH_TURING: "Turing", nvml.DEVICE_ARCH_AMPERE: "Ampere", nvml.DEVICE_ARCH_ADA: "Ada Lovelace",
		nvml.DEVICE_ARCH_HOPPER: "Hopper", nvml.DEVICE_ARCH_BLACKWELL: "Blackwell",
	}
	addressingNames = map[uint32]string{
		uint32(nvml.DEVICE_ADDRESSING_MODE_NONE): "None",
		uint32(nvml.DEVICE_ADDRESSING_MODE_HMM):  "HMM",
		uint32(nvml.DEVICE_ADDRESSING_MODE_ATS):  "ATS",
	}
	computeModeNames = map[nvml.ComputeMode]string{
		nvml.COMPUTEMODE_DEFAULT: "Default", nvml.COMPUTEMODE_EXCLUSIVE_THREAD: "Exclusive_Thread",
		nvml.COMPUTEMODE_PROHIBITED: "Prohibited", nvml.COMPUTEMODE_EXCLUSIVE_PROCESS: "Exclusive_Process",
	}
)

// report writes the lines of -q: a key, indented by its depth, and a value.
type report struct{ out io.Writer }

func (r report) line(depth int, key, value string) {
	fmt.Fprintf(r.out, "%-41s : %s\n", strings.Repeat("    ", depth)+key, value)
}

func (r report) head(depth int, key string) {
	fmt.Fprintln(r.out, strings.Repeat("    ", depth)+key)
}

// value is what -q prints for something that was asked for.
func value[T any](v T, ret nvml.Return, print func(T) string) string {
	if ret != nvml.SUCCESS {
		return "N/A"
	}
	return print(v)
}

func word(s string) string { return s }
func named[K comparable](names map[K]string) func(K) string {
	return func(k K) string {
		if n, ok := names[k]; ok {
			return n
		}
		return "Unknown"
	}
}

func onOff(v int) string {
	if v == nvml.DEVICE_MIG_ENABLE {
		return "Enabled"
	}
	return "Disabled"
}

func mebibytes(bytes uint64) string { return fmt.Sprintf("%d MiB", bytes>>20) }

// query is -q, the part of it that is simulated.
func query(s *session, gpus []gpu, _ *command, out io.Writer) error {
	r := report{out}
	driver, ret := s.lib.SystemGetDriverVersion()
	cuda, cudaRet := s.lib.SystemGetCudaDriverVersion_v2()
	count, countRet := s.lib.DeviceGetCount()
	fmt.Fprint(out, "\n==============NVSMI LOG==============\n\n")
	r.line(0, "Timestamp", time.Now().Format("Mon Jan _2 15:04:05 2006"))
	r.line(0, "Driver Version", value(driver, ret, word))
	r.line(0, "CUDA Version", value(cuda, cudaRet, cudaVersion))
	fmt.Fprintln(out)
	r.line(0, "Attached GPUs", value(count, countRet, strconv.Itoa))
	for _, g := range gpus {
		r.head(0, "GPU "+g.busID)
		g.product(r)
		g.mig(r)
		g.identity(r)
		g.memory(r)
		g.use(r)
		fmt.Fprintln(out)
	}
	return nil
}

func (g gpu) product(r report) {
	name, ret := g.GetName()
	r.line(1, "Product Name", value(name, ret, word))
	brand, ret := g.GetBrand()
	r.line(1, "Product Brand", value(brand, ret, named(brandNames)))
	arch, ret := g.GetArchitecture()
	r.line(1, "Product Architecture", value(arch, ret, named(architectureNames)))
	mode, ret := g.GetAddressingMode()
	r.line(1, "Addressing Mode", value(mode.Value, ret, named(addressingNames)))
}

func (g gpu) mig(r report) {
	current, pending, ret := g.GetMigMode()
	r.head(1, "MIG Mode")
	r.line(2, "Current", value(current, ret, onOff))
	r.line(2, "Pending", value(pending, ret, onOff))
	devices := g.migDevices()
	if len(devices) == 0 {
		r.line(1, "MIG Device", "None")
	}
	for i, d := range devices {
		r.head(1, "MIG Device")
		r.line(2, "Index", strconv.Itoa(i))
		gi, ret := d.GetGpuInstanceId()
		r.line(2, "GPU Instance ID", value(gi, ret, strconv.Itoa))
		ci, ret := d.GetComputeInstanceId()
		r.line(2, "Compute Instance ID", value(ci, ret, strconv.Itoa))
		a, ret := d.GetAttributes()
		count := func(n uint32) string { return value(int(n), ret, strconv.Itoa) }
		r.head(2, "Device Attributes")
		r.head(3, "Shared")
		r.line(4, "Multiprocessor count", count(a.MultiprocessorCount))
		r.line(4, "Copy Engine count", count(a.SharedCopyEngineCount))
		r.line(4, "Encoder count", count(a.SharedEncoderCount))
		r.line(4, "Decoder count", count(a.SharedDecoderCount))
		r.line(4, "OFA count", count(a.SharedOfaCount))
		r.line(4, "JPG count", count(a.SharedJpegCount))
		memory(r, 2, d)
	}
}

func (g gpu) identity(r report) {
	serial, ret := g.GetSerial()
	r.line(1, "Serial Number", value(serial, ret, word))
	r.line(1, "GPU UUID", g.uuid)
	minor, ret := g.GetMinorNumber()
	r.line(1, "Minor Number", value(minor, ret, strconv.Itoa))
	r.head(1, "PCI")
	r.line(2, "Bus Id", g.busID)
}

func (g gpu) memory(r report) { memory(r, 1, g.Device) }

func memory(r report, depth int, d nvml.Device) {
	m, ret := d.GetMemoryInfo_v2()
	r.head(depth, "FB Memory Usage")
	r.line(depth+1, "Total", value(m.Total, ret, mebibytes))
	r.line(depth+1, "Reserved", value(m.Reserved, ret, mebibytes))
	r.line(depth+1, "Used", value(m.Used, ret, mebibytes))
	r.line(depth+1, "Free", value(m.Free, ret, mebibytes))
}

func (g gpu) use(r report) {
	mode, ret := g.GetComputeMode()
	r.line(1, "Compute Mode", value(mode, ret, named(computeModeNames)))
	processes, ret := g.GetComputeRunningProcesses()
	clients, clientsRet := g.GetMPSComputeRunningProcesses()
	if ret != nvml.SUCCESS || clientsRet != nvml.SUCCESS || len(processes)+len(clients) == 0 {
		r.line(1, "Processes", value(0, ret, func(int) string { return "None" }))
		return
	}
	r.head(1, "Processes")
	for _, p := range processes {
		r.process(p, "C")
	}
	for _, p := range clients {
		r.process(p, "M+C")
	}
}

func (r report) process(p nvml.ProcessInfo, kind string) {
	r.line(2, "GPU instance ID", instanceID(p.GpuInstanceId))
	r.line(2, "Compute instance ID", instanceID(p.ComputeInstanceId))
	r.line(2, "Process ID", strconv.FormatUint(uint64(p.Pid), 10))
	r.line(3, "Type", kind)
	r.line(3, "Used GPU Memory", mebibytes(p.UsedGpuMemory))
}

// instanceID is the id of an instance that a process is on.
func instanceID(n uint32) string {
	const none = 0xFFFFFFFF
	if n == none {
		return "N/A"
	}
	return strconv.FormatUint(uint64(n), 10)
}
