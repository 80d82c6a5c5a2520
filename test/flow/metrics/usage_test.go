// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

const gib = 1 << 30

// memoryOf is what the simulated machine says that a program has.
func memoryOf(t testing.TB, n *harness.Node, u *harness.Program) float64 {
	t.Helper()
	for _, p := range n.Machine(t).Processes {
		if p.PID == u.PID() {
			return float64(p.MemoryBytes)
		}
	}
	t.Fatalf("the machine does not know program %d", u.PID())
	return 0
}

// user is a claim and a program of its pod.
type user struct {
	claim  *drapb.Claim
	ids    []string
	uid    types.UID
	labels labels
}

func newUser(t testing.TB, n *harness.Node, p *harness.Driver, number int, d harness.Device) *user {
	t.Helper()
	u := &user{claim: n.Allocate(t, []harness.Device{d}), uid: types.UID(fmt.Sprintf("3f2a1b4c-0000-4000-8000-%012d", number))}
	n.API.ReserveFor(u.claim.GetNamespace(), u.claim.GetName(), "pod-of-"+u.claim.GetName(), u.uid)
	u.labels = labels{"namespace": "default", "resourceclaim_name": u.claim.GetName()}
	u.ids = p.MustPrepare(t, u.claim)
	return u
}

func (u *user) with(name, value string) labels {
	all := labels{name: value}
	for n, v := range u.labels {
		all[n] = v
	}
	return all
}

// run starts a program with so much memory.
func (u *user) run(t testing.TB, n *harness.Node, memory string, args ...string) *harness.Program {
	t.Helper()
	program, err := n.StartReady(t.Context(), t, n.Container(t, u.ids...), append([]string{"hold", "--memory=" + memory}, args...)...)
	must.Do(t, err)
	program.InPod(t, u.uid)
	return program
}

// TestUsage checks for each kind of device what is told while programs run on it, when they
// have ended and when the claim is released.
func TestUsage(t *testing.T) {
	t.Parallel()
	n, p := harness.NewMPSDriver(t, "h100x4", flags...)
	s := newScraper(t, p)
	g := n.Machine(t).GPUs[0]
	all, partition := float64(g.MemoryBytes), 0.0
	for _, profile := range g.MIG.Profiles {
		if profile.Name == "1g.10gb" {
			partition = float64(profile.MemoryMiB << 20)
		}
	}
	for number, test := range []struct {
		device harness.Device
		kind   string
		// limit is 0 where there is none, requested where nothing is.
		limit, requested float64
		// busy is how busy the program keeps the device.
		busy float64
	}{
		{harness.Device{GPU: 0}, "gpu", all, all, 0.4},
		{harness.Partition(1, "1g.10gb", 2), "mig", partition, partition, 0.4},
		{harness.Device{GPU: 2, Kind: harness.MPS, Memory: 10 * gib, Percent: 25}, "mps", 10 * gib, 10 * gib, 0.25},
		{harness.Device{GPU: 3, Kind: harness.TimeSlice, Memory: 20 * gib}, "timeslice", 0, 20 * gib, 0.4},
		{harness.Device{GPU: 3, Kind: harness.TimeSlice}, "timeslice", 0, 0, 0.4},
	} {
		t.Run(fmt.Sprint(number, test.kind), func(t *testing.T) {
			u := newUser(t, n, p, number, test.device)
			info := u.with("kind", test.kind)
			info["pod"], info["gpu"], info["profile"] = "pod-of-"+u.claim.GetName(), n.Address(t, test.device.GPU), test.device.Profile
			s.until(t, "partage_claim_info", info, 1)
			s.until(t, "partage_claim_memory_used_bytes", u.labels, 0)
			s.until(t, "partage_claim_processes", u.labels, 0)

			program := u.run(t, n, "3Gi", "--busy", "--sm=40")
			memory := memoryOf(t, n, program)
			if memory < 3*gib {
				t.Fatalf("the program has %v", memory)
			}
			s.until(t, "partage_claim_memory_used_bytes", u.labels, memory)
			s.until(t, "partage_claim_processes", u.labels, 1)
			s.until(t, "partage_claim_memory_peak_bytes", u.labels, memory)
			s.until(t, "partage_claim_sm_utilization_ratio", u.labels, test.busy)
			s.until(t, "partage_claim_idle_seconds", u.labels, 0)
			wantOrAbsent(t, s, "partage_claim_memory_requested_bytes", u.labels, test.requested)
			wantOrAbsent(t, s, "partage_claim_memory_limit_bytes", u.labels, test.limit)

			program.Stop()
			s.until(t, "partage_claim_memory_used_bytes", u.labels, 0)
			s.until(t, "partage_claim_processes", u.labels, 0)
			s.want(t, "partage_claim_memory_peak_bytes", u.labels, memory)
			p.Until(t, "idle time", func(ctx context.Context) error {
				idle, err := s.value(ctx, "partage_claim_idle_seconds", u.labels)
				if err == nil && idle <= 0 {
					err = fmt.Errorf("it is %v", idle)
				}
				return err
			})
			p.MustUnprepare(t, u.claim)
			p.Until(t, "the end of its metrics", func(ctx context.Context) error {
				body, err := s.body(ctx)
				if err == nil && strings.Contains(body, u.claim.GetName()) {
					err = errors.New("they are still there")
				}
				return err
			})
		})
	}
}

func wantOrAbsent(t testing.TB, s *scraper, name string, of labels, want float64) {
	t.Helper()
	if want == 0 {
		s.wantAbsent(t, name, of)
		return
	}
	s.want(t, name, of, want)
}

// TestShares checks that two claims on one GPU have what their own pods use, that what is
// nobody's is said to be, and that a plugin that has just started finds out the pods.
func TestShares(t *testing.T) {
	t.Parallel()
	n, p := harness.NewMPSDriver(t, "h100x1", flags...)
	share := harness.Device{Kind: harness.MPS, Memory: 10 * gib, Percent: 25}
	users := []*user{newUser(t, n, p, 1, share), newUser(t, n, p, 2, share)}
	first, second := users[0].run(t, n, "1Gi"), users[1].run(t, n, "5Gi")
	stranger := must.Get(n.StartReady(t.Context(), t, n.Container(t, users[1].ids...), "hold", "--memory=2Gi"))(t)
	var server float64
	for _, one := range n.Machine(t).Processes {
		if one.PID != first.PID() && one.PID != second.PID() && one.PID != stranger.PID() {
			server += float64(one.MemoryBytes)
		}
	}
	check := func(s *scraper) {
		t.Helper()
		s.until(t, "partage_claim_memory_used_bytes", users[0].labels, memoryOf(t, n, first))
		s.until(t, "partage_claim_memory_used_bytes", users[1].labels, memoryOf(t, n, second))
		s.until(t, "partage_gpu_memory_unattributed_bytes", labels{"gpu": n.Address(t, 0)}, server+memoryOf(t, n, stranger))
		s.want(t, "partage_gpu_role", labels{"gpu": n.Address(t, 0), "role": "mps"}, 1)
		s.until(t, "partage_mps_servers", labels{"state": "running"}, 1)
	}
	check(newScraper(t, p))
	p.Stop(t)
	again := n.Start(t, flags...)
	again.Ready(t)
	check(newScraper(t, again))
}

// TestMemoryLimitIgnored: a program has NVIDIA's variable for a limit of memory, which nobody holds. It runs, and its claim is told.
func TestMemoryLimitIgnored(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", flags...)
	u := newUser(t, n, p, 1, harness.Device{})
	spec := n.Container(t, u.ids...)
	spec.Process.Env = append(spec.Process.Env, "NVIDIA_GPU_MEMORY_LIMIT=1024")
	program := must.Get(n.StartReady(t.Context(), t, spec, "hold", "--memory=2Gi"))(t)
	program.InPod(t, u.uid)
	p.UntilEvent(t, n, "MemoryLimitIgnored", "NVIDIA_GPU_MEMORY_LIMIT has no effect")
}

// TestMetricsOfConformance: AI Conformance of Kubernetes asks for these metrics of accelerators, by whatever name.
func TestMetricsOfConformance(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct{ name, machine string }{
		"power":           {"(?i)power|watt|joule|energy", "h100x1"},
		"link_throughput": {"(?i)nvlink.*(byte|throughput)|(byte|throughput).*nvlink", "dgx-h100"},
		"pcie_throughput": {"(?i)pcie.*(byte|throughput)|(byte|throughput).*pcie", "h100x1"},
		"temperature":     {"(?i)temperature.*celsius", "h100x1"},
	} {
		t.Run(what, func(t *testing.T) {
			n, p := harness.NewDriver(t, test.machine, flags...)
			s := newScraper(t, p)
			wanted, of := regexp.MustCompile(test.name), labels{"gpu": n.Address(t, 0)}
			p.Until(t, "a sample with the "+what+" of a GPU", func(ctx context.Context) error {
				found, err := s.families(ctx)
				for family, metrics := range found {
					if wanted.MatchString(family) && slices.ContainsFunc(metrics.GetMetric(), func(m *dto.Metric) bool { return matches(m, of) }) {
						return nil
					}
				}
				return cmp.Or(err, fmt.Errorf("no metric tells the %s of a GPU; there are %v", what, slices.Sorted(maps.Keys(found))))
			})
		})
	}
}
