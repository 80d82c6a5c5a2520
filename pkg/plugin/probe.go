// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// errNoCounters says that the API server answered and does not take counters.
var errNoCounters = errors.New("shared counters are not supported")

// errNoShares says the same of devices that several claims can have.
var errNoShares = errors.New("devices for several claims are not supported")

// probe finds out whether this cluster stores what partitions and shares need,
// before anything is published that would be misunderstood without it. It tries
// until there is an answer; false says that ctx ended first.
func (p *Plugin) probe(ctx context.Context) bool {
	err := p.retry.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := p.tryCounters(ctx)
		if errors.Is(err, errNoCounters) {
			// Nothing would keep a share and the whole GPU from being allocated
			// together, so that there is nothing to ask about shares.
			p.noCounters.Store(true)
			p.logNoCounters(ctx, err.Error())
			return true, nil
		}
		if err == nil {
			err = p.tryShares(ctx)
		}
		if errors.Is(err, errNoShares) {
			p.noShares.Store(true)
			p.logNoShares(ctx, err.Error())
			return true, nil
		}
		if err != nil && ctx.Err() == nil {
			p.ready.setSlices(ctx, fmt.Sprintf("could not ask the API server which features it has: %v", err))
		}
		return err == nil, nil
	})
	return err == nil
}

func (p *Plugin) logNoShares(ctx context.Context, reason string) {
	klog.FromContext(ctx).Info("Publishing no MPS and time-slice shares: "+
		"turn on the feature gate "+featureConsumable+" (Kubernetes 1.34; on by default from 1.36) "+
		"in kube-apiserver, kube-scheduler, kube-controller-manager and kubelet, then restart this pod", "reason", reason)
}

// tryShares creates a slice with a share, as a dry run that stores nothing.
func (p *Plugin) tryShares(ctx context.Context) error {
	one := resource.MustParse("1")
	created, err := p.tryCreate(ctx, errNoShares, func(spec *resourceapi.ResourceSliceSpec) {
		spec.Devices = []resourceapi.Device{{
			Name:                     "probe",
			AllowMultipleAllocations: ptr.To(true),
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				"shares": {Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{
					Default: &one, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &one},
				}},
			},
		}}
	})
	if err != nil {
		return err
	}
	if len(created.Devices) != 1 || created.Devices[0].AllowMultipleAllocations == nil || created.Devices[0].Capacity["shares"].RequestPolicy == nil {
		return fmt.Errorf("%w: the API server dropped spec.devices[].allowMultipleAllocations", errNoShares)
	}
	return nil
}

func (p *Plugin) logNoCounters(ctx context.Context, reason string) {
	klog.FromContext(ctx).Info("Publishing whole GPUs only where partitions would need shared counters: "+
		"turn on the feature gate "+featurePartitionable+" (Kubernetes 1.35; on by default from 1.36) "+
		"in kube-apiserver, kube-scheduler and kube-controller-manager, then restart this pod", "reason", reason)
}

// tryCounters creates the two kinds of slices that a partitionable pool is made
// of, as a dry run that stores nothing. With the gate off the fields come back
// empty. Kubernetes 1.34 wants counter sets and devices in the same slice and
// refuses the second one.
func (p *Plugin) tryCounters(ctx context.Context) error {
	counter := map[string]resourceapi.Counter{"probe": {Value: resource.MustParse("1")}}
	sets, err := p.tryCreate(ctx, errNoCounters, func(spec *resourceapi.ResourceSliceSpec) {
		spec.SharedCounters = []resourceapi.CounterSet{{Name: "probe", Counters: counter}}
	})
	if err != nil {
		return err
	}
	if len(sets.SharedCounters) == 0 {
		return fmt.Errorf("%w: the API server dropped spec.sharedCounters", errNoCounters)
	}
	devices, err := p.tryCreate(ctx, errNoCounters, func(spec *resourceapi.ResourceSliceSpec) {
		spec.Devices = []resourceapi.Device{{
			Name:             "probe",
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "probe", Counters: counter}},
		}}
	})
	if err != nil {
		return err
	}
	if len(devices.Devices) != 1 || len(devices.Devices[0].ConsumesCounters) == 0 {
		return fmt.Errorf("%w: the API server dropped spec.devices[].consumesCounters", errNoCounters)
	}
	return nil
}

// tryCreate returns what would be stored, or an error that wraps refused when the
// API server says that the slice makes no sense.
func (p *Plugin) tryCreate(ctx context.Context, refused error, fill func(*resourceapi.ResourceSliceSpec)) (*resourceapi.ResourceSliceSpec, error) {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "partage-probe-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   p.DriverName,
			NodeName: &p.NodeName,
			Pool:     resourceapi.ResourcePool{Name: p.NodeName, ResourceSliceCount: 2},
		},
	}
	fill(&slice.Spec)
	created, err := p.slices.ResourceSlices().Create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case err == nil:
		return &created.Spec, nil
	case refusesFields(err):
		return nil, fmt.Errorf("%w: the API server refused them: %w", refused, err)
	default:
		return nil, fmt.Errorf("create a ResourceSlice as a dry run: %w", err)
	}
}

// refusesFields tells a validation error about the fields in question from
// other refusals: an admission policy answers "invalid" too, but names no field.
func refusesFields(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	for _, cause := range status.Status().Details.Causes {
		if strings.HasPrefix(cause.Field, "spec.sharedCounters") || strings.HasPrefix(cause.Field, "spec.devices") {
			return true
		}
	}
	return false
}
