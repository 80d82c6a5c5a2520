// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilversion "k8s.io/apimachinery/pkg/util/version"
)

// drop takes away the fields of feature gates that are off. As in a real server, what
// the stored slice uses already is kept in an update; old is nil for a slice that is
// created. It needs the lock.
func (s *Server) drop(slice, old *resourceapi.ResourceSlice) {
	used := func(by func(*resourceapi.Device) bool) bool {
		return old != nil && slices.ContainsFunc(old.Spec.Devices, func(d resourceapi.Device) bool { return by(&d) })
	}
	counters := s.dropCounters && !used(usesCounters) && (old == nil || len(old.Spec.SharedCounters) == 0)
	shares := s.dropShares && !used(usesShares)
	taints := s.dropTaints && !used(usesTaints)
	if counters {
		slice.Spec.SharedCounters = nil
	}
	for i := range slice.Spec.Devices {
		d := &slice.Spec.Devices[i]
		if counters {
			d.ConsumesCounters = nil
		}
		if taints {
			d.Taints = nil
		}
		if shares {
			dropShares(d)
		}
	}
}

func dropShares(d *resourceapi.Device) {
	d.AllowMultipleAllocations = nil
	for name, capacity := range d.Capacity {
		capacity.RequestPolicy = nil
		d.Capacity[name] = capacity
	}
}

func usesCounters(d *resourceapi.Device) bool { return len(d.ConsumesCounters) > 0 }

func usesTaints(d *resourceapi.Device) bool { return len(d.Taints) > 0 }

func usesShares(d *resourceapi.Device) bool {
	for _, capacity := range d.Capacity {
		if capacity.RequestPolicy != nil {
			return true
		}
	}
	return d.AllowMultipleAllocations != nil
}

// maxTaints is how many taints a device may have, and maxTaints134 how many in Kubernetes 1.34.
const maxTaints, maxTaints134 = resourceapi.DeviceTaintsMaxLength, 4

// invalid refuses a slice whose devices have more taints than this version takes. Nothing
// else is validated. It needs the lock.
func (s *Server) invalid(slice *resourceapi.ResourceSlice) *apierrors.StatusError {
	limit := maxTaints
	if v, err := utilversion.ParseGeneric(s.kubernetes); err == nil && v.LessThan(utilversion.MajorMinor(1, 35)) {
		limit = maxTaints134
	}
	var errs field.ErrorList
	for i, d := range slice.Spec.Devices {
		if len(d.Taints) > limit {
			errs = append(errs, field.TooMany(field.NewPath(fmt.Sprintf("spec.devices[%d].taints", i)), len(d.Taints), limit))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return invalidSlice(slice.Name, errs...)
}

func invalidSlice(name string, errs ...*field.Error) *apierrors.StatusError {
	return apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceSlice").GroupKind(), name, errs)
}
