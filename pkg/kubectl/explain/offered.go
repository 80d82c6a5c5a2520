// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// withdrawn says how many of the matching devices the sharing policy has withdrawn.
func (t *tally) withdrawn(capable int) string {
	of := t.of(Withdrawn)
	return fmt.Sprintf("%d of %d matching devices %s withdrawn: %s",
		of.devices, capable, plural(of.devices, "is", "are"), strings.Join(often(of.details), ", "))
}

// otherKinds is what helps where all devices of a kind are withdrawn.
func otherKinds(ctx context.Context, s *sight) string {
	kinds := sets.New[string]()
	for _, d := range s.devicesOf(ctx, "") {
		if kind := kindsOffered[textOf(d.Device, "type")]; kind != "" && !slices.ContainsFunc(d.Device.Taints, isWithdrawn) {
			kinds.Insert(kind)
		}
	}
	if len(kinds) == 0 {
		return "when the administrator offers this kind of devices again: ask for it"
	}
	return fmt.Sprintf("with another kind of devices (there are %s), or ask the administrator", strings.Join(sets.List(kinds), ", "))
}

// absent says that no node publishes devices of the driver, if that is so, and what helps.
func (x *Explainer) absent() (text string, help []Suggestion) {
	if len(x.model.Nodes) > 0 || x.model.Lacks(fleet.ResourceSlices, "") {
		return "", nil
	}
	text = fmt.Sprintf("no node publishes devices of driver %s: Partage ", x.model.Driver)
	if slices.ContainsFunc(x.model.Pods, func(p *corev1.Pod) bool { return p.Labels[fleet.ComponentLabel] == fleet.PluginComponent }) {
		return text + "runs and has nothing to offer; kubectl gpu doctor may say why", nil
	}
	text += "does not run anywhere"
	if x.model.Hides(fleet.ResourcePods) {
		text += ", or has nothing to offer"
	}
	return text, []Suggestion{suggest(InstallDriver, "when Partage is installed, which is for an administrator, and runs on a node with a GPU")}
}

// notOffered says of a class for a kind of devices that the nodes which the pod may run on publish none of that kind, and what helps.
func notOffered(ctx context.Context, s *sight, name string) (string, []Suggestion) {
	text, help := s.x.absent()
	published := sets.New[string]()
	for _, d := range s.devicesOf(ctx, "") {
		published.Insert(textOf(d.Device, "type"))
	}
	for _, selector := range s.x.planner.Cluster.Class(name).Spec.Selectors {
		for _, c := range comparisons(selector, equality) {
			switch kind := kindsOffered[c.value]; {
			case c.name != "type" || kind == "" || published.Has(c.value):
			case text != "":
				return ": " + text, help
			default:
				return ": the administrator's sharing policy does not offer " + kind + " there, or the GPUs cannot have them", nil
			}
		}
	}
	return "", nil
}
