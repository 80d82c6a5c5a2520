//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/test/versions"
)

// askedWhenFull is what pods ask for, by type of device, until four GPUs are full. Two shares before a whole GPU is what the allocators
// of some versions of Kubernetes get wrong.
var askedWhenFull = strings.Fields(strings.Repeat("mps mps gpu timeslice mig mps mig timeslice gpu ", 4))

var classOf = map[string]request{
	"gpu": wholeGPU, "mig": oneSlice, "mps": {class: "mps.partage.dev"}, "timeslice": {class: "timeslice.partage.dev"},
}

// fill asks for more devices of four GPUs than there are, of all published kinds at the same time, waits until each pod runs or cannot,
// and counts what was given twice.
func fill(t *testing.T, published map[string]int) versions.Full {
	ns, gpus := reserve(t, 4)
	var manifest strings.Builder
	var pods []string
	for i, kind := range askedWhenFull {
		if published[kind] == 0 {
			kind = "mig"
		}
		if published[kind] == 0 {
			kind = "gpu"
		}
		name := fmt.Sprintf("p%02d-%s", i, kind)
		pods = append(pods, name)
		manifest.WriteString(claim(name, classOf[kind].on(gpus...), "") + podUsing(name, name))
	}
	apply(t, ns, manifest.String())
	full := versions.Full{Asked: len(pods)}
	running, refused := waitSettled(t, ns, len(pods))
	for pod, event := range refused {
		t.Errorf("the driver refused to prepare the claim of %s: %s", pod, event)
	}
	full.Refused = len(refused)
	users, twice := gpuUsers(t, ns, running)
	t.Logf("%d of %d pods run; the GPUs have %v", len(running), len(pods), users)
	if len(users) != len(gpus) || len(running)+len(refused) == len(pods) {
		t.Errorf("%d GPUs are used by %d of %d pods; want all %d GPUs used, and pods that find none", len(users), len(running), len(pods), len(gpus))
	}
	twice = append(twice, allocatedTwice(t, ns)...)
	for _, problem := range twice {
		t.Error(problem)
	}
	full.GivenTwice = len(twice)
	return full
}

// waitSettled waits until each pod runs, was found unschedulable, or has been refused by the driver, with the event that says why.
func waitSettled(t *testing.T, ns string, n int) (running []string, refused map[string]string) {
	t.Helper()
	eventually(t, "each pod to run or not to", func(ctx context.Context) (bool, string) {
		running, refused = nil, map[string]string{}
		pods, err := client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		var open []string
		for _, p := range pods.Items {
			switch {
			case condition(&p, corev1.PodReady).Status == corev1.ConditionTrue:
				running = append(running, p.Name)
			case condition(&p, corev1.PodScheduled).Reason == corev1.PodReasonUnschedulable:
			default:
				seen := events(ctx, ns, p.Name)
				if i := slices.IndexFunc(seen, isFailedPrepare); i >= 0 {
					refused[p.Name] = seen[i]
				} else {
					open = append(open, p.Name)
				}
			}
		}
		return len(pods.Items) == n && len(open) == 0, fmt.Sprintf("%d running, not settled: %v", len(running), open)
	})
	return running, refused
}

func condition(p *corev1.Pod, kind corev1.PodConditionType) corev1.PodCondition {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return corev1.PodCondition{}
}

// gpuUsers returns the kinds of the pods that see each GPU, and which of them must not see it together: a GPU belongs to one pod, or
// to shares of one kind, or to partitions, each of which belongs to one pod.
func gpuUsers(t *testing.T, ns string, pods []string) (kinds map[string][]string, twice []string) {
	t.Helper()
	kinds = map[string][]string{}
	owner := map[string]string{} // of a partition
	for _, pod := range pods {
		out := waitLog(t, ns, pod, "main", "UUID: GPU-")
		_, kind, _ := strings.Cut(pod, "-")
		partitions := migUUID.FindAllString(out, -1)
		if want := map[string]int{"mig": 1}[kind]; len(partitions) != want {
			twice = append(twice, fmt.Sprintf("pod %s sees %d partitions:\n%s", pod, len(partitions), out))
		}
		for _, uuid := range partitions {
			if other := owner[uuid]; other != "" {
				twice = append(twice, fmt.Sprintf("partition %s is given to %s and to %s", uuid, other, pod))
			}
			owner[uuid] = pod
		}
		gpu := gpuUUID.FindString(out)
		kinds[gpu] = append(kinds[gpu], kind)
	}
	for gpu, seen := range kinds {
		different := slices.Compact(slices.Sorted(slices.Values(seen)))
		if len(different) > 1 || different[0] == "gpu" && len(seen) > 1 {
			twice = append(twice, fmt.Sprintf("GPU %s is given to pods of the kinds %v", gpu, seen))
		}
	}
	return kinds, twice
}

// allocatedTwice adds up what the claims of a namespace were allocated, as the specification of ResourceSlices says: a device is given
// once, or to several claims within its capacity, and all given devices are within the counters.
func allocatedTwice(t *testing.T, ns string) []string {
	t.Helper()
	pools, err := publishedSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	claims, err := client.ResourceV1().ResourceClaims(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	given := map[string][]resourceapi.DeviceRequestAllocationResult{}
	for _, c := range claims.Items {
		if c.Status.Allocation == nil {
			continue
		}
		for _, result := range c.Status.Allocation.Devices.Results {
			given[result.Device] = append(given[result.Device], result)
		}
	}
	free := map[string]resource.Quantity{} // by counter set and counter
	for _, s := range pools {
		for _, set := range s.Spec.SharedCounters {
			for name, counter := range set.Counters {
				free[set.Name+" "+name] = counter.Value
			}
		}
	}
	var twice []string
	for _, s := range pools {
		for _, d := range s.Spec.Devices {
			if len(given[d.Name]) == 0 {
				continue
			}
			twice = append(twice, overCapacity(d, given[d.Name])...)
			for _, consumed := range d.ConsumesCounters {
				for name, counter := range consumed.Counters {
					left := free[consumed.CounterSet+" "+name]
					left.Sub(counter.Value)
					free[consumed.CounterSet+" "+name] = left
				}
			}
		}
	}
	exceeded := map[string][]string{}
	for counter, left := range free {
		if set, name, _ := strings.Cut(counter, " "); left.Sign() < 0 {
			exceeded[set] = append(exceeded[set], name)
		}
	}
	for set, names := range exceeded {
		twice = append(twice, fmt.Sprintf("of GPU %s more is allocated than there is: %v", set, slices.Sorted(slices.Values(names))))
	}
	return twice
}

// overCapacity says which capacities of a device its claims exceed together.
func overCapacity(d resourceapi.Device, results []resourceapi.DeviceRequestAllocationResult) []string {
	if d.AllowMultipleAllocations == nil || !*d.AllowMultipleAllocations {
		if len(results) > 1 {
			return []string{fmt.Sprintf("device %s is allocated to %d claims", d.Name, len(results))}
		}
		return nil
	}
	var over []string
	for name, capacity := range d.Capacity {
		left := capacity.Value.DeepCopy()
		for _, r := range results {
			left.Sub(r.ConsumedCapacity[name])
		}
		if left.Sign() < 0 {
			over = append(over, fmt.Sprintf("capacity %s of device %s is exceeded by %s", name, d.Name, left.String()))
		}
	}
	return over
}
