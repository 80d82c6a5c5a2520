// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/plugin/lastseen"
)

// recall takes over what an earlier process has discovered, so that GPUs that do not
// answer now stay published, tainted. Of GPUs that were not found since the machine was
// started, or that were taken out, only those stay of which claims have devices.
func (l *gpuLoop) recall(ctx context.Context) {
	seen, err := l.lastSeen.Read()
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs that do not answer now are not published")
	}
	l.updateDesired(ctx)
	known, _ := seen.ThisBoot.Keeping(seen.Earlier)
	earlier := map[string]bool{}
	for _, g := range known.GPUs {
		switch {
		case seen.ThisBoot.Has(g.PCIAddress) && !l.hardware.Removed(g.PCIAddress):
		case l.desired.mayBeInUse(g.PCIAddress):
			earlier[g.PCIAddress] = true
		default:
			known = known.Without(g.PCIAddress)
		}
	}
	if len(known.GPUs) == 0 {
		return
	}
	inventory, err := l.desired.build(ctx, known)
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPUs that do not answer now are not published")
		return
	}
	l.state.recall(known, earlier, inventory)
	l.claims.SetInventory(inventory)
	l.startup.recalled(inventory)
}

// remember writes down what is known now, for recall.
func (l *gpuLoop) remember(ctx context.Context) {
	seen := lastseen.GPUs{ThisBoot: l.state.known, Earlier: &gpu.Node{}}
	for _, g := range l.state.known.GPUs {
		if l.state.earlier[g.PCIAddress] {
			seen.ThisBoot = seen.ThisBoot.Without(g.PCIAddress)
			seen.Earlier.GPUs = append(seen.Earlier.GPUs, g)
		}
	}
	err := l.lastSeen.Write(seen)
	l.lastSeenProblem.Log(ctx, err, "A GPU that does not answer after a restart of the plugin will not be published then",
		"It is written down again what was discovered")
}
