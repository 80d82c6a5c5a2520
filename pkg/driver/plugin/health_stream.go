// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/partage-dev/partage/pkg/driver/plugin/internal/tenant"
)

const (
	// healthInterval is the time between two reports while nothing changes, and
	// healthTimeout how long the kubelet takes one for true.
	healthInterval = 10 * time.Second
	healthTimeout  = 30 * time.Second
	// maxHealthMessage is how much of a message the kubelet takes, in bytes.
	maxHealthMessage = 1024
)

// watch sends the health of the devices that claims have when it changes, and again and again,
// until ctx ends. It is one of several, where a kubelet connects anew.
func (s *deviceStates) watch(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for {
		report, changed := s.health(time.Now())
		select {
		case <-ctx.Done():
			return nil
		case reports <- report:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-ticker.C:
		}
	}
}

// health returns a report, and a channel that is closed when there is another. The kubelet
// knows devices by name: of the shares of a device the one that is worst counts.
func (s *deviceStates) health(now time.Time) (kubeletplugin.DeviceHealthReport, <-chan struct{}) {
	s.mu.Lock()
	states, surveyedAt, changed := s.states, s.surveyedAt, s.changed
	s.mu.Unlock()
	worst := map[string]kubeletplugin.DeviceHealth{}
	for _, c := range states {
		for _, d := range c.devices {
			one := kubeletplugin.DeviceHealth{
				PoolName: d.Pool, DeviceName: d.Device, Health: d.health, Message: d.message,
				LastUpdated: surveyedAt, HealthCheckTimeout: healthTimeout,
			}
			switch {
			case now.Sub(surveyedAt) > s.staleAfter:
				one.Health = kubeletplugin.HealthStatusUnknown
				one.Message = fmt.Sprintf("The driver has not been able to look at the GPUs of the node since %s.", surveyedAt.UTC().Format(time.RFC3339))
			case d.reason == reasonReady:
				one.Message = ""
			}
			one.Message = tenant.Text(one.Message, "", "", maxHealthMessage) // of all who have the device
			name := d.Pool + "/" + d.Device
			if other, known := worst[name]; !known || severity[one.Health] > severity[other.Health] {
				worst[name] = one
			}
		}
	}
	var report kubeletplugin.DeviceHealthReport
	for _, name := range slices.Sorted(maps.Keys(worst)) {
		report.Devices = append(report.Devices, worst[name])
	}
	return report, changed
}
