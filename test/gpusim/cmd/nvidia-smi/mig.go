// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The tables are those of drivers from 570 on, which are two columns wider than
// earlier ones.
const (
	profilesHead = `+-------------------------------------------------------------------------------+
| GPU instance profiles:                                                        |
| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |
|                                Free/Total   GiB              CE    JPEG  OFA  |
|===============================================================================|
`
	profilesRule = `+-------------------------------------------------------------------------------+
`
	instancesHead = `+---------------------------------------------------------+
| GPU instances:                                          |
| GPU   Name               Profile  Instance   Placement  |
|                            ID       ID       Start:Size |
|=========================================================|
`
	instancesRule = `+---------------------------------------------------------+
`
	computeHead = `+--------------------------------------------------------------------+
| Compute instances:                                                 |
| GPU     GPU       Name             Profile   Instance   Placement  |
|       Instance                       ID        ID       Start:Size |
|         ID                                                         |
|====================================================================|
`
	computeRule = `+--------------------------------------------------------------------+
`
)

// supported are the GPUs that can be partitioned, enabled those that are in MIG
// mode. Both fail as the real tool does when there is none.
func supported(gpus []gpu) ([]gpu, error) {
	out := slices.DeleteFunc(slices.Clone(gpus), func(g gpu) bool { _, ok := g.migEnabled(); return !ok })
	if len(out) == 0 {
		return nil, fail(exitNotFound, "No MIG-supported devices found.")
	}
	return out, nil
}

func enabled(gpus []gpu) ([]gpu, error) {
	out := slices.DeleteFunc(slices.Clone(gpus), func(g gpu) bool { on, _ := g.migEnabled(); return !on })
	if len(out) == 0 {
		return nil, fail(exitNotFound, "No MIG-enabled devices found.")
	}
	return out, nil
}

// listProfiles is mig -lgip.
func listProfiles(_ *session, gpus []gpu, _ *command, out io.Writer) error {
	gpus, err := supported(gpus)
	if err != nil {
		return err
	}
	fmt.Fprint(out, profilesHead)
	for _, g := range gpus {
		for _, p := range g.profiles() {
			free, ret := g.GetGpuInstanceRemainingCapacity(p.v1())
			if ret != nvml.SUCCESS {
				free = 0 // MIG mode is off
			}
			fmt.Fprint(out, profileRow(g.index, p, free), profilesRule)
		}
	}
	return nil
}

func profileRow(index int, p profile, free int) string {
	i := p.info
	left := fmt.Sprintf("|%4d  %s", index, p.name)
	left = fmt.Sprintf("%-26s%3d     %d/%-8d %-10s No", left, i.Id, free, i.InstanceCount, fmt.Sprintf("%.2f", float64(i.MemorySizeMB)/1024))
	return fmt.Sprintf("%s     %-7d%-6d%-4d|\n|%63s%-6d%-6d%-4d|\n", left, i.MultiprocessorCount, i.DecoderCount, i.EncoderCount,
		"", i.CopyEngineCount, i.JpegCount, i.OfaCount)
}

// listPlacements is mig -lgipp.
func listPlacements(s *session, gpus []gpu, _ *command, out io.Writer) error {
	gpus, err := supported(gpus)
	if err != nil {
		return err
	}
	for _, g := range gpus {
		for _, p := range g.profiles() {
			at, ret := g.GetGpuInstancePossiblePlacements(p.v1())
			if ret != nvml.SUCCESS {
				return fail(code(ret), "Failed to display GPU instance possible placements: %s", s.text(ret))
			}
			starts := make([]string, len(at))
			for i, a := range at {
				starts[i] = fmt.Sprint(a.Start)
			}
			word, size := "Placements:", uint32(0)
			if len(at) == 1 {
				word = "Placement :"
			}
			if len(at) > 0 {
				size = at[0].Size
			}
			fmt.Fprintf(out, "GPU %2d Profile ID %2d %s {%s}:%d\n", g.index, p.info.Id, word, strings.Join(starts, ","), size)
		}
	}
	return nil
}

// instance is a GPU instance with its profile.
type instance struct {
	handle  nvml.GpuInstance
	info    nvml.GpuInstanceInfo
	profile profile
}

// instances of the GPUs, by GPU and then by profile and id, as nvidia-smi does.
func instances(s *session, gpus []gpu, what string) (map[int][]instance, error) {
	out := map[int][]instance{}
	for _, g := range gpus {
		for _, p := range g.profiles() {
			handles, ret := g.GetGpuInstances(p.v1())
			if ret != nvml.SUCCESS {
				return nil, fail(code(ret), "Failed to display %s: %s\nNo %s found: %s", what, s.text(ret), what, s.text(ret))
			}
			first := len(out[g.index])
			for _, h := range handles {
				info, ret := h.GetInfo()
				if ret != nvml.SUCCESS {
					return nil, fail(code(ret), "Failed to display %s: %s", what, s.text(ret))
				}
				out[g.index] = append(out[g.index], instance{h, info, p})
			}
			slices.SortFunc(out[g.index][first:], func(a, b instance) int { return cmp.Compare(a.info.Id, b.info.Id) })
		}
	}
	return out, nil
}

// listInstances is mig -lgi.
func listInstances(s *session, gpus []gpu, _ *command, out io.Writer) error {
	gpus, err := enabled(gpus)
	if err != nil {
		return err
	}
	const what = "GPU instances"
	all, err := instances(s, gpus, what)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return fail(exitNotFound, "No %s found: Not Found", what)
	}
	fmt.Fprint(out, instancesHead)
	for _, g := range gpus {
		for _, in := range all[g.index] {
			left := fmt.Sprintf("|%4d  %s", g.index, in.profile.name)
			fmt.Fprintf(out, "%-26s%5d%9d%13s     |\n%s", left, in.info.ProfileId, in.info.Id,
				fmt.Sprintf("%d:%d", in.info.Placement.Start, in.info.Placement.Size), instancesRule)
		}
	}
	return nil
}

// listComputeInstances is mig -lci.
func listComputeInstances(s *session, gpus []gpu, _ *command, out io.Writer) error {
	gpus, err := enabled(gpus)
	if err != nil {
		return err
	}
	const what = "compute instances"
	all, err := instances(s, gpus, what)
	if err != nil {
		return err
	}
	var rows []string
	for _, g := range gpus {
		for _, in := range all[g.index] {
			more, err := computeRows(s, g, in, what)
			if err != nil {
				return err
			}
			rows = append(rows, more...)
		}
	}
	if len(rows) == 0 {
		return fail(exitNotFound, "No %s found: Not Found", what)
	}
	fmt.Fprint(out, computeHead, strings.Join(rows, computeRule), computeRule)
	return nil
}

// computeInstance is a compute instance with its profile.
type computeInstance struct {
	handle  nvml.ComputeInstance
	info    nvml.ComputeInstanceInfo
	profile nvml.ComputeInstanceProfileInfo
}

// compute are the compute instances of a GPU instance, by profile.
func (in instance) compute(s *session, what string) ([]computeInstance, error) {
	var out []computeInstance
	for enum := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		p, ret := in.handle.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret != nvml.SUCCESS {
			continue
		}
		handles, ret := in.handle.GetComputeInstances(&p)
		if ret != nvml.SUCCESS {
			return nil, fail(code(ret), "Failed to display %s: %s", what, s.text(ret))
		}
		for _, h := range handles {
			info, ret := h.GetInfo()
			if ret != nvml.SUCCESS {
				return nil, fail(code(ret), "Failed to display %s: %s", what, s.text(ret))
			}
			out = append(out, computeInstance{h, info, p})
		}
	}
	return out, nil
}

// computeRows are the table's rows for one GPU instance.
func computeRows(s *session, g gpu, in instance, what string) ([]string, error) {
	all, err := in.compute(s, what)
	if err != nil {
		return nil, err
	}
	var rows []string
	for _, ci := range all {
		rows = append(rows, fmt.Sprintf("|%4d%7d       %-18s%4d%10d%13s     |\n", g.index, in.info.Id, in.computeName(ci.profile),
			ci.profile.Id, ci.info.Id, fmt.Sprintf("%d:%d", ci.info.Placement.Start, ci.info.Placement.Size)))
	}
	return rows, nil
}

// computeName is "MIG 1g.10gb", or "MIG 1c.3g.40gb" for a part of the instance.
func (in instance) computeName(p nvml.ComputeInstanceProfileInfo) string {
	if p.SliceCount >= in.profile.info.SliceCount {
		return in.profile.name
	}
	return fmt.Sprintf("MIG %dc.%s", p.SliceCount, strings.TrimPrefix(in.profile.name, "MIG "))
}
