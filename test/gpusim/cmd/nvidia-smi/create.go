// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// What succeeds is worded as in published transcripts, and so is an instance
// that is in use or has no room. The words for other failures are assumed.

// createInstances is mig -cgi: one GPU instance of each named profile on each
// GPU, and with -C the compute instance that spans it.
func createInstances(s *session, gpus []gpu, c *command, out io.Writer) error {
	gpus, err := enabled(gpus)
	if err != nil {
		return err
	}
	for _, g := range gpus {
		for _, wanted := range strings.Split(c.value, ",") {
			in, err := createInstance(s, g, wanted)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "Successfully created GPU instance ID %2d on GPU %2d using profile %s (ID %2d)\n",
				in.info.Id, g.index, in.profile.name, in.info.ProfileId)
			if !c.compute {
				continue
			}
			if err := createCompute(s, g, in, out); err != nil {
				return err
			}
		}
	}
	return nil
}

// createInstance makes one GPU instance; wanted is PROFILE or PROFILE:START.
func createInstance(s *session, g gpu, wanted string) (instance, error) {
	name, start, placed := strings.Cut(wanted, ":")
	failed := func(ret nvml.Return) error {
		return fail(code(ret), "Unable to create a GPU instance on GPU %2d using profile %s: %s\nFailed to create GPU instances: %s",
			g.index, name, s.text(ret), s.text(ret))
	}
	all := g.profiles()
	i := slices.IndexFunc(all, func(p profile) bool {
		return name == strconv.Itoa(int(p.info.Id)) || strings.TrimPrefix(name, "MIG ") == strings.TrimPrefix(p.name, "MIG ")
	})
	if i < 0 {
		return instance{}, failed(nvml.ERROR_INVALID_ARGUMENT)
	}
	in := instance{profile: all[i]}
	var ret nvml.Return
	if placed {
		at, ok := in.profile.placement(g, start)
		if !ok {
			return instance{}, failed(nvml.ERROR_INVALID_ARGUMENT)
		}
		in.handle, ret = g.CreateGpuInstanceWithPlacement(in.profile.v1(), &at)
	} else {
		in.handle, ret = g.CreateGpuInstance(in.profile.v1())
	}
	if ret == nvml.SUCCESS {
		in.info, ret = in.handle.GetInfo()
	}
	if ret != nvml.SUCCESS {
		return instance{}, failed(ret)
	}
	return in, nil
}

// placement is the possible one of a profile that starts at the given slice.
func (p profile) placement(g gpu, start string) (nvml.GpuInstancePlacement, bool) {
	all, ret := g.GetGpuInstancePossiblePlacements(p.v1())
	if ret != nvml.SUCCESS {
		return nvml.GpuInstancePlacement{}, false
	}
	i := slices.IndexFunc(all, func(at nvml.GpuInstancePlacement) bool { return strconv.Itoa(int(at.Start)) == start })
	if i < 0 {
		return nvml.GpuInstancePlacement{}, false
	}
	return all[i], true
}

// createCompute makes the compute instance that has all of a GPU instance.
func createCompute(s *session, g gpu, in instance, out io.Writer) error {
	ret := nvml.ERROR_NOT_SUPPORTED
	for enum := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		p, found := in.handle.GetComputeInstanceProfileInfo(enum, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if found != nvml.SUCCESS || p.SliceCount != in.profile.info.SliceCount {
			continue
		}
		var ci nvml.ComputeInstance
		var info nvml.ComputeInstanceInfo
		if ci, ret = in.handle.CreateComputeInstance(&p); ret == nvml.SUCCESS {
			info, ret = ci.GetInfo()
		}
		if ret == nvml.SUCCESS {
			fmt.Fprintf(out, "Successfully created compute instance ID %2d on GPU %2d GPU instance ID %2d using profile %s (ID %2d)\n",
				info.Id, g.index, in.info.Id, in.computeName(p), p.Id)
			return nil
		}
		break
	}
	return fail(code(ret), "Unable to create a compute instance on GPU %2d GPU instance ID %2d: %s\nFailed to create compute instances: %s",
		g.index, in.info.Id, s.text(ret), s.text(ret))
}

// selected reports whether an id is in a list, where an empty list is all.
func selected(list []string, id uint32) bool {
	return len(list) == 0 || slices.Contains(list, strconv.Itoa(int(id)))
}

// destroyInstances is mig -dgi.
func destroyInstances(s *session, gpus []gpu, c *command, out io.Writer) error {
	const what = "GPU instances"
	return eachInstance(s, gpus, c, what, func(g gpu, in instance) (int, error) {
		if ret := in.handle.Destroy(); ret != nvml.SUCCESS {
			return 0, fail(code(ret), "Unable to destroy GPU instance ID %2d from GPU %2d: %s\nFailed to destroy %s: %s",
				in.info.Id, g.index, s.text(ret), what, s.text(ret))
		}
		fmt.Fprintf(out, "Successfully destroyed GPU instance ID %2d from GPU %2d\n", in.info.Id, g.index)
		return 1, nil
	})
}

// destroyComputeInstances is mig -dci.
func destroyComputeInstances(s *session, gpus []gpu, c *command, out io.Writer) error {
	const what = "compute instances"
	return eachInstance(s, gpus, c, what, func(g gpu, in instance) (int, error) {
		all, err := in.compute(s, what)
		if err != nil {
			return 0, err
		}
		n := 0
		for _, ci := range all {
			if !selected(c.computes, ci.info.Id) {
				continue
			}
			if ret := ci.handle.Destroy(); ret != nvml.SUCCESS {
				return n, fail(code(ret), "Unable to destroy compute instance ID %2d from GPU %2d GPU instance ID %2d: %s\nFailed to destroy %s: %s",
					ci.info.Id, g.index, in.info.Id, s.text(ret), what, s.text(ret))
			}
			n++
			fmt.Fprintf(out, "Successfully destroyed compute instance ID %2d from GPU %2d GPU instance ID %2d\n", ci.info.Id, g.index, in.info.Id)
		}
		return n, nil
	})
}

// eachInstance calls do with the GPU instances that -gi selects. It fails if
// what was done adds up to nothing.
func eachInstance(s *session, gpus []gpu, c *command, what string, do func(gpu, instance) (int, error)) error {
	gpus, err := enabled(gpus)
	if err != nil {
		return err
	}
	all, err := instances(s, gpus, what)
	if err != nil {
		return err
	}
	done := 0
	for _, g := range gpus {
		for _, in := range all[g.index] {
			if !selected(c.instances, in.info.Id) {
				continue
			}
			n, err := do(g, in)
			if err != nil {
				return err
			}
			done += n
		}
	}
	if done == 0 {
		return fail(exitNotFound, "No %s found: Not Found", what)
	}
	return nil
}
