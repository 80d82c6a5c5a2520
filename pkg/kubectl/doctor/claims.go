// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// graceToDelete is how long the deletion of a claim may take before that is a finding.
const graceToDelete = 5 * time.Minute

func claimsDeleting(f *Facts) (found findings) {
	for _, c := range f.Claims {
		if len(fleet.Results(c, f.Driver)) == 0 || c.DeletionTimestamp == nil || f.Now.Sub(c.DeletionTimestamp.Time) < graceToDelete {
			continue
		}
		at := refTo("resourceclaim", c)
		if len(c.Status.ReservedFor) > 0 {
			var users []string
			for _, u := range c.Status.ReservedFor {
				users = append(users, u.Name)
			}
			found.addSince(c.DeletionTimestamp, Warning, "It was deleted, and waits for its pods: "+said(strings.Join(users, ", ")),
				"Delete the pods; where one stays in Terminating, see that the driver's pod on its node is ready", at)
			continue
		}
		found.addSince(c.DeletionTimestamp, Error, "It was deleted, no pod uses it, and finalizers keep it: "+said(strings.Join(c.Finalizers, ", ")),
			"See that kube-controller-manager runs its resourceclaim controller; finalizers of others are for those who set them", at)
	}
	return found
}

func claimsDevices(f *Facts) (found findings) {
	published := map[string]bool{}
	for pool := range f.ofDriver() {
		published[pool.pool] = true
	}
	for _, h := range f.Holdings {
		if h.Device != nil {
			continue
		}
		if !published[h.Result.Pool] {
			// The devices are most likely there, and in use: only who publishes them is not.
			found.add(Error, fmt.Sprintf("It has devices of the pool %s, of which there are no ResourceSlices", h.Result.Pool),
				"See first that the driver's pod on the node is ready; its pods can go on meanwhile. Only if the node is gone for good, delete the claim's pods",
				refTo("resourceclaim", h.Claim))
			continue
		}
		found.add(Error, fmt.Sprintf("It has the device %s of the pool %s, which no ResourceSlice has", h.Result.Device, h.Result.Pool),
			"If the driver has just started, wait. Otherwise the GPU is gone, or another driver gave it: delete the claim's pods, and replace the claim if it was not made from a template",
			refTo("resourceclaim", h.Claim))
	}
	return found
}
