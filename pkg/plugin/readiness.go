// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"sync"

	"k8s.io/klog/v2"
)

// readiness is why the plugin is not ready, or that it is. It logs every change.
type readiness struct {
	mu           sync.Mutex
	registration string
	hardware     string
	slices       string
	policy       string
}

func newReadiness() *readiness {
	return &readiness{
		registration: "the kubelet has not registered the plugin yet",
		hardware:     "the GPUs of this node have not been discovered yet",
		slices:       "no ResourceSlice has been published yet",
	}
}

// setRegistration records why the kubelet does not call this instance; "" says
// that it does. During an upgrade the old instance ends when this one is ready.
func (r *readiness) setRegistration(ctx context.Context, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setLocked(ctx, &r.registration, reason)
}

// setHardware records why the GPUs cannot be used; "" says that they can. It may
// change any number of times.
func (r *readiness) setHardware(ctx context.Context, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setLocked(ctx, &r.hardware, reason)
}

// setSlices records why the API server does not hold the slices as they should be; ""
// says that it does.
func (r *readiness) setSlices(ctx context.Context, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setLocked(ctx, &r.slices, reason)
}

// setPolicy records why it is not known what is to be published; "" says that it
// is.
func (r *readiness) setPolicy(ctx context.Context, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.setLocked(ctx, &r.policy, reason)
}

func (r *readiness) setLocked(ctx context.Context, field *string, reason string) {
	if *field == reason {
		return
	}
	*field = reason
	logger := klog.FromContext(ctx)
	switch {
	case reason != "":
		logger.Info("Not ready", "reason", reason)
	case r.notReadyLocked() == "":
		logger.Info("Ready")
	}
}

// hardwareReason returns why the GPUs cannot be used, or "".
func (r *readiness) hardwareReason() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hardware
}

// notReady returns "" when the plugin is ready.
func (r *readiness) notReady() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.notReadyLocked()
}

func (r *readiness) notReadyLocked() string {
	return cmp.Or(r.hardware, r.policy, r.slices, r.registration)
}
