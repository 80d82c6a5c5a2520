// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// withTaintRules returns slices with the taints that rules give to their devices, as the
// scheduler sees them. Slices that no rule concerns are returned as they are.
func withTaintRules(all []*resourceapi.ResourceSlice, rules []*resourceapi.DeviceTaintRule, f structured.Features) []*resourceapi.ResourceSlice {
	if !f.DeviceTaints || len(rules) == 0 {
		return all
	}
	out := make([]*resourceapi.ResourceSlice, 0, len(all))
	for _, s := range all {
		out = append(out, tainted(s, rules))
	}
	return out
}

func tainted(s *resourceapi.ResourceSlice, rules []*resourceapi.DeviceTaintRule) *resourceapi.ResourceSlice {
	patched := s
	for _, rule := range rules {
		for i := range s.Spec.Devices {
			if !fleet.RuleCovers(rule, s.Spec.Driver, s.Spec.Pool.Name, s.Spec.Devices[i].Name) {
				continue
			}
			if patched == s {
				patched = copyOf(s)
			}
			d := &patched.Spec.Devices[i]
			d.Taints = append(slices.Clip(d.Taints), rule.Spec.Taint)
		}
	}
	return patched
}

// copyOf returns a slice whose list of devices may be changed.
func copyOf(s *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	c := *s
	c.Spec.Devices = slices.Clone(s.Spec.Devices)
	return &c
}
