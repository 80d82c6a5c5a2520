// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/policy"
)

var policyChecks = []Check{
	{ID: "sharing-policy", Title: "the sharing policy is valid", needs: []string{driverPlace, daemonSets, configMaps}, parts: []string{daemonSets}, run: policyValid},
	{ID: "policy-in-force", Title: "every node uses the sharing policy", needs: []string{events}, parts: []string{events}, run: policyInForce},
	{ID: "policy-profiles", Title: "the GPUs have the profiles that the sharing policy names", needs: []string{events}, parts: []string{events}, run: policyProfiles},
}

// Reasons of the driver's events that checks of their own look at.
const (
	eventPolicyInvalid   = "SharingPolicyInvalid"
	eventPolicyValid     = "SharingPolicyValid"
	eventUnknownProfiles = "SharingPolicyProfilesUnknown"
	eventLeftOut         = "ClusterLacksFeature"
	eventCrashes         = "SchedulerCrashes"
)

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

func policyInForce(f *Facts) (found findings) {
	last := map[string]*corev1.Event{}
	for _, e := range f.Events {
		if !f.ofNode(e) || e.Reason != eventPolicyInvalid && e.Reason != eventPolicyValid {
			continue
		}
		if old := last[e.InvolvedObject.Name]; old == nil || lastSeen(old).Before(lastSeen(e)) {
			last[e.InvolvedObject.Name] = e
		}
	}
	for _, node := range slices.Sorted(maps.Keys(last)) {
		if e := last[node]; e.Reason == eventPolicyInvalid && f.recent(e) {
			found.add(Error, "The node cannot use the sharing policy: "+said(e.Message),
				"Correct the policy; nothing has to be restarted (docs/how-to/policy.md)", nodeRef(node))
		}
	}
	return found
}

func policyProfiles(f *Facts) (found findings) {
	for _, e := range f.Events {
		if f.ofNode(e) && e.Reason == eventUnknownProfiles && f.recent(e) {
			found.add(Warning, said(e.Message), "Correct the profile's name in the sharing policy, or leave it out for these GPUs", nodeRef(e.InvolvedObject.Name))
		}
	}
	return found
}
