// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedresource "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/logchange"
)

// Features are what a cluster can do with devices.
type Features struct {
	// PartitionableDevices: the API server stores shared counters.
	PartitionableDevices bool
	// ConsumableCapacity: the API server stores what several claims need to share
	// one device.
	ConsumableCapacity bool
}

// AllFeatures are those of Kubernetes 1.36 and later by default.
var AllFeatures = Features{PartitionableDevices: true, ConsumableCapacity: true}

// Feature gates without which the API server drops shared counters, and what
// several claims need to share one device.
const (
	gatePartitionable = "DRAPartitionableDevices"
	gateConsumable    = "DRAConsumableCapacity"
)

var (
	errNoCounters = errors.New("shared counters are not supported")
	errNoShares   = errors.New("devices for several claims are not supported")
)

// features finds out which features a cluster has. Until the opposite is known it
// has all of them.
type features struct {
	driverName, nodeName string
	client               typedresource.ResourceSliceInterface

	noCounters, noShares atomic.Bool
	// dropped are the gates of which it was logged last that they are off.
	dropped logchange.Value[string]
}

func newFeatures(driverName, nodeName string, client typedresource.ResourceSliceInterface) *features {
	return &features{driverName: driverName, nodeName: nodeName, client: client}
}

func (f *features) known() Features {
	return Features{PartitionableDevices: !f.noCounters.Load(), ConsumableCapacity: !f.noShares.Load()}
}

// probe asks the API server what it stores. An error means that there was no
// answer.
func (f *features) probe(ctx context.Context) error {
	err := f.tryCounters(ctx)
	if errors.Is(err, errNoCounters) {
		// Nothing would keep a share and the whole GPU from being allocated
		// together, so that there is no need to ask about shares.
		f.lacksCounters(ctx, err.Error())
		return nil
	}
	if err == nil {
		err = f.tryShares(ctx)
	}
	if errors.Is(err, errNoShares) {
		f.lacksShares(ctx, err.Error())
		return nil
	}
	return err
}

// noteDropped evaluates the fields that the API server dropped from published
// slices, and reports whether other slices must be published. Slices that lost
// their counters would let a whole GPU and its partitions be allocated at the same
// time.
func (f *features) noteDropped(ctx context.Context, dropped *resourceslice.DroppedFieldsError) (changed bool) {
	gates := dropped.DisabledFeatures()
	if f.dropped.Set(strings.Join(gates, ",")) {
		klog.FromContext(ctx).Info("The API server dropped fields of the published ResourceSlices because feature gates are off",
			"featureGates", gates, "pool", dropped.PoolName)
	}
	if slices.Contains(gates, gatePartitionable) {
		changed = f.lacksCounters(ctx, "the API server dropped the shared counters") || changed
	}
	if slices.Contains(gates, gateConsumable) {
		changed = f.lacksShares(ctx, "the API server dropped what shares need") || changed
	}
	return changed
}

// lacksCounters reports whether that was not known before.
func (f *features) lacksCounters(ctx context.Context, reason string) bool {
	if !f.noCounters.CompareAndSwap(false, true) {
		return false
	}
	klog.FromContext(ctx).Info("Publishing whole GPUs only where partitions would need shared counters: "+
		"turn on the feature gate "+gatePartitionable+" (Kubernetes 1.35; on by default from 1.36) "+
		"in kube-apiserver, kube-scheduler and kube-controller-manager, then restart this pod", "reason", reason)
	return true
}

// lacksShares reports whether that was not known before.
func (f *features) lacksShares(ctx context.Context, reason string) bool {
	if !f.noShares.CompareAndSwap(false, true) {
		return false
	}
	klog.FromContext(ctx).Info("Publishing no MPS and time-slice shares: "+
		"turn on the feature gate "+gateConsumable+" (Kubernetes 1.34; on by default from 1.36) "+
		"in kube-apiserver, kube-scheduler, kube-controller-manager and kubelet, then restart this pod", "reason", reason)
	return true
}

// tryCounters creates the two kinds of slices that a partitionable pool is made
// of, as a dry run that stores nothing. With the gate off the fields come back
// empty. Kubernetes 1.34 wants counter sets and devices in the same slice and
// refuses the second one.
func (f *features) tryCounters(ctx context.Context) error {
	counter := map[string]resourceapi.Counter{"probe": {Value: resource.MustParse("1")}}
	sets, err := f.tryCreate(ctx, errNoCounters, func(spec *resourceapi.ResourceSliceSpec) {
		spec.SharedCounters = []resourceapi.CounterSet{{Name: "probe", Counters: counter}}
	})
	if err != nil {
		return err
	}
	if len(sets.SharedCounters) == 0 {
		return fmt.Errorf("%w: the API server dropped spec.sharedCounters", errNoCounters)
	}
	devices, err := f.tryCreate(ctx, errNoCounters, func(spec *resourceapi.ResourceSliceSpec) {
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
func (f *features) tryShares(ctx context.Context) error {
	one := resource.MustParse("1")
	created, err := f.tryCreate(ctx, errNoShares, func(spec *resourceapi.ResourceSliceSpec) {
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

// tryCreate returns what would be stored, or an error that wraps unsupported when
// the API server finds the slice invalid.
func (f *features) tryCreate(
	ctx context.Context, unsupported error, fill func(*resourceapi.ResourceSliceSpec),
) (*resourceapi.ResourceSliceSpec, error) {
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "partage-probe-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   f.driverName,
			NodeName: &f.nodeName,
			Pool:     resourceapi.ResourcePool{Name: f.nodeName, ResourceSliceCount: 2},
		},
	}
	fill(&slice.Spec)
	created, err := f.client.Create(ctx, slice, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case err == nil:
		return &created.Spec, nil
	case refusesFields(err):
		return nil, fmt.Errorf("%w: the API server refused them: %w", unsupported, err)
	default:
		return nil, fmt.Errorf("create a ResourceSlice as a dry run: %w", err)
	}
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
