// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// Config is an opaque configuration for all requests of a claim.
type Config string

// Configurations for claims that own their devices.
const (
	GPUWithMPS Config = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{` +
		`"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"8Gi"}}}`
	PartitionWithMPS Config = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":{` +
		`"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"4Gi"}}}`
	GPUWithShortSlice Config = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing",` +
		`"timeSlicingConfig":{"interval":"Short"}}}`
)

const policyHeader = "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n"

// everythingPolicy offers all that GPUs can be, except for shares of partitions. Tests let
// GPUs fail more often than others do.
const everythingPolicy = policyHeader + "default: {mig: {variants: true}}\nhealth: {quietPeriod: 1s}\n"

// Policy writes a SharingPolicy and returns the flag that names it. Without it
// everything is offered.
func (n *Node) Policy(t testing.TB, text string) (flag string) {
	t.Helper()
	path := filepath.Join(filepath.Dir(n.Root), "policy.yaml")
	// As the kubelet does it: a reader has the old one or the new one.
	must.Do(t, os.WriteFile(path+".new", []byte(policyHeader+text), 0o600))
	must.Do(t, os.Rename(path+".new", path))
	return "--policy-file=" + path
}

// Interposer makes a library as an operator may have one, which limits nothing, and returns the flag that names it.
func (n *Node) Interposer(t testing.TB) (flag string) {
	t.Helper()
	library := must.Get(os.ReadFile(Built.Assets.CUDA))(t)
	path := filepath.Join(filepath.Dir(n.Root), "libvgpu.so")
	must.Do(t, os.WriteFile(path, library, 0o755))
	return "--interposer-library=" + path
}

// MPSConfig is the configuration of a claim that owns its GPUs and uses MPS on them.
func MPSConfig(settings string) Config {
	return Config(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{` + settings + `}}}`)
}

// PartitionSharesPolicy offers everything, and shares of some partitions.
const PartitionSharesPolicy = `default:
  mig:
    variants: true
    shares:
    - profiles: [1g.10gb, 3g.40gb]
      mps: {clients: 4}
      timeslice: {clients: 4}
`

// Values of nvmlComputeMode_t.
const (
	DefaultMode      = 0
	ExclusiveProcess = 3
)

// ClaimSpec is what a claim asks for.
type ClaimSpec struct {
	Devices []Device
	// Config is for all devices, if it is not empty.
	Config Config
}

// UsesMPS reports whether containers use this device of the claim through MPS.
func (c ClaimSpec) UsesMPS(d Device) bool {
	return d.Kind == MPS || d.Kind == "" && (c.Config == GPUWithMPS || c.Config == PartitionWithMPS)
}

// slice is the time slice that a device of the claim has.
func (c ClaimSpec) slice(d Device) int {
	switch {
	case d.Profile != "":
	case c.Config == GPUWithShortSlice:
		return ShortSlice
	case d.Kind == TimeSlice:
		return LongSlice
	}
	return DefaultSlice
}

// CheckModes fails unless a device that is there has the compute mode and the time
// slice that a claim's containers need. A partition cannot be for one process.
func CheckModes(c ClaimSpec, d Device, g *machine.GPU) error {
	want, got := DefaultMode, g.ComputeMode
	if c.UsesMPS(d) && d.Profile == "" {
		want = ExclusiveProcess
	}
	if d.Profile != "" {
		in := (Place{Profile: d.Profile, Start: d.Start}).Find(g)
		if in == nil || len(in.Compute) != 1 {
			return fmt.Errorf("its instance is %+v", in)
		}
		got = in.Compute[0].ComputeMode
	}
	if got != want {
		return fmt.Errorf("its compute mode is %d, want %d", got, want)
	}
	if want := c.slice(d); g.TimeSlice != want {
		return fmt.Errorf("the GPU's time slice is %d, want %d", g.TimeSlice, want)
	}
	return nil
}

// Values of a GPU's time slice.
const (
	DefaultSlice = iota
	ShortSlice
	MediumSlice
	LongSlice
)

// TimeSlicingConfig is the configuration of a claim that owns its GPUs and chooses
// their interval.
func TimeSlicingConfig(interval string) Config {
	return Config(fmt.Sprintf(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing",`+
		`"timeSlicingConfig":{"interval":%q}}}`, interval))
}
