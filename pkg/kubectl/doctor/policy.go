// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/policy"
)

var policyChecks = []Check{
	{ID: "sharing-policy", Title: "the sharing policy is valid", needs: []string{driverPlace, daemonSets, configMaps}, parts: []string{daemonSets}, run: policyValid},
}

func policyValid(f *Facts) (found findings) {
	refs := slices.SortedFunc(maps.Keys(f.Policies), func(a, b Ref) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, at := range refs {
		config := f.Policies[at]
		const upgrade = "Run helm upgrade with the policy that you want (docs/how-to/policy.md)"
		if config == nil {
			found.add(Error, "It does not exist: pods of the driver do not start", upgrade, at)
			continue
		}
		text, has := config.Data[policyKey]
		if !has {
			found.add(Error, "It has no "+policyKey+": the driver keeps the last policy, and after a restart publishes nothing", upgrade, at)
			continue
		}
		if _, err := policy.Decode([]byte(text)); err != nil {
			found.add(Error, "The driver keeps the last policy, and after a restart publishes nothing: "+said(err.Error()), upgrade, at)
		}
	}
	return found
}
