// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// full are pods that wait in a cluster in which all GPUs are taken.
var full = []explained{
	{name: "two MPS shares in one container", make: waits(fleettest.Share(mps, "10Gi", "25"), fleettest.Share(mps, "10Gi", "25")),
		cause: CannotStart, silent: []string{"it fits"},
		says: []string{"cannot start, even with its devices", "2 MPS shares", "one share of the sum", "In the way"}},
	{name: "two MPS shares, and a nodeSelector", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Share(mps, "10Gi", "25"), fleettest.Share(mps, "10Gi", "25"))(f)
		pod.Spec.NodeSelector = map[string]string{"pool": "small"}
		return pod
	}, cause: CannotStart, silent: []string{"it fits"}},
	{name: "a user namespace, and a smaller share as alternative", make: func(f *fleettest.Fleet) *corev1.Pod {
		return unshared(waits(alternatives(fleettest.Share(mps, "20Gi", ""), fleettest.Share(mps, "10Gi", "")))(f))
	}, cause: CannotStart, says: []string{"hostUsers: false"}, silent: []string{"it fits"}},
	{name: "a user namespace, and a GPU as alternative", make: func(f *fleettest.Fleet) *corev1.Pod {
		return unshared(waits(alternatives(fleettest.Share(mps, "20Gi", ""), fleettest.Request(whole)))(f))
	}, cause: CountersUsed, silent: []string{"hostUsers", "it fits"}},
	{name: "a misspelt class", make: waits(fleettest.Request("mig.nvidia.co")), cause: ClassMissing, silent: []string{"No single"},
		says: []string{"did you mean mig.nvidia.com?", "with deviceClassName mig.nvidia.com; then it waits for other/n1-0"}},
	{name: "a class misspelt twice", make: waits(fleettest.Request("mig.nvidia.co"), fleettest.Request("mig.nvidia.co")), cause: ClassMissing,
		says: []string{"with deviceClassName mig.nvidia.com; then it waits for other/n1-0"}},
	{name: "a misspelt class, and too many GPUs", make: waits(fleettest.Request("mig.nvidia.co"), fleettest.Count(3, whole)),
		cause: ClassMissing, silent: []string{"it waits for"}},
	{name: "more GPUs than a node has", make: waits(fleettest.Count(9, whole)), cause: TooFewDevices,
		says: []string{"with count 2 in place of 9; then it waits for other/n1-0 and other/n1-1"}, silent: []string{"No single"}},
	{name: "more GPUs than a node has, and one is free", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Claims = f.Claims[1:]
		return waits(fleettest.Count(3, whole))(f)
	}, cause: TooFewDevices, says: []string{
		"with count 2 in place of 3; then it waits for other/n1-1\n  - with count 1 in place of 3: it fits on node n1",
	}},
	{name: "a constraint that nothing meets", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		f.Claims[len(f.Claims)-1].Spec.Devices.Constraints = sameAs("example.com/rack")
		return pod
	}, cause: Held, says: []string{"without the constraint on example.com/rack of claim llm; then it waits for other/n1-0"},
		silent: []string{"No single"}},
}

// unshared gives a pod a user namespace of its own.
func unshared(pod *corev1.Pod) *corev1.Pod {
	pod.Spec.HostUsers = new(false)
	return pod
}

// TestFull: that all is taken is not all that there is to say.
func TestFull(t *testing.T) {
	for _, c := range full {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 2)
			f.AddNode("n2", "h100-80-sxm", 2)
			fill(f)
			pod := c.make(f)
			e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod)
			got := text(t, e)
			if e.Verdict != Waits || len(e.Reasons) == 0 || e.Reasons[0].Cause != c.cause {
				t.Errorf("%s, %+v; want %s", e.Verdict, e.Reasons, c.cause)
			}
			for _, part := range c.says {
				if !strings.Contains(got, part) {
					t.Errorf("want %q in:\n%s", part, got)
				}
			}
			for _, part := range c.silent {
				if strings.Contains(got, part) {
					t.Errorf("%q in:\n%s", part, got)
				}
			}
		})
	}
}
