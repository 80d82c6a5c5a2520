// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package nicdriver is a small DRA driver for network cards: it publishes the cards that the PCI bus
// shows, with the attributes that Kubernetes defines for PCI devices, and tells a container the
// addresses of those that it got. It stands in for the driver of a real network, such as DRANET, in demos and
// tests of constraints over devices of two drivers. It configures no network.
package nicdriver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Name is the driver's.
const Name = "nic.demo.partage.dev"

// cdiKind is the vendor and class of its CDI devices.
const cdiKind = Name + "/claim"

// Driver prepares claims. Each has a file in the folder of CDI specs, which is all that the driver
// remembers.
type Driver struct {
	// CDIDir is the folder of CDI specs.
	CDIDir string
}

var _ kubeletplugin.DRAPlugin = (*Driver)(nil)

// PrepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (d *Driver) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		devices, err := d.prepare(claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

func (d *Driver) prepare(claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	if claim.Status.Allocation == nil {
		return nil, fmt.Errorf("claim %s/%s is not allocated", claim.Namespace, claim.Name)
	}
	spec := specs.Spec{Version: "0.6.0", Kind: cdiKind}
	var devices []kubeletplugin.Device
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != Name {
			continue
		}
		name := string(claim.UID) + "-" + result.Device
		spec.Devices = append(spec.Devices, specs.Device{
			Name:           name,
			ContainerEdits: specs.ContainerEdits{Env: []string{variable(result.Device)}},
		})
		devices = append(devices, kubeletplugin.Device{
			Requests: []string{result.Request}, PoolName: result.Pool, DeviceName: result.Device,
			CDIDeviceIDs: []string{cdiKind + "=" + name},
		})
	}
	data, err := yaml.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("write the CDI spec of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	// The runtime reads files whose names end in .yaml only.
	file := d.file(claim.UID)
	if err := errors.Join(os.WriteFile(file+".new", data, 0o600), os.Rename(file+".new", file)); err != nil {
		return nil, fmt.Errorf("write the CDI spec of claim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return devices, nil
}

// variable is NIC_0000_19_00_0=0000:19:00.0, so that several cards have one each.
func variable(device string) string {
	parts := strings.Split(device, "-") // as deviceName makes it
	return fmt.Sprintf("NIC_%s=%s:%s:%s.%s", strings.Join(parts[1:], "_"), parts[1], parts[2], parts[3], parts[4])
}

// UnprepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (d *Driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		err := os.Remove(d.file(claim.UID))
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		results[claim.UID] = err
	}
	return results, nil
}

// Prepared reports whether claims are prepared. The driver must serve the kubelet until none are, for
// pods stay until their claims are unprepared.
func (d *Driver) Prepared() (bool, error) {
	files, err := filepath.Glob(d.file("*"))
	if err != nil {
		return false, fmt.Errorf("list CDI specs: %w", err)
	}
	return len(files) > 0, nil
}

func (d *Driver) file(claim types.UID) string {
	return filepath.Join(d.CDIDir, Name+"-"+string(claim)+".yaml")
}

// HandleError implements [kubeletplugin.DRAPlugin].
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	klog.FromContext(ctx).Error(err, msg)
}

// WatchHealthStatus implements [kubeletplugin.DRAPlugin]. It is never called, see [kubeletplugin.HealthService].
func (d *Driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return nil
}
