// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import "github.com/partage-dev/partage/pkg/policy"

func policyValid(f *Facts) (found findings) {
	for _, p := range f.Policies {
		message := ""
		if p.Config == nil {
			message = "It does not exist: pods of the driver do not start"
		} else if text, has := p.Config.Data[policyKey]; !has {
			message = invalidPolicy + ": it has no " + policyKey
		} else if _, err := policy.Decode([]byte(text)); err != nil {
			message = invalidPolicy + ": " + said(err.Error())
		}
		if message != "" {
			found.add(Error, message, "Run helm upgrade with the policy that you want (docs/how-to/policy.md)", p.At)
		}
	}
	return found
}

// invalidPolicy says what follows. A kubelet that starts removes the ResourceSlices of its node.
const invalidPolicy = "The driver keeps the last valid policy. A pod of it that starts anew is not ready, and leaves what is published " +
	"as it is, which is nothing where the node or its kubelet has started anew, too"
