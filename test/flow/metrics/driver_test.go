// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestDriver checks what is counted of calls of the kubelet, and what is told of GPUs.
func TestDriver(t *testing.T) {
	t.Parallel()
	n, p := harness.NewMPSDriver(t, "h100x2", flags...)
	s := newScraper(t, p)
	gpu := labels{"gpu": n.Address(t, 0)}
	s.want(t, "partage_prepare_duration_seconds", labels{"result": "success"}, 0)
	s.want(t, "partage_prepare_failures_total", labels{"reason": "overlap"}, 0)
	has := float64(n.Machine(t).GPUs[0].MemoryBytes)
	s.until(t, "partage_gpu_memory_bytes", gpu, has)
	s.want(t, "partage_gpu_memory_allocatable_bytes", gpu, has)
	s.want(t, "partage_gpu_role", labels{"gpu": n.Address(t, 0), "role": "free"}, 1)
	s.want(t, "partage_gpu_healthy", gpu, 1)
	p.Until(t, "published slices", func(ctx context.Context) error {
		slices, err := s.value(ctx, "partage_published_slices", nil)
		if err == nil && slices < 2 {
			err = errors.New("none")
		}
		return err
	})

	claim, _ := p.NewClaim(t, n, harness.Partition(0, "3g.40gb", 4))
	s.want(t, "partage_prepare_duration_seconds", labels{"result": "success"}, 1)
	for _, step := range []string{"wait", "nvml", "cdi", "journal"} {
		s.want(t, "partage_claim_step_duration_seconds", labels{"operation": "prepare", "step": step}, 1)
	}
	s.want(t, "partage_claim_step_duration_seconds", labels{"operation": "prepare", "step": "mps"}, 0)
	s.want(t, "nvidia_dra_requests_total", labels{"driver": harness.DriverName, "operation": "prepare"}, 1)
	s.until(t, "partage_gpu_role", labels{"gpu": n.Address(t, 0), "role": "partitioned"}, 1)
	s.until(t, "nvidia_dra_prepared_devices", labels{"node": harness.NodeName, "device_type": "mig"}, 1)
	s.until(t, "partage_journal_records", labels{"state": "prepared"}, 1)
	s.want(t, "partage_gpu_memory_slice", labels{"gpu": n.Address(t, 0), "slice": "3", "resourceclaim_name": ""}, 0)
	s.want(t, "partage_gpu_memory_slice", labels{"gpu": n.Address(t, 0), "slice": "4", "resourceclaim_name": claim.GetName()}, 1)
	s.want(t, "partage_devices", labels{"gpu": n.Address(t, 0), "kind": "gpu", "state": "blocked"}, 1)
	s.want(t, "partage_devices", labels{"gpu": n.Address(t, 1), "kind": "gpu", "state": "free"}, 1)

	mps, _ := p.NewClaim(t, n, harness.Device{GPU: 1, Kind: harness.MPS})
	s.want(t, "partage_claim_step_duration_seconds", labels{"operation": "prepare", "step": "mps"}, 1)
	if p.Prepare(t, n.AllocateNamed([]string{"gpu-0000-ff-1f-0"}))[0].GetError() == "" {
		t.Error("a GPU that is not there was prepared")
	}
	s.want(t, "partage_prepare_failures_total", labels{"reason": "refused"}, 1)
	s.want(t, "nvidia_dra_node_prepare_errors_total", labels{"error_type": "refused"}, 1)

	p.MustUnprepare(t, claim, mps)
	s.want(t, "partage_unprepare_duration_seconds", labels{"result": "success"}, 2)
	s.want(t, "nvidia_dra_requests_inflight", labels{"operation": "unprepare"}, 0)
	s.until(t, "partage_gpu_role", labels{"gpu": n.Address(t, 0), "role": "free"}, 1)

	n.Update(t, func(m *machine.Machine) { m.GPUs[0].Failure = 15 })
	s.until(t, "partage_gpu_condition", labels{"gpu": n.Address(t, 0), "reason": "gpu-lost", "effect": "NoSchedule"}, 1)
	s.until(t, "partage_gpu_healthy", gpu, 0)
	s.until(t, "partage_gpu_role", labels{"gpu": n.Address(t, 0), "role": "unavailable"}, 1)
}

// TestMetricsOfNVIDIA: a second address has what NVIDIA's driver tells, and nothing else, beside the first.
func TestMetricsOfNVIDIA(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Run(t, append([]string{"--nvidia-metrics-address=127.0.0.1:0", "--nvidia-metrics-path=" + nvidiaPath}, flags...)...)
	s := scraperOf(t, p, nvidiaPath)
	p.MustPrepare(t, n.Allocate(t, []harness.Device{harness.Partition(0, "1g.10gb", 0)}))
	s.until(t, "nvidia_dra_prepared_devices", labels{"node": harness.NodeName, "driver": harness.DriverName, "device_type": "mig"}, 1)
	found := must.Get(s.families(t.Context()))(t)
	want := []string{
		"nvidia_dra_node_prepare_errors_total", "nvidia_dra_node_unprepare_errors_total", "nvidia_dra_prepared_devices",
		"nvidia_dra_request_duration_seconds", "nvidia_dra_requests_inflight", "nvidia_dra_requests_total",
	}
	expect.Same(t, slices.Sorted(maps.Keys(found)), want, "metrics")
	newScraper(t, p).until(t, "partage_gpu_role", labels{"gpu": n.Address(t, 0), "role": "partitioned"}, 1)
}

// TestHungGPU checks that a GPU that does not answer keeps no scrape waiting, and neither
// what is told of others.
func TestHungGPU(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", flags...)
	s := newScraper(t, p)
	sampled := func(gpu int) float64 {
		at, err := s.value(t.Context(), "partage_gpu_sample_timestamp_seconds", labels{"gpu": n.Address(t, gpu)})
		if err != nil {
			return 0
		}
		return at
	}
	p.Until(t, "samples", func(context.Context) error {
		if sampled(0) == 0 || sampled(1) == 0 {
			return errors.New("there are none")
		}
		return nil
	})
	hang := n.Inject(t, machine.Fault{Function: "nvmlDeviceGetMemoryInfo_v2", GPU: 0, Hang: true})
	defer hang.Remove(t)
	hang.UntilStruck(t, p)
	// A sample that was past that call then may still end.
	p.Until(t, "the other GPU to be read three times, and this one not", func(context.Context) error {
		before := sampled(0)
		for range 3 {
			last := sampled(1)
			p.UntilTrue(t, "another sample of the other GPU", func() bool { return sampled(1) != last })
		}
		if got := sampled(0); got != before {
			return fmt.Errorf("the GPU that hangs was read at %v and at %v", before, got)
		}
		return nil
	})
}

// uncalled is an exported method of a type that every program here has, which nothing calls.
const uncalled = "net.IP.IsInterfaceLocalMulticast"

// TestLinkedMethods checks that the linker leaves out methods that nothing calls. It keeps them all
// as soon as a single function may call any method by a name that is made at run time: the driver
// is then half as large again, and so is what it has in memory.
//
// text/template is such a function, with whatever uses it. The output of go build
// -ldflags=-dumpdep says who does.
func TestLinkedMethods(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]string{
		"../../../Makefile":                         "GO_TAGS := " + harness.BuildTags + "\n",
		"../../../deployments/container/Dockerfile": " tags=" + harness.BuildTags + " ",
	} {
		if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: no %q, %v: what is released is not what is tested", file, want, err)
		}
	}
	for _, path := range []string{harness.Built.Driver, harness.Built.Supervisor} {
		file := must.Get(elf.Open(path))(t)
		symbols, err := file.Symbols()
		expect.Do(t, file.Close())
		has := func(name string) bool {
			return slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == name })
		}
		if err != nil || !has("main.main") || !has("net.IP.String") {
			t.Fatalf("%s has %d symbols, %v: nothing is tested", path, len(symbols), err)
		}
		if has(uncalled) {
			t.Errorf("%s contains %s, which nothing calls; text/template is linked: %t", path, uncalled, has("text/template.(*state).evalField"))
		}
	}
}
