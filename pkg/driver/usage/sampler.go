// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// Claims know what claims have. Its methods ask no GPU.
type Claims interface {
	Live() ([]claim.LiveClaim, error)
	RecordCounts() (map[string]int, error)
	// GPUs lists the PCI addresses of all GPUs, with claims and without.
	GPUs() []string
	// Changed returns a channel that is closed at the next change by this process.
	Changed() <-chan struct{}
}

// GPUs tell what is used of them. The method returns in bounded time.
type GPUs interface {
	Usage(ctx context.Context, pciAddress string, partitions []gpu.PartitionID, since time.Time) (gpu.Usage, error)
}

// Sessions are those of the MPS supervisor.
type Sessions interface {
	List(ctx context.Context) ([]mps.Status, error)
}

// Options are all mandatory.
type Options struct {
	Claims   Claims
	GPUs     GPUs
	Sessions Sessions
	Facts    *Facts
	// PodOf returns the UID of the pod of a process, or "".
	PodOf func(pid int) string
	// Environ returns the environment that a process was started with. It may not return.
	Environ func(pid int) string
	// Warn tells of a claim.
	Warn func(ctx context.Context, ref claim.Ref, reason, message string)
	// Interval is the time between two samples of a GPU.
	Interval time.Duration
}

const (
	// together is how long several changes of claims count as one.
	together = 100 * time.Millisecond
	// staleAfter is after how many intervals what was read is not told any more, but not
	// before staleTime.
	staleAfter = 4
	staleTime  = time.Minute
	// listLimit bounds one question to the MPS supervisor.
	listLimit = 5 * time.Second
)

// Sampler asks GPUs what is used of them.
type Sampler struct {
	o Options

	mu        sync.Mutex
	held      []Holding
	records   map[string]int
	addresses []string
	gpus      map[string]*gpuState
	claims    map[holdingKey]*claimState
	sessions  map[mps.Phase]int
	listing   sync.Mutex

	journalProblem logchange.Problem
	panicked       panics.Repeated
	// environ is full while an environment is read.
	environ chan struct{}
}

// holdingKey identifies a device of a claim.
type holdingKey struct {
	claim  types.UID
	device string
}

func keyOf(h *Holding) holdingKey { return holdingKey{h.Claim.UID, h.Device} }

// gpuState is what the Sampler remembers of a GPU.
type gpuState struct {
	// sampling is true until a sample has ended.
	sampling     bool
	usage        gpu.Usage
	unattributed uint64
	problem      *logchange.Problem
}

// claimState is what the Sampler remembers of a device of a claim.
type claimState struct {
	last    Measured
	sampled time.Time
	peak    *uint64
	// active is when the claim was last seen at work, or first seen at all.
	active time.Time
	known  bool
	// warned means that it is known to ask for a limit in vain.
	warned bool
}

// New makes a Sampler that does nothing before Run.
func New(o Options) *Sampler {
	return &Sampler{o: o, gpus: map[string]*gpuState{}, claims: map[holdingKey]*claimState{}, environ: make(chan struct{}, 1)}
}

// Run samples until ctx ends. Claims are known as soon as they are prepared, and forgotten as
// soon as they are released.
func (s *Sampler) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	for next := time.Now(); ctx.Err() == nil; {
		changed := s.o.Claims.Changed()
		s.readClaims(ctx)
		if now := time.Now(); !now.Before(next) {
			next = now.Add(s.o.Interval)
			running.Go(func() { s.list(ctx) })
			for _, address := range s.forget() {
				running.Go(func() { s.sample(ctx, address) })
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Until(next)):
		case <-changed:
			_ = wait.For(ctx, together)
		}
	}
}

// readClaims reads the journal without the lock that a snapshot needs: a disk may hang.
func (s *Sampler) readClaims(ctx context.Context) {
	live, err := s.o.Claims.Live()
	var records map[string]int
	if err == nil {
		records, err = s.o.Claims.RecordCounts()
	}
	s.journalProblem.Log(ctx, err, "Metrics of claims stay as they were", "")
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.held, s.records, s.addresses = holdingsOf(live), records, s.o.Claims.GPUs()
	claims, uids := map[holdingKey]*claimState{}, map[types.UID]bool{}
	for i := range s.held {
		key := keyOf(&s.held[i])
		uids[key.claim] = true
		if claims[key] = s.claims[key]; claims[key] == nil {
			claims[key] = &claimState{active: now}
		}
	}
	s.claims = claims
	s.o.Facts.keep(uids)
}

// forget forgets GPUs that are not there any more, and returns all others.
func (s *Sampler) forget() (addresses []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.gpus, func(address string, g *gpuState) bool { return !g.sampling && !slices.Contains(s.addresses, address) })
	return s.addresses
}

// list asks the MPS supervisor, unless an earlier question has no answer yet: an older answer must not replace a newer one.
func (s *Sampler) list(ctx context.Context) {
	if !s.listing.TryLock() {
		return
	}
	defer s.listing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, listLimit)
	defer cancel()
	all, err := s.o.Sessions.List(ctx)
	var sessions map[mps.Phase]int
	if err == nil {
		sessions = map[mps.Phase]int{}
		for i := range all {
			sessions[all[i].Phase]++
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions = sessions
}

// sample reads one GPU, unless an earlier sample of it has not ended.
func (s *Sampler) sample(ctx context.Context, pciAddress string) {
	held, since, free := s.begin(pciAddress)
	if !free {
		return
	}
	var usage gpu.Usage
	var err error
	defer func() { s.end(ctx, pciAddress, held, usage, err) }()
	defer s.panicked.Recover(ctx, &err)
	for i := range held {
		// Which pods use the claim is not known after a restart.
		if _, known := s.o.Facts.of(held[i].Claim.UID); !known {
			s.o.Facts.learn(ctx, held[i].Claim)
		}
	}
	var partitions []gpu.PartitionID
	for i := range held {
		if p := held[i].Partition; p != nil && p.UUID != "" && !slices.Contains(partitions, p.PartitionID) {
			partitions = append(partitions, p.PartitionID)
		}
	}
	usage, err = s.o.GPUs.Usage(ctx, pciAddress, partitions, since)
	s.tellIgnored(ctx, held, usage.Processes)
}

// begin returns who has devices on a GPU, and when it was last sampled; false while it is
// being sampled.
func (s *Sampler) begin(pciAddress string) (held []Holding, last time.Time, free bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.gpus[pciAddress]
	if g == nil {
		g = &gpuState{problem: &logchange.Problem{}}
		s.gpus[pciAddress] = g
	}
	if g.sampling {
		return nil, last, false
	}
	g.sampling = true
	for _, h := range s.held {
		if h.PCIAddress == pciAddress {
			held = append(held, h)
		}
	}
	return held, g.usage.Time, true
}

// end takes what was read.
func (s *Sampler) end(ctx context.Context, pciAddress string, held []Holding, usage gpu.Usage, err error) {
	var by []Measured
	var unattributed uint64
	if err == nil {
		var strangers []string
		by, unattributed, strangers = attribute(&usage, held, pods{of: s.o.PodOf, may: s.o.Facts.may})
		for i := range held {
			// A claim may be reserved for further pods after it was prepared.
			if len(strangers) > 0 && held[i].Kind.IsShare() {
				s.o.Facts.learn(ctx, held[i].Claim)
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.gpus[pciAddress]
	g.sampling = false
	if ctx.Err() != nil {
		return
	}
	if errors.Is(err, gpu.ErrDriverNotLoaded) {
		err = errDriver // its text differs between calls
	}
	g.problem.Log(ctx, err, "What is used of a GPU is not known", "", "pciAddress", pciAddress)
	if err != nil {
		return
	}
	g.usage, g.unattributed = usage, unattributed
	for i := range held {
		if c := s.claims[keyOf(&held[i])]; c != nil {
			c.take(by[i], usage.Time)
		}
	}
}

var errDriver = errors.New("the NVIDIA driver is not loaded")

// take remembers a sample.
func (c *claimState) take(m Measured, at time.Time) {
	c.last, c.sampled = m, at
	if m.MemoryBytes != nil && (c.peak == nil || *m.MemoryBytes > *c.peak) {
		c.peak = m.MemoryBytes
	}
	active, known := m.active()
	c.known = c.known || known
	if active {
		c.active = at
	}
}

// Snapshot returns what is known now.
func (s *Sampler) Snapshot() Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	fresh := func(at time.Time) bool { return !at.IsZero() && now.Sub(at) <= max(staleTime, staleAfter*s.o.Interval) }
	all := Snapshot{GPUs: map[string]GPU{}, Records: s.records, Sessions: s.sessions}
	for address, g := range s.gpus {
		one := GPU{Sampled: g.usage.Time}
		if fresh(g.usage.Time) {
			usage := g.usage
			one.Usage, one.UnattributedBytes = &usage, g.unattributed
		}
		all.GPUs[address] = one
	}
	for _, h := range s.held {
		c := s.claims[keyOf(&h)]
		one := Claim{Holding: h, PeakBytes: c.peak}
		if fresh(c.sampled) {
			one.Measured = c.last
		}
		if c.known && fresh(c.sampled) {
			one.Idle = new(max(0, c.sampled.Sub(c.active)))
		}
		known, _ := s.o.Facts.of(h.Claim.UID)
		one.Pods = known.names()
		if requested, ok := known.requested[h.Device]; ok {
			one.RequestedBytes = &requested
		} else if !h.Kind.IsShare() && h.MemoryLimitBytes > 0 {
			one.RequestedBytes = new(h.MemoryLimitBytes)
		}
		all.Claims = append(all.Claims, one)
	}
	return all
}
