// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleets"
	"github.com/partage-dev/partage/test/must"
)

// large is a snapshot of a fleet of n nodes with 8 GPUs each.
func large(tb testing.TB, n int) *fleet.Snapshot {
	tb.Helper()
	objects := must.Get(fleets.Large(n))(tb)
	s := &fleet.Snapshot{}
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.Node:
			s.Nodes = append(s.Nodes, o)
		case *corev1.Pod:
			s.Pods = append(s.Pods, o)
		case *resourceapi.ResourceSlice:
			s.Slices = append(s.Slices, o)
		case *resourceapi.ResourceClaim:
			s.Claims = append(s.Claims, o)
		case *resourceapi.DeviceClass:
			s.Classes = append(s.Classes, o)
		default:
			tb.Fatalf("a fleet has a %T", o)
		}
	}
	return s
}

// BenchmarkNew makes the page of a fleet: all of it, and its parts.
func BenchmarkNew(b *testing.B) {
	for _, n := range []int{50, 500} {
		s := large(b, n)
		b.Run(fmt.Sprintf("fleet/%d", n), func(b *testing.B) {
			for b.Loop() {
				fleet.New(s, fleets.Driver)
			}
		})
		m := fleet.New(s, fleets.Driver)
		b.Run(fmt.Sprintf("view/%d", n), func(b *testing.B) {
			size := 0
			for b.Loop() {
				all := encoded(b, Input{Model: m})
				size = 0
				for _, part := range all {
					size += len(part)
				}
			}
			b.ReportMetric(float64(size), "JSON-bytes")
		})
	}
}
