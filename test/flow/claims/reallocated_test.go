// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// hasEnv reports whether a container has a variable with this prefix.
func hasEnv(t *testing.T, n *harness.Node, prefix string, ids []string) bool {
	t.Helper()
	for _, entry := range n.Container(t, ids...).Process.Env {
		if strings.HasPrefix(entry, prefix) {
			return true
		}
	}
	return false
}

// TestReallocatedWithOtherConfig checks that a claim that was allocated the same device again, with a configuration, gets
// what that says, or is refused: the kubelet never released it, as after a forced deletion.
func TestReallocatedWithOtherConfig(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	n.StartSupervisor(t)
	p := n.Start(t)
	p.Ready(t)
	device := n.DeviceName(t, 0, "", 0)
	c := n.AllocateNamed([]string{device})
	p.MustPrepare(t, c)
	n.Reallocate(c, []resourceapi.DeviceRequestAllocationResult{{Device: device}}, harness.GPUWithMPS)
	ids, err := p.TryPrepare(t.Context(), c, harness.KubeletTimeout)
	if err == nil && !hasEnv(t, n, "CUDA_MPS_PIPE_DIRECTORY=", ids) {
		t.Error("the claim is allocated a GPU with limits of MPS, and is prepared without any")
	}
}
