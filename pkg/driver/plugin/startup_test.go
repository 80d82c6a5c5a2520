// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/gpu"
)

// TestStartup: how long a claim waits for the start of the plugin.
func TestStartup(t *testing.T) {
	t.Parallel()
	known := []string{firstName, onePart}
	for name, test := range map[string]struct {
		recalled, opened bool
		devices          []string
		finish           time.Duration
		want             time.Duration
	}{
		"finished soon":            {recalled: true, opened: true, devices: known, finish: time.Second, want: time.Second},
		"a GPU does not answer":    {recalled: true, opened: true, devices: known, want: startPatience},
		"first start":              {opened: true, devices: known, finish: time.Minute, want: startupTimeout},
		"another device":           {recalled: true, opened: true, devices: []string{firstName, onePart + "-static"}, finish: 9 * time.Second, want: 9 * time.Second},
		"the driver is not loaded": {recalled: true, devices: known, finish: 9 * time.Second, want: 9 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStartup()
				if test.recalled {
					s.inventory.Store(inventoryOf(t, testNodeWith(firstGPU)))
				}
				if test.opened {
					s.opened()
					s.opened()
				}
				if test.finish > 0 {
					time.AfterFunc(test.finish, s.finish)
				}
				start := time.Now()
				s.wait(t.Context(), test.devices, startupTimeout)
				if waited := time.Since(start); waited != test.want {
					t.Errorf("waited %s, want %s", waited, test.want)
				}
			})
		})
	}
}

// TestClaimsBesideAGPUThatHangs: only the first discovery hangs, and claims are
// prepared meanwhile.
func TestClaimsBesideAGPUThatHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.DataDir = t.TempDir()
	write(t, r.options.DataDir, r.options.BootID, testNodeWith(firstGPU))
	answers := make(chan struct{})
	r.hardware.setOnDiscover(func(ctx context.Context) error {
		select {
		case <-answers:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	r.build(t)
	ctx, cancel := context.WithCancel(t.Context())
	r.plugin.service.neighbours.firstScan(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.plugin.gpus.run(ctx)
	}()
	claim := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: allocationOf(onePart)}}
	if result := r.plugin.service.prepare(ctx, claim); result.Err != nil {
		t.Errorf("a claim whose GPU was discovered by an earlier process: %v", result.Err)
	}
	close(answers)
	cancel()
	<-ended
}

// allocationOf is an allocation of devices.
func allocationOf(names ...string) *resourceapi.AllocationResult {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, name := range names {
		results = append(results, resourceapi.DeviceRequestAllocationResult{Driver: testDriver, Pool: testNode, Device: name})
	}
	return &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
}

func write(t *testing.T, dir, boot string, seen *gpu.Node) {
	t.Helper()
	if err := lastseen.New(dir, boot).Write(seen, nil); err != nil {
		t.Fatal(err)
	}
}
