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

// gates returns the features that the server has by its feature gates. It creates a slice
// that needs them, as a dry run that stores nothing. With a gate off its fields come back
// empty. Kubernetes 1.34 wants counter sets and devices in the same slice and refuses one
// whose devices draw on counters of another. An error means that there was no answer.
//
// A slice of counters is not tried: their field has the gate of the devices' field, and what
// is stored is compared with what was sent.
func (p *prober) gates(ctx context.Context) (f Features, err error) {
	one := resource.MustParse("1")
	devices := []resourceapi.Device{
		probeOfCounters: {
			Name:   "probe-counters",
			Taints: []resourceapi.DeviceTaint{{Key: p.pool.driverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
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
	created, err := p.tryCreate(ctx, devices)
	if refusesFields(err) {
		// Without the fields that are refused it may say what it does with taints.
		f.PartitionableDevices = refusesOnly(err, fmt.Sprintf("spec.devices[%d]", probeOfShares))
		devices[probeOfCounters].ConsumesCounters = nil
		created, err = p.tryCreate(ctx, devices[:probeOfShares])
		if f.Taints = refusesFields(err); f.Taints { // that shows when some are written
			return f, nil
		}
	}
	if err != nil || len(created.Devices) == 0 {
		return f, err
	}
	counters := created.Devices[probeOfCounters]
	f.Taints = len(counters.Taints) > 0
	if len(created.Devices) > probeOfShares {
		shares := created.Devices[probeOfShares]
		f.PartitionableDevices = len(counters.ConsumesCounters) > 0
		// Without counters nothing would keep a share and the whole GPU from being allocated together.
		f.ConsumableCapacity = f.PartitionableDevices && shares.AllowMultipleAllocations != nil && shares.Capacity["shares"].RequestPolicy != nil
	}
	return f, nil
}

// tryCreate returns what would be stored.
func (p *prober) tryCreate(ctx context.Context, devices []resourceapi.Device) (*resourceapi.ResourceSliceSpec, error) {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "partage-probe-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   p.pool.driverName,
			NodeName: &p.pool.nodeName,
			Pool:     resourceapi.ResourcePool{Name: p.pool.nodeName, ResourceSliceCount: 2},
			Devices:  devices,
		},
	}
	created, err := p.write(ctx, "create", slice, []string{metav1.DryRunAll})
	if err != nil {
		return nil, fmt.Errorf("create a ResourceSlice as a dry run: %w", err)
	}
	return &created.Spec, nil
}

// write creates or updates a slice on a connection of its own.
func (p *prober) write(ctx context.Context, verb string, slice *resourceapi.ResourceSlice, dryRun []string) (*resourceapi.ResourceSlice, error) {
	request := p.client.Post().VersionedParams(&metav1.CreateOptions{DryRun: dryRun}, scheme.ParameterCodec)
	if verb == "update" {
		request = p.client.Put().Name(slice.Name).VersionedParams(&metav1.UpdateOptions{DryRun: dryRun}, scheme.ParameterCodec)
	}
	stored := &resourceapi.ResourceSlice{}
	err := request.Resource(sliceResource.Resource).SetHeader("Connection", "close").Body(slice).Do(ctx).Into(stored)
	return stored, err
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
