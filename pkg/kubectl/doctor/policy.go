// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import "github.com/partage-dev/partage/pkg/policy"

func policyValid(f *Facts) (found findings) {
	const upgrade = "Run helm upgrade with the policy that you want (docs/how-to/policy.md)"
	for _, p := range f.Policies {
		if p.Config == nil {
			found.add(Error, "It does not exist: pods of the driver do not start", upgrade, p.At)
			continue
		}
		text, has := p.Config.Data[policyKey]
		if !has {
			found.add(Error, "It has no "+policyKey+": the driver keeps the last policy, and after a restart publishes nothing", upgrade, p.At)
		} else if _, err := policy.Decode([]byte(text)); err != nil {
			found.add(Error, "The driver keeps the last policy, and after a restart publishes nothing: "+said(err.Error()), upgrade, p.At)
		}
	}
	return found
}
