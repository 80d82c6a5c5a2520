// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"k8s.io/dynamic-resource-allocation/api/metadata"
	"k8s.io/dynamic-resource-allocation/devicemetadata"

	"github.com/partage-dev/partage/pkg/api"
)

// Flags for what the driver tells of a claim's devices. The harness leaves them off: they are
// written at times of their own, so that the effects of a call would differ from one time to the
// next.
const (
	ClaimStatusOn    = "--claim-status=true"
	DeviceMetadataOn = "--device-metadata=true"
)

// StatusEntry is what a claim's status says of a device.
type StatusEntry struct {
	// Ready is the status of the condition and its reason.
	Ready string
	api.DeviceStatus
}

// Status is what the status of a claim says of its devices.
func (n *Cluster) Status(namespace, name string) ([]StatusEntry, error) {
	var entries []StatusEntry
	for _, d := range n.API.Claim(namespace, name).Status.Devices {
		one := StatusEntry{}
		for _, c := range d.Conditions {
			one.Ready = fmt.Sprintf("%s/%s", c.Status, c.Reason)
		}
		if err := json.Unmarshal(d.Data.Raw, &one.DeviceStatus); err != nil {
			return nil, fmt.Errorf("status of claim %s: %w", name, err)
		}
		entries = append(entries, one)
	}
	return entries, nil
}

// ReadMetadata reads the file about a request of a claim as programs in the container would.
func ReadMetadata(spec *oci.Spec, claim, request string) (*metadata.DeviceMetadata, error) {
	path := metadata.ResourceClaimFilePath(DriverName, claim, request)
	at := slices.IndexFunc(spec.Mounts, func(m oci.Mount) bool { return m.Destination == path })
	if at < 0 {
		return nil, fmt.Errorf("nothing is mounted at %s: %+v", path, spec.Mounts)
	}
	file, err := os.Open(spec.Mounts[at].Source)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	read := &metadata.DeviceMetadata{}
	return read, devicemetadata.DecodeMetadataFromStream(json.NewDecoder(file), read)
}

// WithoutMetadata are the CDI ids of devices, without those of the files about them.
func WithoutMetadata(ids []string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return strings.HasPrefix(id, DriverName+"/metadata=") })
}
