// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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

// Devices of the slice with which the server is asked what it stores, by index.
const probeOfCounters, probeOfShares = 0, 1

// gates reports which features the server has by its feature gates. It creates a slice
// that needs them, as a dry run that stores nothing. With a gate off its fields come back
// empty. Kubernetes 1.34 wants counter sets and devices in the same slice and refuses one
// whose devices draw on counters of another. An error means that there was no answer.
//
// A slice of counters is not tried: their field has the gate of the devices' field, and what
// is stored is compared with what was sent.
func (p *prober) gates(ctx context.Context) (partitionable, consumable bool, err error) {
	one := resource.MustParse("1")
	created, err := p.tryCreate(ctx, func(spec *resourceapi.ResourceSliceSpec) {
		spec.Devices = []resourceapi.Device{
			probeOfCounters: {
				Name: "probe-counters",
				ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
					CounterSet: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: one}},
				}},
			},
			probeOfShares: {
				Name:                     "probe-shares",
				AllowMultipleAllocations: ptr.To(true),
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
					"shares": {Value: one, RequestPolicy: &resourceapi.CapacityRequestPolicy{
						Default: &one, ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &one},
					}},
				},
			},
		}
	})
	switch {
	case refusesFields(err):
		return refusesOnly(err, fmt.Sprintf("spec.devices[%d]", probeOfShares)), false, nil
	case err != nil:
		return false, false, err
	case len(created.Devices) <= probeOfShares:
		return false, false, nil
	}
	shares := created.Devices[probeOfShares]
	partitionable = len(created.Devices[probeOfCounters].ConsumesCounters) > 0
	// Without counters nothing would keep a share and the whole GPU from being allocated together.
	consumable = partitionable && shares.AllowMultipleAllocations != nil && shares.Capacity["shares"].RequestPolicy != nil
	return partitionable, consumable, nil
}

// taints reports whether the server stores taints.
func (p *prober) taints(ctx context.Context) (bool, error) {
	created, err := p.tryCreate(ctx, func(spec *resourceapi.ResourceSliceSpec) {
		spec.Devices = []resourceapi.Device{{
			Name:   "probe",
			Taints: []resourceapi.DeviceTaint{{Key: p.pool.driverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
		}}
	})
	if refusesFields(err) {
		return false, nil
	}
	return err == nil && len(created.Devices) == 1 && len(created.Devices[0].Taints) > 0, err
}

// tryCreate returns what would be stored.
func (p *prober) tryCreate(ctx context.Context, fill func(*resourceapi.ResourceSliceSpec)) (*resourceapi.ResourceSliceSpec, error) {
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
	if err != nil {
		return nil, fmt.Errorf("create a ResourceSlice as a dry run: %w", err)
	}
	return &created.Spec, nil
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
	return slices.ContainsFunc(refusedFields(err), func(field string) bool {
		return strings.HasPrefix(field, "spec.sharedCounters") || strings.HasPrefix(field, "spec.devices")
	})
}

// refusesOnly reports whether a validation error is about nothing else than a field and
// what is in it.
func refusesOnly(err error, within string) bool {
	refused := refusedFields(err)
	return len(refused) > 0 && !slices.ContainsFunc(refused, func(field string) bool { return !strings.HasPrefix(field, within) })
}

// refusedFields are those that a validation error names.
func refusedFields(err error) []string {
	var status apierrors.APIStatus
	if !apierrors.IsInvalid(err) || !errors.As(err, &status) || status.Status().Details == nil {
		return nil
	}
	var refused []string
	for _, cause := range status.Status().Details.Causes {
		refused = append(refused, cause.Field)
	}
	return refused
}
