// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode"

	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
)

// TestErrorsFitIntoEvents: the kubelet makes an event of what it gets.
func TestErrorsFitIntoEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error {
		return errors.Join(fmt.Errorf("device gpu-0: %s", strings.Repeat("it fails, ", 1000)), errors.New("undo: \x1b[31mit fails"))
	}
	r.start(t)
	kubelet := r.register(t)
	c := r.claim("one")
	result, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{c}})
	if err != nil {
		t.Fatal(err)
	}
	message := result.Claims[c.Uid].GetError()
	if len(message) > tenant.MaxError+200 || strings.ContainsFunc(message, unicode.IsControl) ||
		!strings.Contains(message, "claim default/one: device gpu-0: it fails, ") || !strings.HasSuffix(message, "… (cut)") {
		t.Errorf("%d bytes: %q", len(message), message)
	}
}
