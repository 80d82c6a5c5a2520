// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
)

// FieldManager owns the driver's entries, whichever instance or version of it wrote them.
const FieldManager = "partage-gpu-kubelet-plugin"

// errDropped says that the feature gate is off.
var errDropped = errors.New("the API server does not store status.devices: its feature gate DRAResourceClaimDeviceStatus is off")

// applier makes requests about one claim.
type applier struct {
	driver string
	client kubernetes.Interface
}

// read finds out which entries the API server has.
func (a *applier) read(ctx context.Context, e *entry) error {
	found, err := a.client.ResourceV1().ResourceClaims(e.ref.Namespace).Get(ctx, e.ref.Name, metav1.GetOptions{})
	switch {
	case isMissing(err), err == nil && found.UID != e.ref.UID:
		e.known, e.gone, e.stored = true, true, nil
		return nil
	case err != nil:
		return fmt.Errorf("read claim %s: %w", e.ref, err)
	}
	e.known, e.gone, e.stored = true, false, own(a.driver, found.Status.Devices)
	return nil
}

// apply makes the driver's entries of a claim what they have to be. That the claim does not
// exist any more is a success.
func (a *applier) apply(ctx context.Context, e *entry, entries []resourceapi.AllocatedDeviceStatus) error {
	status := resourceapply.ResourceClaimStatus()
	for i := range entries {
		status.WithDevices(configuration(&entries[i]))
	}
	// With the UID another claim of the same name is left alone.
	wanted := resourceapply.ResourceClaim(e.ref.Name, e.ref.Namespace).WithUID(e.ref.UID).WithStatus(status)
	stored, err := a.client.ResourceV1().ResourceClaims(e.ref.Namespace).ApplyStatus(ctx, wanted, metav1.ApplyOptions{FieldManager: FieldManager, Force: true})
	switch {
	case isMissing(err):
		e.known, e.gone, e.stored = true, true, nil
		return nil
	case apierrors.IsConflict(err), apierrors.IsInvalid(err):
		// Another claim may have its name.
		if readErr := a.read(ctx, e); readErr == nil && e.gone {
			return nil
		}
		fallthrough
	case err != nil:
		e.known = false
		return fmt.Errorf("write the status of claim %s: %w", e.ref, err)
	}
	e.known, e.gone, e.stored = true, false, own(a.driver, stored.Status.Devices)
	for i := range entries {
		if !slices.ContainsFunc(e.stored, func(s resourceapi.AllocatedDeviceStatus) bool { return keyOf(&s) == keyOf(&entries[i]) }) {
			return fmt.Errorf("write the status of claim %s: %w", e.ref, errDropped)
		}
	}
	return nil
}

// configuration is an entry in the form for server-side apply.
func configuration(s *resourceapi.AllocatedDeviceStatus) *resourceapply.AllocatedDeviceStatusApplyConfiguration {
	c := resourceapply.AllocatedDeviceStatus().WithDriver(s.Driver).WithPool(s.Pool).WithDevice(s.Device).WithData(*s.Data)
	if s.ShareID != nil {
		c.WithShareID(*s.ShareID)
	}
	for _, one := range s.Conditions {
		c.WithConditions(metaapply.Condition().WithType(one.Type).WithStatus(one.Status).WithReason(one.Reason).
			WithMessage(one.Message).WithLastTransitionTime(one.LastTransitionTime))
	}
	return c
}

// isMissing reports whether there is no such claim. A path that is not served is something
// else.
func isMissing(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// isForbidden reports whether the driver lacks a permission. What Kubernetes checks about the
// drivers of entries (DRAResourceClaimGranularStatusAuthorization) makes an invalid object.
func isForbidden(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.HasStatusCause(err, metav1.CauseTypeForbidden)
}
