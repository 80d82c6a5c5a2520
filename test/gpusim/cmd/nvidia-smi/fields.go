// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// field is a column that can be asked for: nvidia-smi --help-query-gpu and
// --help-query-compute-apps have their names.
type field[T any] struct {
	names []string // the first is what the head line has
	unit  string   // "" if it has none
	value func(s *session, of T) string
}

// unknown is what the real tool prints for values that there are not.
const unknown = "[N/A]"

// cell is the text of a value, or what the real tool prints in its place.
func cell[V any](v V, ret nvml.Return, print func(V) string) string {
	switch ret {
	case nvml.SUCCESS:
		return print(v)
	case nvml.ERROR_NO_PERMISSION:
		return "[Insufficient Permissions]"
	case nvml.ERROR_GPU_IS_LOST:
		return "[GPU is lost]"
	}
	return unknown
}

func timestampField[T any]() field[T] {
	return field[T]{[]string{"timestamp"}, "", func(*session, T) string { return time.Now().Format("2006/01/02 15:04:05.000") }}
}

func memoryField(name string, of func(nvml.Memory_v2) uint64) field[gpu] {
	return field[gpu]{[]string{name}, "MiB", func(_ *session, g gpu) string {
		m, ret := g.GetMemoryInfo_v2()
		return cell(of(m), ret, inMiB)
	}}
}

func inMiB(bytes uint64) string { return strconv.FormatUint(bytes>>20, 10) }

func migField(name string, of func(current, pending int) int) field[gpu] {
	return field[gpu]{[]string{name}, "", func(_ *session, g gpu) string {
		current, pending, ret := g.GetMigMode()
		return cell(of(current, pending), ret, onOff)
	}}
}

func longOnOff(e nvml.EnableState) string { return onOff(int(e)) }

var gpuFields = []field[gpu]{
	timestampField[gpu](),
	{[]string{"driver_version"}, "", func(s *session, _ gpu) string {
		v, ret := s.lib.SystemGetDriverVersion()
		return cell(v, ret, word)
	}},
	{[]string{"count"}, "", func(s *session, _ gpu) string {
		n, ret := s.lib.DeviceGetCount()
		return cell(n, ret, strconv.Itoa)
	}},
	{[]string{"name", "gpu_name"}, "", func(_ *session, g gpu) string {
		v, ret := g.GetName()
		return cell(v, ret, word)
	}},
	{[]string{"serial", "gpu_serial"}, "", func(_ *session, g gpu) string {
		v, ret := g.GetSerial()
		return cell(v, ret, word)
	}},
	{[]string{"uuid", "gpu_uuid"}, "", func(_ *session, g gpu) string { return g.uuid }},
	{[]string{"pci.bus_id", "gpu_bus_id"}, "", func(_ *session, g gpu) string { return g.busID }},
	{[]string{"pci.device_id"}, "", func(_ *session, g gpu) string {
		v, ret := g.GetPciInfo()
		return cell(v.PciDeviceId, ret, func(id uint32) string { return fmt.Sprintf("0x%08X", id) })
	}},
	{[]string{"index"}, "", func(_ *session, g gpu) string { return strconv.Itoa(g.index) }},
	{[]string{"persistence_mode"}, "", func(_ *session, g gpu) string {
		v, ret := g.GetPersistenceMode()
		return cell(v, ret, longOnOff)
	}},
	{[]string{"addressing_mode"}, "", func(_ *session, g gpu) string {
		v, ret := g.GetAddressingMode()
		return cell(v.Value, ret, named(addressingNames))
	}},
	{[]string{"compute_cap"}, "", func(_ *session, g gpu) string {
		major, minor, ret := g.GetCudaComputeCapability()
		return cell(fmt.Sprintf("%d.%d", major, minor), ret, word)
	}},
	{[]string{"compute_mode"}, "", func(_ *session, g gpu) string {
		v, ret := g.GetComputeMode()
		return cell(v, ret, named(computeModeNames))
	}},
	{[]string{"ecc.mode.current"}, "", func(_ *session, g gpu) string {
		v, _, ret := g.GetEccMode()
		return cell(v, ret, longOnOff)
	}},
	migField("mig.mode.current", func(current, _ int) int { return current }),
	migField("mig.mode.pending", func(_, pending int) int { return pending }),
	memoryField("memory.total", func(m nvml.Memory_v2) uint64 { return m.Total }),
	memoryField("memory.reserved", func(m nvml.Memory_v2) uint64 { return m.Reserved }),
	memoryField("memory.used", func(m nvml.Memory_v2) uint64 { return m.Used }),
	memoryField("memory.free", func(m nvml.Memory_v2) uint64 { return m.Free }),
}

// application is a process with a context on a GPU.
type application struct {
	gpu
	nvml.ProcessInfo
}

// ofGPU makes a field of a process of one of its GPU.
func ofGPU(names ...string) field[application] {
	at := slices.IndexFunc(gpuFields, func(f field[gpu]) bool { return slices.Contains(f.names, names[0]) })
	f := gpuFields[at]
	return field[application]{names, f.unit, func(s *session, a application) string { return f.value(s, a.gpu) }}
}

var applicationFields = []field[application]{
	timestampField[application](),
	ofGPU("gpu_name"), ofGPU("gpu_bus_id"), ofGPU("gpu_serial"), ofGPU("gpu_uuid"),
	{[]string{"pid"}, "", func(_ *session, a application) string { return strconv.FormatUint(uint64(a.Pid), 10) }},
	{[]string{"process_name", "name"}, "", func(s *session, a application) string { return s.processName(a.Pid) }},
	{[]string{"used_gpu_memory", "used_memory"}, "MiB", func(_ *session, a application) string { return inMiB(a.UsedGpuMemory) }},
}

// format is the value of --format.
type format struct{ header, units bool }

func formatOf(text string) (format, error) {
	f := format{header: true, units: true}
	csv := false
	for option := range strings.SplitSeq(text, ",") {
		switch option {
		case "csv":
			csv = true
		case "noheader":
			f.header = false
		case "nounits":
			f.units = false
		default:
			return f, errCombination
		}
	}
	if !csv {
		return f, errCombination
	}
	return f, nil
}

// queryGPU is --query-gpu.
func queryGPU(s *session, gpus []gpu, c *command, out io.Writer) error {
	return printFields(s, gpuFields, gpus, c, out)
}

// queryApplications is --query-compute-apps.
func queryApplications(s *session, gpus []gpu, c *command, out io.Writer) error {
	var all []application
	for _, g := range gpus {
		for _, list := range []func() ([]nvml.ProcessInfo, nvml.Return){g.GetComputeRunningProcesses, g.GetMPSComputeRunningProcesses} {
			found, _ := list()
			for _, p := range found {
				all = append(all, application{g, p})
			}
		}
	}
	return printFields(s, applicationFields, all, c, out)
}

func printFields[T any](s *session, known []field[T], rows []T, c *command, out io.Writer) error {
	f, err := formatOf(c.format)
	if err != nil {
		return err
	}
	var chosen []field[T]
	var heads []string
	for name := range strings.SplitSeq(c.value, ",") {
		name = strings.TrimSpace(name)
		at := slices.IndexFunc(known, func(f field[T]) bool { return slices.Contains(f.names, name) })
		if at < 0 {
			return fail(exitUsage, "Field \"%s\" is not a valid field to query.\n", name)
		}
		chosen = append(chosen, known[at])
		head := known[at].names[0]
		if unit := known[at].unit; unit != "" {
			head += " [" + unit + "]"
		}
		heads = append(heads, head)
	}
	if f.header {
		fmt.Fprintln(out, strings.Join(heads, ", "))
	}
	for _, row := range rows {
		var cells []string
		for _, column := range chosen {
			text := column.value(s, row)
			if column.unit != "" && f.units && !strings.HasPrefix(text, "[") {
				text += " " + column.unit
			}
			cells = append(cells, text)
		}
		fmt.Fprintln(out, strings.Join(cells, ", "))
	}
	return nil
}
