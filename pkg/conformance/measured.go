// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"slices"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/wait"
)

// measurements are what parts B and C have measured of a product, beside what part A reads.
type measurements struct {
	mps         BoardMPS
	serverStart time.Duration
	// instanceIDs are those of GPU instances, by profile, in the order of the placements.
	instanceIDs map[string][]int
}

// measuredOf returns the measurements of a GPU's product, for a check to add to.
func (n *Node) measuredOf(g *gpu.GPU) *measurements {
	if n.measured == nil {
		n.measured = map[string]*measurements{}
	}
	m := n.measured[g.ProductName]
	if m == nil {
		m = &measurements{instanceIDs: map[string][]int{}}
		n.measured[g.ProductName] = m
	}
	return m
}

// contextMemory notes what a context has taken of a limit, in MiB. The least counts: what a
// program cannot get may also be too small a piece.
func contextMemory(of **uint64, limitMiB int64, takenBytes uint64) {
	limit := uint64(limitMiB) * mebibyte
	if takenBytes == 0 || takenBytes >= limit {
		return
	}
	took := (limit - takenBytes) / mebibyte
	if *of == nil || took < **of {
		*of = &took
	}
}

// server notes what an MPS server had of a GPU's memory, by what was in use with it and
// after it.
func (m *measurements) server(with, after *uint64) {
	if with == nil || after == nil || *with <= *after {
		return
	}
	took := (*with - *after) / mebibyte
	m.mps.ServerMiB = &took
}

// serverMemory is what is in use while there is an MPS server without clients.
func (n *Node) serverMemory(ctx context.Context, g *gpu.GPU) (*uint64, error) {
	_, err := inLab(ctx, n, Daemon, "end of the last client", func(ctx context.Context, l *lab) (bool, error) {
		return true, wait.Until(ctx, func() (bool, error) {
			clients, err := l.command(ctx, "get_client_list "+serverWord)
			return clients == "", err
		})
	})
	if err != nil {
		return nil, err
	}
	return n.memoryInUse(ctx, g, "before the end of MPS")
}

// memoryInUse is what programs have of the GPU's memory, in bytes; nil where NVML does not
// tell.
func (n *Node) memoryInUse(ctx context.Context, g *gpu.GPU, when string) (*uint64, error) {
	return Ask(ctx, n, NVML, "memory in use of GPU "+g.PCIAddress+" "+when, func(ctx context.Context) (*uint64, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return nil, err
		}
		facts, err := hardware.Facts(ctx, g.PCIAddress)
		return facts.UsedBytes, err
	})
}

// leastLatency is how long a call takes that the catalogue has an entry for.
const leastLatency = time.Millisecond

// callLatency is an entry of the simulator's catalogue of latencies.
type callLatency struct {
	Function string
	Base     time.Duration
}

// endOfSession comes after all that is written.
const endOfSession = "nvmlShutdown"

// of returns the latencies of the calls that succeeded on some GPUs, or on the node: how long
// half of them took at most. Calls that take no time to speak of are left out.
func (c *calls) of(gpus []string) []callLatency {
	c.mu.Lock()
	defer c.mu.Unlock()
	took := map[string][]time.Duration{}
	for _, c := range c.all {
		if c.Err == nil && c.Function != endOfSession && (c.PCIAddress == "" || slices.Contains(gpus, c.PCIAddress)) {
			took[c.Function] = append(took[c.Function], c.Took)
		}
	}
	var found []callLatency
	for function, times := range took {
		slices.Sort(times)
		// As a transcript has it.
		if median := times[(len(times)-1)/2].Round(time.Microsecond); median >= leastLatency {
			found = append(found, callLatency{function, median})
		}
	}
	return found
}
