// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"sync"

	"k8s.io/klog/v2"
)

// readiness is why the plugin is not ready, or that it is. A change is logged
// once, so that an hour of retries is one line.
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
// that it does. During an upgrade the old instance goes when this one is ready.
func (s *readiness) setRegistration(ctx context.Context, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(ctx, &s.registration, reason)
}

// setHardware records why the GPUs cannot be used; "" says that they can. It may
// change any number of times.
func (s *readiness) setHardware(ctx context.Context, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(ctx, &s.hardware, reason)
}

// setSlices records why nothing is published; "" says that the API server has
// accepted all slices. Once that was so it stays so: publishing again is the
// business of the slice controller, not of readiness.
func (s *readiness) setSlices(ctx context.Context, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slices != "" {
		s.set(ctx, &s.slices, reason)
	}
}

// setPolicy records why it is not known what is to be offered; "" says that it is.
func (s *readiness) setPolicy(ctx context.Context, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(ctx, &s.policy, reason)
}

// set needs the lock.
func (s *readiness) set(ctx context.Context, field *string, reason string) {
	if *field == reason {
		return
	}
	*field = reason
	logger := klog.FromContext(ctx)
	switch {
	case reason != "":
		logger.Info("Not ready", "reason", reason)
	case s.notReadyLocked() == "":
		logger.Info("Ready")
	}
}

func (s *readiness) hardwareReason() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hardware
}

// notReady returns "" when the plugin is ready.
func (s *readiness) notReady() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notReadyLocked()
}

func (s *readiness) notReadyLocked() string {
	return cmp.Or(s.hardware, s.policy, s.slices, s.registration)
}
