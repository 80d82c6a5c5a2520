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
)

// errNoCounters says that the API server answered and does not take counters.
var errNoCounters = errors.New("shared counters are not supported")

// probeCounters finds out whether this cluster stores what partitions need,
// before anything is published that would be misunderstood without it. It tries
// until there is an answer; false says that ctx ended first.
func (p *Plugin) probeCounters(ctx context.Context) bool {
	err := p.retry.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := p.tryCounters(ctx)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, errNoCounters):
			p.noCounters.Store(true)
			p.logNoCounters(ctx, err.Error())
			return true, nil
		case ctx.Err() == nil:
			p.ready.setSlices(ctx, fmt.Sprintf("could not ask the API server which features it has: %v", err))
		}
		return false, nil
	})
	return err == nil
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
	sets, err := p.tryCreate(ctx, func(spec *resourceapi.ResourceSliceSpec) {
		spec.SharedCounters = []resourceapi.CounterSet{{Name: "probe", Counters: counter}}
	})
	if err != nil {
		return err
	}
	if len(sets.SharedCounters) == 0 {
		return fmt.Errorf("%w: the API server dropped spec.sharedCounters", errNoCounters)
	}
	devices, err := p.tryCreate(ctx, func(spec *resourceapi.ResourceSliceSpec) {
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

func (p *Plugin) tryCreate(ctx context.Context, fill func(*resourceapi.ResourceSliceSpec)) (*resourceapi.ResourceSliceSpec, error) {
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
	case refusesCounters(err):
		return nil, fmt.Errorf("%w: the API server refused them: %w", errNoCounters, err)
	default:
		return nil, fmt.Errorf("create a ResourceSlice as a dry run: %w", err)
	}
}

// refusesCounters tells a validation error about the fields in question from
// other refusals: an admission policy answers "invalid" too, but names no field.
func refusesCounters(err error) bool {
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
