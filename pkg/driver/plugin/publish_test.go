// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/partage-dev/partage/pkg/device"
)

// isObserver reports whether a device is for claims with admin access, whose taint stays.
func isObserver(d resourceapi.Device) bool {
	return *d.Attributes["type"].StringValue == string(device.Observer)
}

// published counts what the API server holds, without observers.
func published(slices []resourceapi.ResourceSlice) (devices, counterSets int) {
	for _, slice := range slices {
		for _, d := range slice.Spec.Devices {
			if !isObserver(d) {
				devices++
			}
		}
		counterSets += len(slice.Spec.SharedCounters)
	}
	return devices, counterSets
}

// untilPublished waits for exactly these numbers; a test GPU is one whole GPU
// and three partitions.
func (r *rig) untilPublished(t *testing.T, devices, counterSets int) {
	t.Helper()
	r.until(t, "publication", func(ctx context.Context) error {
		if d, c := published(r.api.Slices()); d != devices || c != counterSets {
			return fmt.Errorf("%d devices and %d counter sets, want %d and %d", d, c, devices, counterSets)
		}
		return r.check(ctx, "readiness")
	})
}

// TestNotReadyWithoutWriting: an earlier plugin has published as many devices, but of
// another board.
func TestNotReadyWithoutWriting(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	older := newRigOn(t, api)
	older.start(t)
	older.untilPublished(t, 4, 1)
	older.stop()
	if err := older.wait(t); err != nil {
		t.Fatal(err)
	}
	api.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method == http.MethodPut {
			return apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("no right to write"))
		}
		return nil
	})
	r := newRigOn(t, api)
	node := testNodeWith(firstGPU)
	node.GPUs[0].UUID = "GPU-another-board-in-the-same-slot"
	r.hardware.setNode(node)
	r.start(t)
	r.until(t, "the reason", func(ctx context.Context) error {
		if reason := r.plugin.readiness.notReady(); !strings.Contains(reason, "no right to write") {
			return fmt.Errorf("not ready because of %q", reason)
		}
		if r.check(ctx, "readiness") == nil {
			t.Error("ready")
		}
		return nil
	})
	api.Refuse(nil)
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
	found := 0
	api.EachDevice(func(d *resourceapi.Device) {
		if uuid := d.Attributes["parentUUID"].StringValue; uuid != nil && *uuid == node.GPUs[0].UUID {
			found++
		}
	})
	if found == 0 {
		t.Error("ready without the new board")
	}
}

// TestUpgrade: the old instance knows a GPU that the new one does not find, and both
// run for a while.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	older := newRigOn(t, api)
	older.hardware.setNode(testNodeWith(firstGPU, secondGPU))
	older.start(t)
	older.untilPublished(t, 8, 2)
	newer := newRigOn(t, api)
	newer.options.DataDir, newer.options.PodUID = older.options.DataDir, "uid-2"
	newer.options.BootID += "-2" // so that it does not take over what the old one has found
	newer.start(t)
	newer.untilPublished(t, 4, 1)
	older.claims.setStatus(device.Status{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Lost}}})
	// Its registration makes the old one read what is stored.
	older.register(t)
	newer.claims.setStatus(device.Status{Conditions: []device.Condition{{PCIAddress: firstGPU, Reason: device.Unresponsive}}})
	newer.until(t, "the taint of the new instance", func(context.Context) error {
		reasons := map[string]int{}
		api.EachDevice(func(d *resourceapi.Device) {
			if isObserver(*d) {
				return
			}
			for _, taint := range d.Taints {
				reasons[taint.Key]++
			}
		})
		if len(reasons) != 1 || reasons[testDriver+"/"+string(device.Unresponsive)] == 0 {
			return fmt.Errorf("taints %v", reasons)
		}
		return nil
	})
	newer.untilPublished(t, 4, 1)
	newer.stop()
	if err := newer.wait(t); err != nil {
		t.Fatal(err)
	}
	older.untilPublished(t, 8, 2)
}
