// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

// TestFaultsOfObservations makes the calls go wrong with which the driver looks at the
// GPUs every now and then. What is published of a GPU may be tainted meanwhile,
// but never disappears, since it may be allocated, and all is well again
// afterwards.
func TestFaultsOfObservations(t *testing.T) {
	t.Parallel()
	r := &faultRig{n: harness.NewNode(t, "h100x16"), layout: faultLayout{at: harness.Place{Profile: "1g.10gb", Start: 4}}}
	r.n.StartSupervisor(t)
	begin := func() {
		r.p = r.n.Start(t, harness.Frequent...)
		r.p.Ready(t)
	}
	begin()
	for gpu := 0; gpu < 2*workers; gpu += 2 {
		r.p.NewClaim(t, r.n, harness.Partition(gpu, "1g.10gb", 0))
	}
	header := readHeader(t)
	var cases []faultCase
	for _, function := range r.observations(t) {
		codes := must.Get(header.codes(function))(t)
		// Any other code is a failure like the last.
		codes = slices.DeleteFunc(codes, func(c code) bool {
			return !slices.Contains([]string{"NOT_SUPPORTED", "INVALID_ARGUMENT", "GPU_IS_LOST", "UNKNOWN"}, c.name)
		})
		// A GPU that has no memory of its own to tell of has none to share out by MPS.
		if function == "nvmlDeviceGetMemoryInfo" {
			codes = slices.DeleteFunc(codes, func(c code) bool { return c.name == "NOT_SUPPORTED" })
		}
		// Calls come again and again, so that there is no first one.
		cases = append(cases, ways(harness.Observe, function, 0, codes)...)
	}
	count := harness.Enumerate(t, "faults", 50)
	// A process removes a taint of a GPU at once the first time only, and a number of them: see rules.Pace.
	for some := range slices.Chunk(harness.Choose(count, cases), workers) {
		r.runEach(t, count, "observations", some, (*worker).runObservation)
		r.p.Stop(t)
		begin()
	}
}

// discovery is called once for every time that all GPUs are discovered anew.
const discovery = "nvmlDeviceGetCount_v2"

// observations are the functions that are called on GPUs while these are discovered
// anew and have partitions. Not every discovery calls all of them, so the driver is
// watched until a number of discoveries call nothing new.
func (r *faultRig) observations(t *testing.T) []string {
	t.Helper()
	const enough = 5
	counts := map[string]int{}
	for nothingNew := 0; nothingNew < enough; nothingNew++ {
		for function, calls := range r.countTwoDiscoveries(t) {
			if counts[function] == 0 {
				nothingNew = 0
			}
			counts[function] += calls
		}
	}
	maps.DeleteFunc(counts, func(function string, _ int) bool {
		// Only requests for linked GPUs depend on NVLinks: what cannot be read is asked again, and no
		// condition of the GPU. The reserved memory is not asked for where there are partitions.
		return function == discovery || strings.Contains(function, "NvLink") || function == "nvmlDeviceGetGpuFabricInfoV" ||
			strings.HasPrefix(function, "nvmlSystem") || function == "nvmlDeviceGetMemoryInfo_v2" ||
			// These are asked of GPUs that are not partitioned.
			strings.HasSuffix(function, "RunningProcesses_v3") || function == "nvmlDeviceGetComputeMode"
	})
	return slices.Sorted(maps.Keys(counts))
}

func (r *faultRig) countTwoDiscoveries(t *testing.T) map[string]int {
	t.Helper()
	return r.countCalls(t, func() {
		before := must.Get(r.discoveries())(t)
		r.p.Until(t, "two discoveries", func(context.Context) error {
			now, err := r.discoveries()
			if err == nil && now < before+2 {
				err = errors.New("not yet")
			}
			return err
		})
	})
}

func (r *faultRig) discoveries() (uint64, error) {
	calls, err := r.n.State.Calls()
	return calls[discovery], err
}

// runObservation is run for what the driver does by itself.
func (l *worker) runObservation(ctx context.Context, c faultCase) error {
	m, err := l.n.State.Snapshot()
	if err != nil {
		return err
	}
	gpu := harness.DeviceName(m.GPUs[l.gpu].PCIAddress, harness.Place{})
	before, _ := l.n.Offered(gpu)
	c.fault.GPU = l.gpu
	fault, err := l.n.TryInject(c.fault)
	if err != nil {
		return err
	}
	other := harness.DeviceName(m.GPUs[l.neighbour].PCIAddress, harness.Place{})
	untilTainted := func(names string, want bool) func() bool {
		return func() bool {
			_, tainted := l.n.Offered(names)
			return len(tainted) > 0 == want
		}
	}
	err = l.watch(ctx, gpu, before, func() bool { return fault.CheckStruck() == nil })
	err = errors.Join(err, l.roundTrip(ctx, l.neighbour))
	if err == nil {
		// When a later change is published, what was found is published too.
		err = errors.Join(l.occupyNeighbour(true), l.watch(ctx, gpu, before, untilTainted(other, true)), l.occupyNeighbour(false))
	}
	_, removeErr := fault.TryRemove()
	well := func() bool { return untilTainted(gpu, false)() && untilTainted(other, false)() }
	if err = errors.Join(err, removeErr); err == nil {
		return l.watch(ctx, gpu, before, well)
	}
	// The next case is judged on its own.
	return errors.Join(err, l.occupyNeighbour(false), harness.Eventually(ctx, func() error {
		if now, _ := l.n.Offered(gpu); !slices.Equal(before, now) || !well() {
			return errors.New("the GPUs never recover")
		}
		return nil
	}))
}

// occupyNeighbour makes a partition on the other GPU, as an administrator does, or removes it. A
// GPU that failed again and again would be held back for longer each time.
func (l *worker) occupyNeighbour(occupied bool) error {
	return l.n.State.Update(func(m *machine.Machine) error {
		mig := m.GPUs[l.neighbour].MIG
		mig.Current, mig.Pending, mig.Instances = occupied, occupied, nil
		if !occupied {
			return nil
		}
		mig.Instances = []machine.GPUInstance{mig.Profiles[0].Instance(0, "MIG-"+m.GPUs[l.neighbour].UUID)}
		return nil
	})
}

// watch looks at what is published of a GPU until the GPUs were discovered anew
// and enough is true. It fails when devices disappear or others come.
func (l *worker) watch(ctx context.Context, gpu string, want []string, enough func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, harness.Patience)
	defer cancel()
	before, err := l.discoveries()
	if err != nil {
		return err
	}
	for {
		published, tainted := l.n.Offered(gpu)
		if diff := cmp.Diff(want, published); diff != "" {
			return fmt.Errorf("published devices of the GPU (-before +now):\n%s", diff)
		}
		now, err := l.discoveries()
		// The first may have begun earlier.
		if err != nil || now >= before+2 && enough() {
			return err
		}
		if err := harness.Soon(ctx); err != nil {
			return fmt.Errorf("after %d discoveries, tainted are %v: %w", now-before, tainted, err)
		}
	}
}
