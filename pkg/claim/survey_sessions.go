// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

// silenceLimit is how long the MPS supervisor may not answer before people are told. At the start of a node it may begin
// later than this process.
const silenceLimit = 5 * time.Second

// sessionConditions says which MPS sessions are not well, and whether there can be any.
func (s *surveyor) sessionConditions(ctx context.Context, inventory *device.Inventory) []device.Condition {
	limited, cancel := context.WithTimeout(ctx, surveyWait)
	defer cancel()
	sessions, err := s.list(limited)
	if s.silent(err != nil) >= silenceLimit {
		return mpsUnavailable(inventory, err)
	}
	shapes := map[string]*device.PartitionShape{}
	for _, d := range inventory.Devices() {
		shapes[base(d)] = d.Partition
	}
	var conditions []device.Condition
	for _, id := range slices.Sorted(maps.Keys(sessions)) {
		status := sessions[id]
		if !unhealthy(status) {
			continue
		}
		c := device.Condition{Reason: device.MPSUnhealthy, Message: fmt.Sprintf("MPS on device %s is %s: %s", id, status.Phase, status.Message)}
		if shape := shapes[id]; shape != nil {
			c.Where = &shape.Placement
		}
		for _, address := range gpusOf(inventory, id, status) {
			c.PCIAddress = address
			conditions = append(conditions, c)
		}
	}
	return conditions
}

// silent returns for how long the MPS supervisor has not answered, if it does not.
func (s *surveyor) silent(is bool) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock()
	switch {
	case !is:
		s.silentSince = nil
		return 0
	case s.silentSince == nil:
		s.silentSince = &now
	}
	return now - *s.silentSince
}

// base is the name of what a device is a share of, or its own.
func base(d device.Device) string {
	if d.Share != nil {
		return d.Share.Base
	}
	return d.Name
}

// mpsUnavailable keeps shares from being allocated while nobody can start a session.
func mpsUnavailable(inventory *device.Inventory, err error) []device.Condition {
	var conditions []device.Condition
	for _, d := range inventory.Devices() {
		same := func(c device.Condition) bool { return c.PCIAddress == d.GPU.PCIAddress }
		if d.Kind == device.MPS && !slices.ContainsFunc(conditions, same) {
			conditions = append(conditions, device.Condition{
				PCIAddress: d.GPU.PCIAddress, Kind: device.MPS, Reason: device.MPSUnavailable, Message: err.Error(),
			})
		}
	}
	return conditions
}

// unhealthy is a session that had clients and cannot have new ones. One that starts
// for the first time has a claim that waits for it.
func unhealthy(s mps.Status) bool {
	switch s.Phase {
	case mps.Running:
		return false
	case mps.Starting:
		return s.Losses > 0
	}
	return true
}

// gpusOf finds the GPUs of a session, or none where it is not of a device of this node.
func gpusOf(inventory *device.Inventory, id string, status mps.Status) []string {
	var own string
	byUUID := map[string]string{}
	for _, d := range inventory.Devices() {
		byUUID[d.GPU.UUID] = d.GPU.PCIAddress
		if name := device.GPUName(d.GPU.PCIAddress); id == name || strings.HasPrefix(id, name+"-") {
			own = d.GPU.PCIAddress
		}
	}
	if own == "" {
		return nil
	}
	var gpus []string
	for _, uuid := range status.Spec.Devices {
		gpus = append(gpus, cmp.Or(byUUID[uuid], own)) // the UUID of a partition is not in the inventory
	}
	return slices.Compact(gpu.SortPCIAddresses(gpus))
}
