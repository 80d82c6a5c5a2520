// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// TestStatusNamesNoOtherTenant: the status of a claim and the health of its device, which is in the status of its pods, have nothing of other
// namespaces.
func TestStatusNamesNoOtherTenant(t *testing.T) {
	t.Parallel()
	broken := verdict{
		health: kubeletplugin.HealthStatusUnhealthy, reason: "MPSUnhealthy",
		message: "MPS waits for process 5 (train, pod victim/secret, container 01) of claim victim/secret (0b6f4f5e-0000-4000-8000-000000000002)\u202e",
	}
	states := []claimState{{claim: claim.Ref{Namespace: "team", Name: "ours"}, devices: []deviceState{{claim.LiveDevice{Device: "gpu-0"}, broken}}}}
	now := time.Now()
	report, _ := (&deviceStates{states: states, surveyedAt: now, staleAfter: time.Hour}).health(now)
	for _, text := range []string{statusOf(states)[0].Devices[0].Message, report.Devices[0].Message} {
		if strings.Contains(text, "victim") || strings.Contains(text, "0b6f4f5e") || !strings.HasSuffix(text, `\u202e`) {
			t.Error(text)
		}
	}
}
