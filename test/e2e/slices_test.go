//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
)

// withoutPartitions says that the cluster was started with the feature gate DRAPartitionableDevices off.
var withoutPartitions = suite == "whole"

// TestPublished checks that the pool holds every GPU of the machine, and partitions, shares and counters exactly where the cluster
// supports them.
func TestPublished(t *testing.T) {
	t.Parallel()
	gpus := len(showMachine(t).GPUs)
	eventually(t, "the pool to be complete", func(ctx context.Context) (bool, string) {
		slices, err := publishedSlices(ctx)
		if err != nil {
			return false, err.Error()
		}
		counters, devices := 0, map[string]int{}
		for _, s := range slices {
			counters += len(s.Spec.SharedCounters)
			for _, d := range s.Spec.Devices {
				devices[*d.Attributes["type"].StringValue]++
			}
		}
		saw := fmt.Sprintf("%d slices, %d counter sets on %d GPUs, devices by type: %v", len(slices), counters, gpus, devices)
		if withoutPartitions {
			return maps.Equal(devices, map[string]int{"gpu": gpus}) && counters == 0, saw
		}
		return devices["gpu"] == gpus && devices["mig"] > gpus && devices["mps"] == gpus && devices["timeslice"] == gpus &&
			counters == gpus && len(slices) > gpus, saw
	})
}

// TestWithoutPartitions checks that a pod still gets a whole GPU where the cluster has no partitionable devices, and that the driver
// logs once why there are no partitions.
func TestWithoutPartitions(t *testing.T) {
	if !withoutPartitions {
		t.Skip("this cluster has DRAPartitionableDevices on")
	}
	ns := reserveNode(t)
	apply(t, ns, claim("c", wholeGPU, "")+podUsing("p", "c"))
	waitRunning(t, ns, "p")
	waitLog(t, ns, "p", "main", "UUID: GPU-")

	log := logs(t, driverNamespace, driverPod(t, pluginComponent).Name, "plugin")
	if n := strings.Count(log, "DRAPartitionableDevices"); n != 1 {
		t.Errorf("the plugin's log names the gate %d times, want once:\n%s", n, log)
	}
}
