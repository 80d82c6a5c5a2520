// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// slow makes calls take what the model says, times scale.
func slow(b *testing.B, scale float64) func(*machine.Machine) {
	b.Helper()
	latencies := must.Get(catalog.Latencies("hopper", scale))(b)
	return func(m *machine.Machine) { m.Latencies = latencies }
}

// busyTimes is the time that each GPU was busy so far.
func busyTimes(t testing.TB, n *harness.Node) []time.Duration {
	t.Helper()
	return must.Get(n.State.Busy())(t)
}

// cycle prepares and unprepares a claim.
func cycle(ctx context.Context, p *harness.Driver, claim *drapb.Claim) error {
	return errors.Join(prepareOne(p)(ctx, claim), unprepareOne(p)(ctx, claim))
}

func prepareOne(p *harness.Driver) func(context.Context, *drapb.Claim) error {
	return func(ctx context.Context, claim *drapb.Claim) error {
		_, err := p.TryPrepare(ctx, claim, harness.KubeletTimeout)
		return err
	}
}

func unprepareOne(p *harness.Driver) func(context.Context, *drapb.Claim) error {
	return func(ctx context.Context, claim *drapb.Claim) error {
		return p.TryUnprepare(ctx, claim, harness.KubeletTimeout)
	}
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
			n := harness.NewNode(b, "dgx-h100", slow(b, scale))
			p := n.Start(b)
			p.Ready(b)
			for gpu := range gpus {
				p.NewClaim(b, n, harness.Partition(gpu, "1g.10gb", 0))
			}
			var names [][]string // of the device of each worker
			for gpu := range gpus {
				for i := range workers {
					names = append(names, n.DeviceNames(b, []harness.Device{harness.Partition(gpu, "1g.10gb", i+1)}))
				}
			}
			rate, busy := throughput(b, n, len(names), func(ctx context.Context, worker int) error {
				return cycle(ctx, p, n.AllocateNamed(names[worker]))
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
func throughput(b *testing.B, n *harness.Node, workers int, work func(ctx context.Context, worker int) error) (rate, busy float64) {
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
	before, start, pieces := busyTimes(b, n), time.Now(), 0
	for b.Loop() {
		failed = errors.Join(failed, <-done)
		pieces++
	}
	took, after := time.Since(start).Seconds(), busyTimes(b, n)
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
	n := harness.NewNode(b, "dgx-h100", slow(b, 1))
	p := n.Start(b)
	p.Ready(b)
	var devices [][]string
	for gpu := range 8 {
		for start := range 7 {
			devices = append(devices, n.DeviceNames(b, []harness.Device{harness.Partition(gpu, "1g.10gb", start)}))
		}
	}
	phases := []struct {
		name string
		call func(context.Context, *drapb.Claim) error
		wall time.Duration
		busy time.Duration
	}{{name: "prepare", call: prepareOne(p)}, {name: "unprepare", call: unprepareOne(p)}}
	for b.Loop() {
		var claims []*drapb.Claim
		for _, names := range devices {
			claims = append(claims, n.AllocateNamed(names))
		}
		for i := range phases {
			phase := &phases[i]
			before := busyTimes(b, n)
			var err error
			phase.wall += timed(func() { err = together(b.Context(), claims, phase.call) })
			must.Do(b, err)
			phase.busy += busiest(before, busyTimes(b, n))
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
		device harness.Device
		beside []harness.Device // a partition that stays, so that MIG mode does
	}{
		{"whole", 1, harness.Device{GPU: 0}, nil},
		{"partition", 1, harness.Partition(0, "1g.10gb", 0), []harness.Device{harness.Partition(0, "1g.10gb", 1)}},
		{"partition-at-a-tenth", 0.1, harness.Partition(0, "1g.10gb", 0), []harness.Device{harness.Partition(0, "1g.10gb", 1)}},
	} {
		b.Run(test.name, func(b *testing.B) {
			n := harness.NewNode(b, "dgx-h100", slow(b, test.scale))
			p := n.Start(b)
			p.Ready(b)
			if test.beside != nil {
				p.MustPrepare(b, n.Allocate(b, test.beside))
			}
			names := n.DeviceNames(b, []harness.Device{test.device})
			// The first claim pays for what is made once.
			must.Do(b, cycle(b.Context(), p, n.AllocateNamed(names)))
			prepare, unprepare := &outside{}, &outside{}
			for b.Loop() {
				claim := n.AllocateNamed(names)
				prepare.measure(b, n, func() { p.MustPrepare(b, claim) })
				unprepare.measure(b, n, func() { p.MustUnprepare(b, claim) })
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

func (o *outside) measure(b *testing.B, n *harness.Node, call func()) {
	b.Helper()
	before := busyTimes(b, n)[0]
	wall := timed(call)
	o.wall += wall
	o.all = append(o.all, wall-(busyTimes(b, n)[0]-before))
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

func TestMain(m *testing.M) { harness.Main(m) }
