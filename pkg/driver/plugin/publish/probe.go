// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
)

// prober asks one API server which features it has, and writes. Its requests use connections of
// their own: an established one leads to the same server again and again.
type prober struct {
	pool   pool
	client rest.Interface
}

// version returns the version of the server.
func (p *prober) version(ctx context.Context) (string, error) {
	var found version.Info
	body, err := p.client.Get().AbsPath("/version").SetHeader("Connection", "close").Do(ctx).Raw()
	if err == nil {
		err = json.Unmarshal(body, &found)
	}
	if err != nil {
		return "", fmt.Errorf("ask for the API server's version: %w", err)
	}
	return found.GitVersion, nil
}

// gates returns the features that a server of this version has by its feature gates. It creates a slice
// that needs them, as a dry run that stores nothing. With a gate off its fields come back
// empty. Kubernetes 1.34 wants counter sets and devices in the same slice and refuses one
// whose devices draw on counters of another, so that it is asked for taints only.
//
// A slice of counters is not tried: their field has the gate of the devices' field, and what
// is stored is compared with what was sent.
func (p *prober) gates(ctx context.Context, version string) (Features, error) {
	probe := resourceapi.Device{
		Name: "probe", Taints: []resourceapi.DeviceTaint{{Key: p.pool.driverName + "/probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
	}
	if faults, _ := device.FaultsOfScheduler(version); !faults.IgnoresCounters {
		probe.AllowMultipleAllocations = ptr.To(true)
		probe.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
			CounterSet: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: resource.MustParse("1")}},
		}}
	}
	stored, err := p.write(ctx, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "partage-probe-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   p.pool.driverName,
			NodeName: &p.pool.nodeName,
			Pool:     resourceapi.ResourcePool{Name: p.pool.nodeName, ResourceSliceCount: 2},
			Devices:  []resourceapi.Device{probe},
		},
	}, []string{metav1.DryRunAll})
	if err != nil {
		return 0, fmt.Errorf("dry run: %w", err)
	}
	return usedBy(stored) & gates, nil
}

// write creates a slice, or updates it if it has a UID, on a connection of its own.
func (p *prober) write(ctx context.Context, slice *resourceapi.ResourceSlice, dryRun []string) (*resourceapi.ResourceSlice, error) {
	verb, request := "create", p.client.Post().VersionedParams(&metav1.CreateOptions{DryRun: dryRun}, scheme.ParameterCodec)
	if slice.UID != "" {
		verb, request = "update", p.client.Put().Name(slice.Name)
	}
	stored := &resourceapi.ResourceSlice{}
	err := request.Resource(sliceResource.Resource).SetHeader("Connection", "close").Body(slice).Do(ctx).Into(stored)
	if err != nil {
		return nil, fmt.Errorf("%s ResourceSlice %s: %w", verb, cmp.Or(slice.Name, slice.GenerateName), err)
	}
	return stored, nil
}
