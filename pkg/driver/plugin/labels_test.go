// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/driver/plugin/nodelabels"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// TestNodeLabels: the labels of the node are about the GPUs that are offered, go with them,
// and are left alone where they are not to be written.
func TestNodeLabels(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	both := map[string]string{
		"nvidia.com/gpu.product": "Test-GPU", "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "8192",
		"nvidia.com/gpu.family": "hopper", "nvidia.com/gpu.compute.major": "9", "nvidia.com/gpu.compute.minor": "0",
	}
	for _, step := range []struct {
		name   string
		node   *gpu.Node
		mode   nodelabels.Mode
		policy *policy.Policy
		want   map[string]string
	}{
		{"two GPUs", testNodeWith(firstGPU, secondGPU), nodelabels.Write, withoutShares(), both},
		{"a plugin that leaves them alone", testNodeWith(firstGPU), nodelabels.Never, withoutShares(), both},
		{"GPUs that are not offered", testNodeWith(firstGPU, secondGPU), nodelabels.Write, noPolicy, nil},
		{"two GPUs again", testNodeWith(firstGPU, secondGPU), nodelabels.Write, withoutShares(), both},
		{"no GPU", &gpu.Node{}, nodelabels.Write, withoutShares(), nil},
		{"two GPUs once more", testNodeWith(firstGPU, secondGPU), nodelabels.Write, withoutShares(), both},
		{"removal", testNodeWith(firstGPU, secondGPU), nodelabels.Remove, withoutShares(), nil},
	} {
		r := newRigOn(t, api)
		r.hardware.setNode(step.node)
		r.policy.current = step.policy
		r.options.NodeLabels, r.options.LabelClient = step.mode, r.options.KubeClient
		r.start(t)
		r.register(t)
		r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
		r.until(t, "labels with "+step.name, func(context.Context) error {
			labels := api.Node(testNode).Labels
			if diff := cmp.Diff(step.want, labels); diff != "" && len(step.want)+len(labels) > 0 {
				return fmt.Errorf("-want +got:\n%s", diff)
			}
			return nil
		})
		r.stop()
		if err := r.wait(t); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
	}
}

// TestLabelsBesideAGPUThatHangs: labels are removed although the first discovery does not end.
func TestLabelsBesideAGPUThatHangs(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	for _, mode := range []nodelabels.Mode{nodelabels.Write, nodelabels.Remove} {
		r := newRigOn(t, api)
		r.options.NodeLabels, r.options.LabelClient = mode, r.options.KubeClient
		if mode == nodelabels.Remove {
			r.hardware.setOnDiscover(func(ctx context.Context) error {
				<-ctx.Done()
				return ctx.Err()
			})
		}
		r.start(t)
		r.until(t, "labels", func(context.Context) error {
			if n := len(api.Node(testNode).Labels); n > 0 != (mode == nodelabels.Write) {
				return fmt.Errorf("%s: there are %d", mode, n)
			}
			return nil
		})
		r.stop()
		if err := r.wait(t); err != nil {
			t.Error(err)
		}
	}
}
