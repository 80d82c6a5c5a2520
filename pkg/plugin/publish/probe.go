// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

var (
	errNoCounters = errors.New("shared counters are not supported")
	errNoShares   = errors.New("devices for several claims are not supported")
	errNoTaints   = errors.New("taints are not supported")
)

// prober asks one API server which features it has. Its requests use connections of
// their own: an established one leads to the same server again and again.
type prober struct {
	pool   pool
	client rest.Interface
}

// unknownVersion stands for that of a server which does not tell.
const unknownVersion = "unknown"

// version returns the version of the server.
func (p *prober) version(ctx context.Context) (string, error) {
	var found version.Info
	body, err := p.client.Get().AbsPath("/version").SetHeader("Connection", "close").Do(ctx).Raw()
	if apierrors.IsForbidden(err) {
		klog.FromContext(ctx).V(2).Info("No right to ask for the API server's version, taking it for a new one", "err", err)
		return unknownVersion, nil
	}
	if err == nil {
		err = json.Unmarshal(body, &found)
	}
	if err != nil {
		return "", fmt.Errorf("ask for the API server's version: %w", err)
	}
	return found.GitVersion, nil
}

// gates reports which features the server has by its feature gates. An error means
// that there was no answer.
func (p *prober) gates(ctx context.Context) (partitionable, consumable bool, err error) {
	err = p.tryCounters(ctx)
	if errors.Is(err, errNoCounters) {
		// Nothing would keep a share and the whole GPU from being allocated
		// together, so that there is no need to ask about shares.
		return false, false, nil
	}
	if err == nil {
		err = p.tryShares(ctx)
	}
	if errors.Is(err, errNoShares) {
		return true, false, nil
	}
	return err == nil, err == nil, err
}

// tryCounters creates the two kinds of slices that a partitionable pool is made
// of, as a dry run that stores nothing. With the gate off the fields come back
// empty. Kubernetes 1.34 wants counter sets and devices in the same slice and
// refuses the second one.
func (p *prober) tryCounters(ctx context.Context) error {
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

// tryShares creates a slice with a share, as a dry run that stores nothing.
func (p *prober) tryShares(ctx context.Context) error {
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

// taints reports whether the server stores taints.
func (p *prober) taints(ctx context.Context) (bool, error) {
	created, err := p.tryCreate(ctx, errNoTaints, func(spec *resourceapi.ResourceSliceSpec) {
		spec.Devices = []resourceapi.Device{{
			Name:   "probe",
			Taints: []resourceapi.DeviceTaint{{Key: p.pool.driverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
		}}
	})
	if errors.Is(err, errNoTaints) {
		return false, nil
	}
	return err == nil && len(created.Devices) == 1 && len(created.Devices[0].Taints) > 0, err
}

// tryCreate returns what would be stored, or an error that wraps unsupported when
// the API server finds the slice invalid.
func (p *prober) tryCreate(
	ctx context.Context, unsupported error, fill func(*resourceapi.ResourceSliceSpec),
) (*resourceapi.ResourceSliceSpec, error) {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "partage-probe-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   p.pool.driverName,
			NodeName: &p.pool.nodeName,
			Pool:     resourceapi.ResourcePool{Name: p.pool.nodeName, ResourceSliceCount: 2},
		},
	}
	fill(&slice.Spec)
	created, err := p.create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case err == nil:
		return &created.Spec, nil
	case refusesFields(err):
		return nil, fmt.Errorf("%w: the API server refused them: %w", unsupported, err)
	default:
		return nil, fmt.Errorf("create a ResourceSlice as a dry run: %w", err)
	}
}

// create is that of a typed client, on a connection of its own.
func (p *prober) create(ctx context.Context, slice *resourceapi.ResourceSlice, o metav1.CreateOptions) (*resourceapi.ResourceSlice, error) {
	created := &resourceapi.ResourceSlice{}
	err := p.client.Post().Resource(sliceResource.Resource).SetHeader("Connection", "close").
		VersionedParams(&o, scheme.ParameterCodec).Body(slice).Do(ctx).Into(created)
	return created, err
}

// refusesFields distinguishes a validation error about the fields in question from
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
