// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The tables are those that drivers 555 to 580 print. What is not simulated, such as
// temperatures, is N/A.
const (
	summaryHead = `+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
`
	summaryRule = "+-----------------------------------------+------------------------+----------------------+\n"

	wideRule = "+-----------------------------------------------------------------------------------------+\n"

	devicesHead = wideRule + `| MIG devices:                                                                            |
+------------------+----------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         |
|      ID  ID  Dev |                       BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |
|                  |                                  |        ECC|                       |
|==================+==================================+===========+=======================|
`
	devicesRule = "+------------------+----------------------------------+-----------+-----------------------+\n"

	processesHead = wideRule + `| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
`
)

// summary is nvidia-smi without arguments.
func summary(s *session, gpus []gpu, _ *command, out io.Writer) error {
	driver, ret := s.lib.SystemGetDriverVersion()
	version := value(driver, ret, word)
	cuda, ret := s.lib.SystemGetCudaDriverVersion_v2()
	fmt.Fprintln(out, time.Now().Format("Mon Jan _2 15:04:05 2006")+"       ")
	fmt.Fprintf(out, wideRule+"| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %-8s |\n"+summaryHead, version, version,
		value(cuda, ret, cudaVersion))
	divided := false
	for _, g := range gpus {
		g.summary(out)
		divided = divided || len(g.migDevices()) > 0
	}
	fmt.Fprintln(out)
	if divided {
		fmt.Fprint(out, devicesHead)
		for _, g := range gpus {
			g.summaryDevices(out)
		}
		fmt.Fprintln(out)
	}
	fmt.Fprint(out, processesHead)
	any := false
	for _, g := range gpus {
		any = s.summaryProcesses(g, out) || any
	}
	if !any {
		fmt.Fprintf(out, "|  %-87s|\n", "No running processes found")
	}
	fmt.Fprint(out, wideRule)
	return nil
}

func cudaVersion(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

func (g gpu) summary(out io.Writer) {
	name, ret := g.GetName()
	persistence, persistenceRet := g.GetPersistenceMode()
	row := func(left, middle, right string) { fmt.Fprintf(out, "| %-39s | %22s | %20s |\n", left, middle, right) }
	ecc, _, eccRet := g.GetEccMode()
	row(fmt.Sprintf("%3d  %-28.28s%6s", g.index, value(name, ret, word), value(persistence, persistenceRet, shortOnOff)),
		g.busID+" Off", value(ecc, eccRet, func(e nvml.EnableState) string {
			if e == nvml.FEATURE_ENABLED {
				return "0"
			}
			return "Off"
		}))
	memory, ret := g.GetMemoryInfo_v2()
	mode, modeRet := g.GetComputeMode()
	row("N/A   N/A    N/A            N/A /  N/A", value(memory, ret, used), fmt.Sprintf("%8s %11s", "N/A",
		shortMode.Replace(value(mode, modeRet, named(computeModeNames)))))
	current, _, ret := g.GetMigMode()
	row("", "", value(current, ret, onOff))
	fmt.Fprint(out, summaryRule)
}

// shortMode makes the name of a compute mode fit.
var shortMode = strings.NewReplacer("Exclusive_", "E. ")

func shortOnOff(e nvml.EnableState) string {
	if e == nvml.FEATURE_ENABLED {
		return "On"
	}
	return "Off"
}

func used(m nvml.Memory_v2) string { return fmt.Sprintf("%7dMiB / %6dMiB", m.Used>>20, m.Total>>20) }

func (g gpu) summaryDevices(out io.Writer) {
	for i, d := range g.migDevices() {
		gi, ret := d.GetGpuInstanceId()
		ci, ciRet := d.GetComputeInstanceId()
		m, memoryRet := d.GetMemoryInfo_v2()
		a, attributesRet := d.GetAttributes()
		number := func(n int) string { return fmt.Sprint(n) }
		count := func(n uint32) string { return value(int(n), attributesRet, number) }
		fmt.Fprintf(out, "|%3d %4s %3s %3d  | %32s | %3s%6s | %2s %2s %4s %4s %4s  |\n",
			g.index, value(gi, ret, number), value(ci, ciRet, number), i, value(m, memoryRet, used), count(a.MultiprocessorCount), "0",
			count(a.SharedCopyEngineCount), count(a.SharedEncoderCount), count(a.SharedDecoderCount), count(a.SharedOfaCount), count(a.SharedJpegCount))
		fmt.Fprintf(out, "|                  | %32s |           |                       |\n"+devicesRule, "N/A")
	}
}

// summaryProcesses reports whether there are any.
func (s *session) summaryProcesses(g gpu, out io.Writer) bool {
	processes, _ := g.GetComputeRunningProcesses()
	clients, _ := g.GetMPSComputeRunningProcesses()
	for _, p := range processes {
		s.summaryProcess(g, p, "C", out)
	}
	for _, p := range clients {
		s.summaryProcess(g, p, "M+C", out)
	}
	return len(processes)+len(clients) > 0
}

func (s *session) summaryProcess(g gpu, p nvml.ProcessInfo, kind string, out io.Writer) {
	fmt.Fprintf(out, "|%5d %5s %4s %16d %6s   %-33s %11s |\n", g.index, instanceID(p.GpuInstanceId), instanceID(p.ComputeInstanceId),
		p.Pid, kind, shortName(s.processName(p.Pid)), fmt.Sprintf("%dMiB", p.UsedGpuMemory>>20))
}

// processName is the library's name of a process.
func (s *session) processName(pid uint32) string {
	name, ret := s.lib.SystemGetProcessName(int(pid))
	if ret != nvml.SUCCESS {
		return "[Not Found]"
	}
	return name
}

// shortName keeps the end of a name that does not fit, as the real tool does.
func shortName(name string) string {
	const most = 33
	if len(name) <= most {
		return name
	}
	return "..." + name[len(name)-most+3:]
}

// versions is nvidia-smi --version, which asks for no GPU.
func (s *session) versions(out io.Writer) error {
	driver, ret := s.lib.SystemGetDriverVersion()
	version := value(driver, ret, word)
	library, ret := s.lib.SystemGetNVMLVersion()
	cuda, cudaRet := s.lib.SystemGetCudaDriverVersion_v2()
	// NVML's own version, 13.580.95.05, has CUDA's in front. Of the rest two numbers are printed.
	if parts := strings.Split(library, "."); len(parts) > 2 {
		library = parts[1] + "." + parts[2]
	}
	fmt.Fprintf(out, "NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\nCUDA Version        : %s\n",
		version, value(library, ret, word), version, value(cuda, cudaRet, cudaVersion))
	return nil
}
