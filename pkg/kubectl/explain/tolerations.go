// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/device"
)

// tolerations tries to tolerate the taints of devices that would do.
func (t *trial) tolerations(ctx context.Context) {
	j, taints := newJudge(t.planner), map[string]resourceapi.DeviceTaint{}
	for _, n := range t.nodes {
		for _, f := range j.onNode(ctx, n, t.ask) {
			if slices.Contains(f.causes, Tainted) {
				for _, taint := range untolerated(f.device, *t.ask.tolerations) {
					taints[taintText(&taint)] = taint
				}
			}
		}
	}
	var texts []string
	for _, text := range sets.List(sets.KeySet(taints)) {
		if taint := taints[text]; isForeignClaim(taint) {
			// The driver refuses what tolerates it.
			t.confirm(ctx, EndForeignClaim, "when the pods of claim "+taint.Value+" of another DRA driver have ended (device taint "+text+")", tolerate(taint))
			continue
		}
		texts = append(texts, text)
		t.confirm(ctx, AddToleration, "with a toleration of the device taint "+text, tolerate(taints[text]))
	}
	if len(texts) > 1 {
		t.confirm(ctx, AddToleration, "with tolerations of the device taints "+strings.Join(texts, " and "), func(a ask) {
			for _, text := range texts {
				tolerate(taints[text])(a)
			}
		})
	}
}

// isForeignClaim reports whether a taint is about a claim of another driver with the same name.
func isForeignClaim(taint resourceapi.DeviceTaint) bool {
	return strings.HasSuffix(taint.Key, "/"+string(device.ForeignClaim))
}

func tolerate(taint resourceapi.DeviceTaint) func(ask) {
	return func(a ask) {
		*a.tolerations = append(*a.tolerations, resourceapi.DeviceToleration{Key: taint.Key, Operator: resourceapi.DeviceTolerationOpExists, Effect: taint.Effect})
	}
}
