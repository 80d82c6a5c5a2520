// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// These benchmarks run with calls that take time, in a model of Hopper: calls
// that change the same GPU wait for each other, calls on different GPUs do not.
// The busy time of a GPU is what such calls on it took without that waiting, so
// no driver can need less on that GPU.

// slow makes calls take what the model says, times scale.
func slow(b *testing.B, scale float64) func(*machine.Machine) {
	b.Helper()
	latencies, err := catalog.Latencies("hopper", scale)
	if err != nil {
		b.Fatal(err)
	}
	return func(m *machine.Machine) { m.Latencies = latencies }
}

// busy is the time that each GPU was busy so far.
func (n *node) busy(t testing.TB) []time.Duration {
	t.Helper()
	busy, err := n.state.Busy()
	if err != nil {
		t.Fatal(err)
	}
	return busy
}

// cycle prepares and unprepares a claim. Unlike mustPrepare it may be called in
// goroutines of a test.
func (p *process) cycle(ctx context.Context, claim *drapb.Claim) error {
	return errors.Join(p.prepareOne(ctx, claim), p.unprepareOne(ctx, claim))
}

func (p *process) prepareOne(ctx context.Context, claim *drapb.Claim) error {
	answer, err := p.kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if text := answer.GetClaims()[claim.GetUid()].GetError(); err == nil && text != "" {
		err = errors.New(text)
	}
	return err
}

func (p *process) unprepareOne(ctx context.Context, claim *drapb.Claim) error {
	answer, err := p.kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if text := answer.GetClaims()[claim.GetUid()].GetError(); err == nil && text != "" {
		err = errors.New(text)
	}
	return err
}

// BenchmarkGPUs measures throughput against the number of GPUs: three workers on
// each prepare and unprepare partitions as fast as they can, beside one that
// keeps MIG mode on. An operation is one claim. With independent GPUs the
// throughput grows with their number.
func BenchmarkGPUs(b *testing.B) {
	const workers, scale = 3, 0.2
	one := 0.0 // claims a second on one GPU
	for _, gpus := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprintf("gpus=%d", gpus), func(b *testing.B) {
			n := newNode(b, "dgx-h100", slow(b, scale))
			p := n.start(b)
			p.ready(b)
			for gpu := range gpus {
				p.mustPrepare(b, n.allocate(n.names(b, []request{mig(gpu, "1g.10gb", 0)})))
			}
			var names [][]string // of the device of each worker
			for gpu := range gpus {
				for i := range workers {
					names = append(names, n.names(b, []request{mig(gpu, "1g.10gb", i+1)}))
				}
			}
			rate, busy := throughput(b, n, len(names), func(ctx context.Context, worker int) error {
				return p.cycle(ctx, n.allocate(names[worker]))
			})
			b.ReportMetric(rate, "claims/s")
			b.ReportMetric(100*busy/float64(gpus), "busy-%")
			if gpus == 1 {
				one = rate
			}
			if one > 0 {
				b.ReportMetric(rate/one, "times-1-gpu")
			}
		})
	}
}

// throughput runs workers until the benchmark has seen enough of their work. It
// returns how many pieces of it they did in a second, and how many GPUs were
// busy on average.
func throughput(b *testing.B, n *node, workers int, work func(ctx context.Context, worker int) error) (rate, busy float64) {
	b.Helper()
	done := make(chan error)
	stop := make(chan struct{})
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			for {
				err := work(b.Context(), worker)
				select {
				case <-stop:
					return
				case done <- err:
				}
			}
		})
	}
	var failed error
	for range workers { // until the GPUs have work to do all the time
		failed = errors.Join(failed, <-done)
	}
	before, start, pieces := n.busy(b), time.Now(), 0
	for b.Loop() {
		failed = errors.Join(failed, <-done)
		pieces++
	}
	took, after := time.Since(start).Seconds(), n.busy(b)
	close(stop)
	all.Wait()
	if failed != nil {
		b.Fatal(failed)
	}
	for gpu := range after {
		busy += (after[gpu] - before[gpu]).Seconds()
	}
	return float64(pieces) / took, busy / took
}

// BenchmarkFullNode prepares 56 partitions at once, seven on each of eight GPUs
// and each in a call of its own, and unprepares them in the same way. MIG mode
// goes on with the first of a GPU and off with the last. The ratio compares the
// time until all are done with the busiest GPU's own time, which is the least
// that is possible.
func BenchmarkFullNode(b *testing.B) {
	n := newNode(b, "dgx-h100", slow(b, 1))
	p := n.start(b)
	p.ready(b)
	var devices [][]string
	for gpu := range 8 {
		for start := range 7 {
			devices = append(devices, n.names(b, []request{mig(gpu, "1g.10gb", start)}))
		}
	}
	phases := []struct {
		name string
		call func(context.Context, *drapb.Claim) error
		wall time.Duration
		busy time.Duration
	}{{name: "prepare", call: p.prepareOne}, {name: "unprepare", call: p.unprepareOne}}
	for b.Loop() {
		var claims []*drapb.Claim
		for _, names := range devices {
			claims = append(claims, n.allocate(names))
		}
		for i := range phases {
			phase := &phases[i]
			before := n.busy(b)
			var err error
			phase.wall += timed(func() { err = together(b.Context(), claims, phase.call) })
			if err != nil {
				b.Fatal(err)
			}
			phase.busy += busiest(before, n.busy(b))
		}
	}
	for _, phase := range phases {
		b.ReportMetric(phase.wall.Seconds()/float64(b.N), phase.name+"-s")
		b.ReportMetric(phase.busy.Seconds()/float64(b.N), phase.name+"-busiest-gpu-s")
		b.ReportMetric(float64(phase.wall)/float64(phase.busy), phase.name+"-ratio")
	}
}

// together makes one call for each claim, all at the same time.
func together(ctx context.Context, claims []*drapb.Claim, call func(context.Context, *drapb.Claim) error) error {
	errs := make([]error, len(claims))
	var all sync.WaitGroup
	for i, claim := range claims {
		all.Go(func() { errs[i] = call(ctx, claim) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// busiest is the most that any GPU was busy between two moments.
func busiest(before, after []time.Duration) time.Duration {
	most := slices.Clone(after)
	for gpu := range most {
		most[gpu] -= before[gpu]
	}
	return slices.Max(most)
}

// BenchmarkOutsideNVML measures what a claim costs beside the GPU's own time:
// the duration of a call less what the GPU was busy, and its share of the call.
// A whole GPU needs no change that takes simulated time, so all of it is
// outside.
func BenchmarkOutsideNVML(b *testing.B) {
	for _, test := range []struct {
		name   string
		scale  float64
		device request
		beside []request // a partition that stays, so that MIG mode does
	}{
		{"whole", 1, request{gpu: 0}, nil},
		{"partition", 1, mig(0, "1g.10gb", 0), []request{mig(0, "1g.10gb", 1)}},
		{"partition-at-a-tenth", 0.1, mig(0, "1g.10gb", 0), []request{mig(0, "1g.10gb", 1)}},
	} {
		b.Run(test.name, func(b *testing.B) {
			n := newNode(b, "dgx-h100", slow(b, test.scale))
			p := n.start(b)
			p.ready(b)
			if test.beside != nil {
				p.mustPrepare(b, n.allocate(n.names(b, test.beside)))
			}
			names := n.names(b, []request{test.device})
			// The first claim pays for what is made once.
			if err := p.cycle(b.Context(), n.allocate(names)); err != nil {
				b.Fatal(err)
			}
			prepare, unprepare := &outside{}, &outside{}
			for b.Loop() {
				claim := n.allocate(names)
				prepare.measure(b, n, func() { p.mustPrepare(b, claim) })
				unprepare.measure(b, n, func() { p.mustUnprepare(b, claim) })
			}
			prepare.report(b, "prepare")
			unprepare.report(b, "unprepare")
		})
	}
}

// outside collects the time of calls that the first GPU was not busy.
type outside struct {
	all  []time.Duration
	wall time.Duration
}

func (o *outside) measure(b *testing.B, n *node, call func()) {
	b.Helper()
	before := n.busy(b)[0]
	wall := timed(call)
	o.wall += wall
	o.all = append(o.all, wall-(n.busy(b)[0]-before))
}

func (o *outside) report(b *testing.B, what string) {
	b.Helper()
	var sum time.Duration
	for _, d := range o.all {
		sum += d
	}
	b.ReportMetric(100*float64(sum)/float64(o.wall), what+"-outside-%")
	report(b, what+"-outside", o.all)
}
