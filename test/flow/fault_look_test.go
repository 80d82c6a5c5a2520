// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestFaultsOfLooks makes the calls go wrong with which the driver looks at the
// GPUs every now and then. What is published of a GPU may be tainted meanwhile,
// but never disappears, since it may be allocated, and all is well again
// afterwards.
func TestFaultsOfLooks(t *testing.T) {
	t.Parallel()
	r := &faultRig{n: newNode(t, "h100x16"), layout: faultLayout{at: place{"1g.10gb", 4}}}
	r.n.startSupervisor(t)
	r.p = r.n.start(t, frequent...)
	r.p.ready(t)
	for gpu := 0; gpu < 2*lanes; gpu += 2 {
		r.p.mustPrepare(t, r.n.allocate(r.n.names(t, []request{mig(gpu, "1g.10gb", 0)})))
	}
	header := readHeader(t)
	var cases []faultCase
	for _, function := range r.looks(t) {
		codes, err := header.codes(function)
		if err != nil {
			t.Fatal(err)
		}
		// Any other code is a failure like the last.
		codes = slices.DeleteFunc(codes, func(c code) bool {
			return !slices.Contains([]string{"NOT_SUPPORTED", "INVALID_ARGUMENT", "GPU_IS_LOST", "UNKNOWN"}, c.name)
		})
		// A GPU that has no memory of its own to tell of has none to share out by MPS.
		if function == "nvmlDeviceGetMemoryInfo" {
			codes = slices.DeleteFunc(codes, func(c code) bool { return c.name == "NOT_SUPPORTED" })
		}
		// Calls come again and again, so that there is no first one.
		cases = append(cases, ways(look, function, 0, codes)...)
	}
	enumerate(t, "faults", 50).addAll("looks", r.runAll(t, cases, (*lane).runLook))
}

// discovery is called once for every time that all GPUs are discovered anew.
const discovery = "nvmlDeviceGetCount_v2"

// looks are the functions that are called on GPUs while these are discovered
// anew and have partitions.
func (r *faultRig) looks(t *testing.T) []string {
	t.Helper()
	counts := r.countCalls(t, func() {
		before, err := r.discoveries()
		if err != nil {
			t.Fatal(err)
		}
		r.p.until(t, "two discoveries", func(context.Context) error {
			now, err := r.discoveries()
			if err == nil && now < before+2 {
				err = errors.New("not yet")
			}
			return err
		})
	})
	maps.DeleteFunc(counts, func(function string, _ int) bool {
		return function == discovery || strings.HasPrefix(function, "nvmlSystem")
	})
	return slices.Sorted(maps.Keys(counts))
}

func (r *faultRig) discoveries() (uint64, error) {
	calls, err := r.n.state.Calls()
	return calls[discovery], err
}

// runLook is run for what the driver does by itself.
func (l *lane) runLook(ctx context.Context, c faultCase) error {
	ctx, cancel := context.WithTimeout(ctx, eventually)
	defer cancel()
	m, err := l.n.state.Snapshot()
	if err != nil {
		return err
	}
	gpu := deviceName(m.GPUs[l.gpu].PCIAddress, place{})
	before, _ := l.n.offered(gpu)
	c.fault.GPU = l.gpu
	fault, err := l.n.tryInject(c.fault)
	if err != nil {
		return err
	}
	other := deviceName(m.GPUs[l.neighbour].PCIAddress, place{})
	untilTainted := func(names string, want bool) func() bool {
		return func() bool {
			_, tainted := l.n.offered(names)
			return len(tainted) > 0 == want
		}
	}
	err = l.watch(ctx, gpu, before, func() bool {
		struck, err := fault.tryStruck()
		return err == nil && struck > 0
	})
	err = errors.Join(err, l.roundTrip(ctx, l.neighbour))
	if err == nil {
		// When a later change is published, what was found is published too.
		err = errors.Join(l.breakNeighbour(gpuIsLost), l.watch(ctx, gpu, before, untilTainted(other, true)), l.breakNeighbour(0))
	}
	_, removeErr := fault.tryRemove()
	well := func() bool { return untilTainted(gpu, false)() && untilTainted(other, false)() }
	if err = errors.Join(err, removeErr); err == nil {
		return l.watch(ctx, gpu, before, well)
	}
	// The next case is judged on its own.
	return errors.Join(err, l.breakNeighbour(0), l.n.eventually(ctx, func() error {
		if now, _ := l.n.offered(gpu); !slices.Equal(before, now) || !well() {
			return errors.New("the GPUs never recover")
		}
		return nil
	}))
}

func (l *lane) breakNeighbour(failure int) error {
	return l.n.state.Update(func(m *machine.Machine) error {
		m.GPUs[l.neighbour].Failure = failure
		return nil
	})
}

// watch looks at what is published of a GPU until the GPUs were discovered anew
// and enough is true. It fails when devices disappear or others come.
func (l *lane) watch(ctx context.Context, gpu string, want []string, enough func() bool) error {
	before, err := l.discoveries()
	if err != nil {
		return err
	}
	for {
		published, tainted := l.n.offered(gpu)
		if diff := cmp.Diff(want, published); diff != "" {
			return fmt.Errorf("published devices of the GPU (-before +now):\n%s", diff)
		}
		now, err := l.discoveries()
		// The first may have begun earlier.
		if err != nil || now >= before+2 && enough() {
			return err
		}
		if err := soon(ctx); err != nil {
			return fmt.Errorf("after %d discoveries, tainted are %v: %w", now-before, tainted, err)
		}
	}
}

// offered are the published devices of a GPU, and those that are tainted.
func (n *node) offered(gpu string) (all, tainted []string) {
	for name, d := range n.published() {
		if !strings.HasPrefix(name, gpu) {
			continue
		}
		all = append(all, name)
		if len(d.Taints) > 0 {
			tainted = append(tainted, name)
		}
	}
	slices.Sort(all)
	slices.Sort(tainted)
	return all, tainted
}
