// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

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

// observes reports whether a device is for claims with admin access.
func observes(d *resourceapi.Device) bool { return strings.HasSuffix(d.Name, "-observer") }

// Published are the devices of all slices but observers, by name.
func (n *Cluster) Published() map[string]resourceapi.Device {
	devices := map[string]resourceapi.Device{}
	for _, slice := range n.API.Slices() {
		for _, d := range slice.Spec.Devices {
			if !observes(&d) {
				devices[d.Name] = d
			}
		}
	}
	return devices
}

// tainted are the names of the published devices that have a taint with this
// reason, sorted.
func (n *Cluster) tainted(reason string) []string {
	var names []string
	n.API.EachDevice(func(d *resourceapi.Device) {
		if slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
			return t.Key == DriverName+"/"+reason && t.Effect == resourceapi.DeviceTaintEffectNoSchedule
		}) {
			names = append(names, d.Name)
		}
	})
	slices.Sort(names)
	return names
}

// UntilTainted waits until exactly these devices are tainted with a reason.
func (p *Driver) UntilTainted(t testing.TB, n *Node, reason string, want []string) {
	t.Helper()
	slices.Sort(want)
	p.Until(t, "the taints "+reason, func(context.Context) error {
		if diff := cmp.Diff(want, n.tainted(reason)); diff != "" {
			return fmt.Errorf("tainted devices (-want +got):\n%s", diff)
		}
		return nil
	})
}

// UntilPublished waits until exactly the devices of these GPUs are published,
// whole or partitions.
func (p *Driver) UntilPublished(t testing.TB, n *Node, gpus ...int) {
	t.Helper()
	var want []string
	for _, gpu := range gpus {
		want = append(want, DeviceName(n.Address(t, gpu), Place{}))
	}
	slices.Sort(want)
	p.Until(t, "the devices of GPUs", func(context.Context) error {
		var got []string
		n.API.EachDevice(func(d *resourceapi.Device) {
			if gpu, _, partition := strings.Cut(BaseDeviceName(d.Name), "-mig-"); !partition && !observes(d) {
				got = append(got, gpu)
			}
		})
		slices.Sort(got)
		got = slices.Compact(got)
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("GPUs (-want +got):\n%s", diff)
		}
		return nil
	})
}

// DevicesOf are the names of all published devices of a GPU.
func (n *Node) DevicesOf(t testing.TB, gpu int) []string {
	t.Helper()
	prefix := DeviceName(n.Address(t, gpu), Place{})
	var names []string
	for name := range n.Published() {
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	return names
}

// UntilEvent waits for an event with a reason that says all of the texts.
func (p *Driver) UntilEvent(t testing.TB, n *Node, reason string, texts ...string) {
	t.Helper()
	p.Until(t, "the event "+reason, func(context.Context) error {
		for _, e := range n.Events(t) {
			missing := func(text string) bool { return !strings.Contains(e.Message, text) }
			if e.Reason == reason && !slices.ContainsFunc(texts, missing) {
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// UntilClean waits until nothing at all is left of any claim.
func (p *Driver) UntilClean(t testing.TB, n *Node) {
	t.Helper()
	p.Until(t, "nothing to be left", func(context.Context) error {
		left := append(n.CDISpecs(t), n.Records(t)...)
		for _, in := range n.Instances(t) {
			left = append(left, fmt.Sprintf("GPU instance %+v", in))
		}
		if len(left) > 0 {
			return fmt.Errorf("left: %v", left)
		}
		return nil
	})
}

// Offered are the published devices of a GPU but its observer, and those that are tainted.
func (n *Cluster) Offered(gpu string) (all, tainted []string) {
	n.API.EachDevice(func(d *resourceapi.Device) {
		if !strings.HasPrefix(d.Name, gpu) || observes(d) {
			return
		}
		all = append(all, d.Name)
		if len(d.Taints) > 0 {
			tainted = append(tainted, d.Name)
		}
	})
	slices.Sort(all)
	slices.Sort(tainted)
	return all, tainted
}
