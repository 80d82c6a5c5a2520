// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/wait"

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
	n.Start(t).Ready(t)
	const limit = 8 * time.Second // is reached where nobody reads the annotation
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, limit, true, func(context.Context) (bool, error) {
		return len(open(t, n, 1)) == 0, nil
	}); err != nil {
		all := len(n.DevicesOf(t, 1))
		t.Errorf("%d of %d devices of a cordoned GPU can be allocated", len(open(t, n, 1)), all)
	}
	if all := n.DevicesOf(t, 0); len(all) == 0 || len(open(t, n, 0)) != len(all) {
		t.Errorf("only %v of %v can be allocated of the GPU that is not cordoned", open(t, n, 0), all)
	}
}
