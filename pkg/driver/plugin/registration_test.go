// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"testing"

	"google.golang.org/grpc"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
)

// TestArrivalIsStamped: in every version of the call that prepares, and in no
// other.
func TestArrivalIsStamped(t *testing.T) {
	t.Parallel()
	for method, want := range map[string]bool{
		drapb.DRAPlugin_NodePrepareResources_FullMethodName:           true,
		drapb.DRAPlugin_NodeUnprepareResources_FullMethodName:         false,
		"/pluginregistration.Registration/NotifyRegistrationStatus":   false,
		"/" + drapbv1beta1.DRAPluginService + "/NodePrepareResources": true,
	} {
		stamped := false
		answer, err := onArrival(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: method}, func(ctx context.Context, _ any) (any, error) {
			stamped = ctx != t.Context()
			return "answer", nil
		})
		if stamped != want || answer != "answer" || err != nil {
			t.Errorf("%s: stamped is %v, want %v; answer %v, %v", method, stamped, want, answer, err)
		}
	}
}
