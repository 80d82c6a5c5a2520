// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// open are the published devices of a GPU that pods may get. That nothing can start MPS on this node does not count.
func open(t *testing.T, n *harness.Node, gpu int) (names []string) {
	t.Helper()
	devices := n.Published()
	for _, name := range n.DevicesOf(t, gpu) {
		if !slices.ContainsFunc(devices[name].Taints, func(t resourceapi.DeviceTaint) bool {
			return t.Effect != resourceapi.DeviceTaintEffectNone && !strings.HasSuffix(t.Key, "/mps-unavailable")
		}) {
			names = append(names, name)
		}
	}
	return names
}

// TestCordonOfOneGPU: an administrator names GPUs in an annotation of the Node. Pods get no device of these, and those of the
// others.
func TestCordonOfOneGPU(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	n.API.Annotate(harness.NodeName, "partage.dev/cordoned-gpus", n.Address(t, 1))
	p := n.Start(t)
	p.Ready(t)
	p.Until(t, "the GPU to be cordoned", func(context.Context) error {
		if left := len(open(t, n, 1)); left > 0 {
			return fmt.Errorf("%d of %d devices can be allocated", left, len(n.DevicesOf(t, 1)))
		}
		return nil
	})
	if all := n.DevicesOf(t, 0); len(all) == 0 || len(open(t, n, 0)) != len(all) {
		t.Errorf("only %v of %v can be allocated of the GPU that is not cordoned", open(t, n, 0), all)
	}
}
