// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"slices"

	"github.com/partage-dev/partage/pkg/policy"
)

// helmUpgrade is what remedies call the command. Helm 4 applies objects on the server, where what kubectl has written is somebody else's.
const helmUpgrade = "helm upgrade (Helm 4: with --force-conflicts if kubectl has changed objects of the chart)"

func policyValid(f *Facts) (found findings) {
	for _, p := range f.Policies {
		const remedy = "Run " + helmUpgrade + " with the policy that you want (docs/how-to/policy.md)"
		if p.Config == nil {
			found.add(Error, "It does not exist: pods of the driver do not start", remedy, p.At)
		} else if text, has := p.Config.Data[policyKey]; !has {
			found.add(Error, invalidPolicy+": it has no "+policyKey, remedy, p.At)
		} else if decoded, err := policy.Decode([]byte(text)); err != nil {
			found.add(Error, invalidPolicy+": "+said(err.Error()), remedy, p.At)
		} else if _, all := leavesAlone(decoded); all {
			found.add(Warning, "It offers nothing of any GPU: all its kinds are empty", remedy, p.At)
		}
	}
	return found
}

// leavesAlone reports whether a policy offers nothing of some GPUs, and whether of all.
func leavesAlone(p *policy.Policy) (some, all bool) {
	some = p.Default == policy.Offer{}
	all = some
	for _, r := range p.Rules {
		nothing := r.Offer == policy.Offer{}
		some, all = some || nothing, all && nothing
	}
	return some, all
}

// mayLeaveAlone reports whether GPUs of which nothing is published may be those that a policy leaves alone.
func mayLeaveAlone(f *Facts) bool {
	return slices.ContainsFunc(f.Policies, func(p Policy) bool {
		if p.Config == nil {
			return false
		}
		decoded, err := policy.Decode([]byte(p.Config.Data[policyKey]))
		if err != nil {
			return false
		}
		some, _ := leavesAlone(decoded)
		return some
	})
}

// invalidPolicy says what follows. A kubelet that starts removes the ResourceSlices of its node.
const invalidPolicy = "The driver keeps the last valid policy. A pod of it that starts anew is not ready, and leaves what is published " +
	"as it is, which is nothing where the node or its kubelet has started anew, too"
