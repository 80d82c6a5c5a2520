// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleets

import (
	"fmt"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

const day = 24 * time.Hour

// Demo is a fleet of three nodes with a bit of everything: partitions, shares of both kinds, a
// GPU with an error, a partition that somebody else made, and two pods that wait.
func Demo() ([]runtime.Object, error) {
	b := &Builder{}
	b.Classes()
	b.Node("dgx-1", "h100-80-sxm", 8, func(address func(int) string) device.Status {
		return device.Status{
			Conditions: []device.Condition{{PCIAddress: address(5), Reason: device.XID, Value: "94"}},
			Static:     []device.Static{{PCIAddress: address(7), ProfileID: 19, Placement: gpu.Placement{Start: 6, Size: 1}, UUID: "MIG-00000000-0000-0000-0000-000000000001"}},
		}
	})
	b.Node("hgx-2", "a100-80-mig", 4, func(address func(int) string) device.Status {
		return device.Status{Conditions: []device.Condition{{
			PCIAddress: address(2), Where: &gpu.Placement{Start: 4, Size: 1}, ProfileID: new(uint32(19)), Reason: device.ReleasePending,
		}}}
	})
	b.Node("edge-3", "l4", 2, func(address func(int) string) device.Status {
		return device.Status{Conditions: []device.Condition{{PCIAddress: address(1), Reason: device.Throttled, Effect: policy.EffectNone}}}
	})

	b.Workload("serving", "embed-0", 3*day, Has{Node: "dgx-1", GPU: 0, Device: "mig-2g20gb-0"})
	b.Workload("research", "notebook-ada", 5*time.Hour, Has{Node: "dgx-1", GPU: 0, Device: "mig-1g10gb-6"})
	b.Workload("research", "notebook-lin", 90*time.Minute, Has{Node: "dgx-1", GPU: 0, Device: "mig-1g10gb-4"})
	b.Workload("serving", "llm-small-0", 9*day, Has{Node: "dgx-1", GPU: 1, Device: "mig-4g40gb-0"})
	b.Workload("serving", "llm-small-1", 9*day, Has{Node: "dgx-1", GPU: 1, Device: "mig-3g40gb-4"})
	b.Workload("serving", "api-0", 2*day, Has{Node: "dgx-1", GPU: 2, Device: "mps", Memory: "24Gi", SM: "40"})
	b.Workload("serving", "api-1", 2*day, Has{Node: "dgx-1", GPU: 2, Device: "mps", Memory: "16Gi", SM: "25"})
	b.Workload("serving", "api-2", 4*time.Hour, Has{Node: "dgx-1", GPU: 2, Device: "mps", Memory: "10Gi", SM: "15"})
	b.Workload("training", "pretrain-0", 26*time.Hour, Has{Node: "dgx-1", GPU: 3}, Has{Node: "dgx-1", GPU: 4})
	b.Workload("training", "finetune-7b", 7*time.Hour, Has{
		Node: "dgx-1", GPU: 5, NotReady: "GPUXID", Message: "The GPU has had XID 94, a contained memory error. Programs on it may have failed; restart the pod.",
	})
	b.Workload("monitoring", "gpu-watch", 30*day, Has{Node: "dgx-1", GPU: 1, Device: "observer", Admin: true})

	for i, place := range []int{6, 4, 5, 2, 3} {
		b.Workload("students", fmt.Sprintf("lab-%d", i+1), time.Duration(i+1)*time.Hour, Has{Node: "hgx-2", GPU: 0, Device: fmt.Sprintf("mig-1g10gb-%d", place)})
	}
	b.Workload("serving", "rerank-0", 6*day, Has{Node: "hgx-2", GPU: 1, Device: "mig-4g40gb-0"})
	b.WorkloadOf("research", "sweep", 20*time.Minute, false, Has{Node: "hgx-2", GPU: 1, Device: "mig-2g20gb-4"})
	b.Workload("research", "protein-fold", 11*time.Hour, Has{Node: "hgx-2", GPU: 2, Device: "mig-3g40gb-0"})

	b.Workload("ci", "runner-a", 50*time.Minute, Has{Node: "edge-3", GPU: 0, Device: "timeslice"})
	b.Workload("ci", "runner-b", 12*time.Minute, Has{Node: "edge-3", GPU: 0, Device: "timeslice"})

	b.Waiting("training", "pretrain-1", "gpu.nvidia.com", 3*time.Hour,
		"0/3 nodes are available: 3 cannot allocate all claims. still not schedulable, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.",
		"device.attributes['gpu.nvidia.com'].productName.contains('B200')")
	b.Waiting("research", "notebook-kim", "mig.nvidia.com", 8*time.Minute,
		"0/3 nodes are available: 3 cannot allocate all claims. still not schedulable, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.",
		"device.attributes['gpu.nvidia.com'].profile == '1g.12gb'")
	return b.Objects()
}

// Large is a fleet of n nodes with 8 GPUs each, most of them in use. It is the same every time.
func Large(n int) ([]runtime.Object, error) {
	b := &Builder{}
	b.Classes()
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same every time
	models := []string{"h100-80-sxm", "a100-80-mig", "h200", "l4"}
	teams := []string{"serving", "research", "training", "students", "ci"}
	claims := 0
	next := func() (string, string) {
		claims++
		return teams[claims%len(teams)], fmt.Sprintf("job-%05d", claims)
	}
	for i := range n {
		model := models[i%len(models)]
		node := fmt.Sprintf("node-%03d", i)
		b.Node(node, model, 8, func(address func(int) string) device.Status {
			if i%37 != 5 {
				return device.Status{}
			}
			return device.Status{Conditions: []device.Condition{{PCIAddress: address(i % 8), Reason: device.Lost}}}
		})
		for g := range 8 {
			namespace, name := next()
			if random.IntN(5) == 0 {
				continue
			}
			b.fill(node, model, g, random, namespace, name)
		}
	}
	for i := range 12 {
		b.Waiting("training", fmt.Sprintf("wait-%02d", i), "gpu.nvidia.com", time.Duration(i)*time.Minute, fmt.Sprintf("0/%d nodes are available: %d cannot allocate all claims.", n, n))
	}
	return b.Objects()
}

// fill gives a GPU to claims.
func (b *Builder) fill(node, model string, g int, random *rand.Rand, namespace, name string) {
	several := func(devices []string, memory, sm string) {
		for i, d := range devices {
			if random.IntN(6) > 0 {
				b.Workload(namespace, fmt.Sprintf("%s-%d", name, i), time.Duration(i+1)*time.Hour, Has{Node: node, GPU: g, Device: d, Memory: memory, SM: sm})
			}
		}
	}
	small, half := "1g10gb", "3g40gb"
	if model == "h200" {
		small, half = "1g18gb", "3g71gb"
	}
	switch choice := random.IntN(4); {
	case model == "l4" || choice == 0 && model != "a100-80-mig":
		several([]string{"mps", "mps", "mps"}, "4Gi", "20")
	case choice == 1 && model != "a100-80-mig":
		b.Workload(namespace, name, day, Has{Node: node, GPU: g})
	case choice == 2:
		several([]string{"mig-" + half + "-0", "mig-" + half + "-4"}, "", "")
	default:
		several([]string{"mig-" + small + "-0", "mig-" + small + "-1", "mig-" + small + "-2", "mig-" + small + "-4", "mig-" + small + "-6"}, "", "")
	}
}
