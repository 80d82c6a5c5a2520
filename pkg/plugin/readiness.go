// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"sync"

	"k8s.io/klog/v2"
)

// need is what the plugin needs to be ready. Of several that are missing the first is told.
type need int

const (
	// needHardware: the GPUs can be used.
	needHardware need = iota
	// needPolicy: it is known what is to be published.
	needPolicy
	// needSlices: the API server holds the slices as they should be.
	needSlices
	// needRegistration: the kubelet calls this instance. During an upgrade the old instance
	// ends when this one is ready.
	needRegistration
	needs
)

// readiness is why the plugin is not ready, or that it is. It logs every change.
type readiness struct {
	mu      sync.Mutex
	missing [needs]string
}

func newReadiness() *readiness {
	return &readiness{missing: [needs]string{
		needRegistration: "the kubelet has not registered the plugin yet",
		needHardware:     "the GPUs of this node have not been discovered yet",
		needSlices:       "no ResourceSlice has been published yet",
	}}
}

// set records why something is missing; "" says that it is there. It may change any number of times.
func (r *readiness) set(ctx context.Context, n need, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.missing[n] == reason {
		return
	}
	r.missing[n] = reason
	logger := klog.FromContext(ctx)
	switch {
	case reason != "":
		logger.Info("Not ready", "reason", reason)
	case cmp.Or(r.missing[:]...) == "":
		logger.Info("Ready")
	}
}

// hardwareReason returns why the GPUs cannot be used, or "".
func (r *readiness) hardwareReason() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.missing[needHardware]
}

// notReady returns "" when the plugin is ready.
func (r *readiness) notReady() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return cmp.Or(r.missing[:]...)
}
