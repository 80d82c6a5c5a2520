//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// withoutPartitions is set when the suite runs on a cluster that was started
// with the gate DRAPartitionableDevices off.
var withoutPartitions = os.Getenv("PARTAGE_E2E_WITHOUT_PARTITIONS") != ""

// TestPublished: the pool holds every GPU of the machine; partitions and
// counters exactly where the cluster supports them.
func TestPublished(t *testing.T) {
	gpus := len(showMachine(t).GPUs)
	eventually(t, "the pool to be complete", func(ctx context.Context) (bool, string) {
		slices, err := publishedSlices(ctx)
		if err != nil {
			return false, err.Error()
		}
		whole, partitions, counters := 0, 0, 0
		for _, s := range slices {
			counters += len(s.Spec.SharedCounters)
			for _, d := range s.Spec.Devices {
				if *d.Attributes["type"].StringValue == "gpu" {
					whole++
				} else {
					partitions++
				}
			}
		}
		saw := fmt.Sprintf("%d slices, %d whole, %d partitions, %d counter sets on %d GPUs", len(slices), whole, partitions, counters, gpus)
		if withoutPartitions {
			return whole == gpus && partitions == 0 && counters == 0, saw
		}
		return whole == gpus && partitions > gpus && counters == gpus && len(slices) > gpus, saw
	})
}

// TestWithoutPartitions: on such a cluster a whole GPU still runs, and the
// driver says once why there are no partitions.
func TestWithoutPartitions(t *testing.T) {
	if !withoutPartitions {
		t.Skip("this cluster has DRAPartitionableDevices on")
	}
	ns := namespace(t)
	apply(t, ns, claim("c", wholeGPU, "")+podUsing("p", "resourceClaimName: c"))
	waitRunning(t, ns, "p")
	waitLog(t, ns, "p", "main", "UUID: GPU-")

	pods, err := client.CoreV1().Pods(driverNamespace).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(pods.Items) == 0 {
		t.Fatalf("finding the plugin's pod: %v", err)
	}
	raw, err := client.CoreV1().Pods(driverNamespace).GetLogs(pods.Items[0].Name, &corev1.PodLogOptions{}).DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(raw), "DRAPartitionableDevices"); n != 1 {
		t.Errorf("the plugin's log names the gate %d times, want once:\n%s", n, raw)
	}
	deleteNamespace(t, ns)
	checkNothingLeft(t)
}
