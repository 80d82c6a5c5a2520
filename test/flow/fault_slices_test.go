// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
)

// published are the devices of all slices, by name.
func (n *node) published() map[string]resourceapi.Device {
	devices := map[string]resourceapi.Device{}
	for _, slice := range n.api.Slices() {
		for _, d := range slice.Spec.Devices {
			devices[d.Name] = d
		}
	}
	return devices
}

// tainted are the names of the published devices that have a taint with this
// reason, sorted.
func (n *node) tainted(reason string) []string {
	var names []string
	for name, d := range n.published() {
		if slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
			return t.Key == driverName+"/"+reason && t.Effect == resourceapi.DeviceTaintEffectNoSchedule
		}) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// untilTainted waits until exactly these devices are tainted with a reason.
func (p *process) untilTainted(t testing.TB, n *node, reason string, want []string) {
	t.Helper()
	slices.Sort(want)
	p.until(t, "the taints "+reason, func(context.Context) error {
		if diff := cmp.Diff(want, n.tainted(reason)); diff != "" {
			return fmt.Errorf("tainted devices (-want +got):\n%s", diff)
		}
		return nil
	})
}

// untilPublished waits until exactly the devices of these GPUs are published,
// whole or partitions.
func (p *process) untilPublished(t testing.TB, n *node, gpus ...int) {
	t.Helper()
	var want []string
	for _, gpu := range gpus {
		want = append(want, deviceName(n.address(t, gpu), place{}))
	}
	slices.Sort(want)
	p.until(t, "the devices of GPUs", func(context.Context) error {
		var got []string
		for name := range n.published() {
			if gpu, _, partition := strings.Cut(baseName(name), "-mig-"); !partition {
				got = append(got, gpu)
			}
		}
		slices.Sort(got)
		got = slices.Compact(got)
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("GPUs (-want +got):\n%s", diff)
		}
		return nil
	})
}

// baseName is what a share is a share of.
func baseName(device string) string {
	for _, k := range []kind{asMPS, asTimeSlice} {
		device = strings.TrimSuffix(device, "-"+string(k))
	}
	return device
}

// overlapping are the names of all devices of a GPU that overlap with some of
// its memory slices, the whole GPU and shares of it included.
func (n *node) overlapping(t testing.TB, gpu, start, size int) []string {
	t.Helper()
	g := n.machine(t).GPUs[gpu]
	whole := deviceName(g.PCIAddress, place{})
	names := []string{whole, whole + "-" + string(asMPS), whole + "-" + string(asTimeSlice)}
	for _, p := range g.MIG.Profiles {
		for _, at := range p.Placements {
			if at.Start < start+size && start < at.Start+at.Size {
				names = append(names, deviceName(g.PCIAddress, place{p.Name, at.Start}))
			}
		}
	}
	return names
}

// devicesOf are the names of all published devices of a GPU.
func (n *node) devicesOf(t testing.TB, gpu int) []string {
	t.Helper()
	prefix := deviceName(n.address(t, gpu), place{})
	var names []string
	for name := range n.published() {
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	return names
}

// untilEvent waits for an event with a reason that says all of the texts.
func (p *process) untilEvent(t testing.TB, n *node, reason string, texts ...string) {
	t.Helper()
	p.until(t, "the event "+reason, func(context.Context) error {
		for _, e := range n.events(t) {
			missing := func(text string) bool { return !strings.Contains(e.Message, text) }
			if e.Reason == reason && !slices.ContainsFunc(texts, missing) {
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// untilClean waits until nothing at all is left of any claim.
func (p *process) untilClean(t testing.TB, n *node) {
	t.Helper()
	p.until(t, "nothing to be left", func(context.Context) error {
		left := append(n.cdiSpecs(t), n.journal(t)...)
		for _, in := range n.instances(t) {
			left = append(left, fmt.Sprintf("GPU instance %+v", in))
		}
		if len(left) > 0 {
			return fmt.Errorf("left: %v", left)
		}
		return nil
	})
}
