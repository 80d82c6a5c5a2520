// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// TestStopCancelsNoDiscovery: a cancelled call to a GPU counts as one that has not
// returned, so that discoveries go on as long as a claim is being prepared.
func TestStopCancelsNoDiscovery(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.answer = writing
	claim := r.claim("one")
	running, discovering, finish, ended := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	r.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error {
		close(running)
		<-finish
		// Closed by now if the discovery was cancelled.
		select {
		case <-ended:
			return errors.New("a call on the GPU has not returned")
		default:
			return nil
		}
	}
	r.start(t)
	kubelet := r.register(t)
	result := make(chan error, 1)
	go func() {
		answer, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		if err == nil && answer.Claims[claim.Uid].GetError() != "" {
			err = errors.New(answer.Claims[claim.Uid].GetError())
		}
		result <- err
	}()
	<-running
	var once sync.Once
	r.hardware.setOnDiscover(func(ctx context.Context) error {
		once.Do(func() {
			close(discovering)
			<-ctx.Done()
			close(ended)
		})
		return ctx.Err()
	})
	<-discovering
	r.stop()
	select {
	case <-ended:
	case <-time.After(50 * time.Millisecond):
		// Long enough to see one that is cancelled; any other passes however
		// slow the machine is.
	}
	close(finish)
	if err := <-result; err != nil {
		t.Error(err)
	}
	if err := r.wait(t); err != nil {
		t.Error(err)
	}
}

// TestReadyWhenRegistered: the old instance of an upgrade goes when the new one is
// ready, so that the kubelet must know the new one by then.
func TestReadyWhenRegistered(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.unregistered = true
	r.start(t)
	const want = "the kubelet has not registered the plugin yet"
	r.until(t, "publication", func(context.Context) error {
		if got := r.plugin.readiness.notReady(); got != want {
			return fmt.Errorf("not ready because of %q", got)
		}
		return nil
	})
	if err := r.check(t.Context(), "readiness"); err == nil {
		t.Error("ready although no kubelet has registered it")
	}
	r.register(t)
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
}

// TestRegistrationDoesNotWait: the kubelet can register the plugin and prepare claims
// while the API server does not say whether the node exists.
func TestRegistrationDoesNotWait(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	answer := make(chan struct{})
	defer close(answer)
	r.api.Refuse(func(request *http.Request) *apierrors.StatusError {
		if strings.HasPrefix(request.URL.Path, "/api/v1/nodes") {
			<-answer
		}
		return nil
	})
	r.unregistered = true
	r.start(t)
	kubelet := r.register(t)
	claim := r.claim("one")
	result, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil || result.Claims[claim.Uid].GetError() != "" {
		t.Errorf("prepare: %v, %v", result, err)
	}
}
