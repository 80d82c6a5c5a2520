// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

const mib = 1 << 20

// shareOption is one way to share a GPU or a partition.
type shareOption struct {
	kind Kind
	// title is the name of the kind in messages.
	title string
	// share is without the base.
	share Share
	// offered says that the policy offers it.
	offered bool
}

// shareOptions lists how the undivided GPU (nil), or each of its partitions of a
// profile, can be shared. Where the policy does not offer an option, or the
// hardware cannot follow the policy, the option has the built-in numbers: a claim
// may have such a share from before.
func (c *catalog) shareOptions(profile *gpu.Profile) []shareOption {
	mps, timeSlice := c.offer.MPS, c.offer.TimeSlice
	if profile != nil {
		mps, timeSlice = c.partitionShareOffers(profile.Name)
	}
	var options []shareOption
	add := func(o shareOption, wanted, builtin func() (Share, error)) {
		var problem error
		if o.offered {
			o.share, problem = wanted()
		}
		if problem != nil {
			of := "the GPU"
			if profile != nil {
				of = "profile " + profile.Name
			}
			c.problems = append(c.problems, fmt.Errorf("%s shares of %s: the policy's %s %w", o.title, of, c.offer.From(), problem))
		}
		if o.share.Clients == 0 {
			o.offered = false
			o.share, _ = builtin()
		}
		if o.share.Clients > 0 {
			options = append(options, o)
		}
	}
	builtin := policy.Builtin().Default
	add(shareOption{kind: MPS, title: "MPS", offered: mps != nil},
		func() (Share, error) { return c.mpsShare(profile, *mps) },
		func() (Share, error) { return c.mpsShare(profile, *builtin.MPS) })
	add(shareOption{kind: TimeSlice, title: "time-slice", offered: timeSlice != nil},
		func() (Share, error) { return c.timeSliceShare(profile, *timeSlice) },
		func() (Share, error) { return c.timeSliceShare(profile, *builtin.TimeSlice) })
	return options
}

// partitionShareOffers returns how the policy shares partitions of a profile.
func (c *catalog) partitionShareOffers(profile string) (*policy.MPSOffer, *policy.TimeSliceOffer) {
	if c.offer.Partition == nil {
		return nil, nil
	}
	for _, s := range c.offer.Partition.Shares {
		if slices.Contains(s.Profiles, profile) {
			return s.MPS, s.TimeSlice
		}
	}
	return nil, nil
}

// errMemoryUnknown is about GPUs that have no memory of their own but the host's: limits cannot be
// parts of a memory that is not known.
var errMemoryUnknown = errors.New("cannot be met: the driver does not report the GPU's memory, so that it cannot be divided; none are published")

// mpsShare returns a share without clients where MPS is not possible. The error
// says where the share differs from the offer.
func (c *catalog) mpsShare(profile *gpu.Profile, offer policy.MPSOffer) (Share, error) {
	most := c.gpu.MPSClients(c.node.CUDAVersion, profile)
	if most == 0 {
		return Share{}, nil
	}
	if profile == nil && c.gpu.Resources.MemoryBytes == 0 {
		return Share{}, errMemoryUnknown
	}
	var problem error
	clients := max(1, offer.Clients)
	if clients > most {
		problem = fmt.Errorf("asks for %d clients, the hardware takes %d at most; %d are offered", clients, most, most)
		clients = most
	}
	memory := c.mpsMemory(profile, offer)
	if fit := memory.clients(); clients > fit {
		if fit == 0 {
			return Share{}, fmt.Errorf("leaves no memory for clients: %s; none are published", memory)
		}
		problem = fmt.Errorf("asks for %d clients, the memory is enough for %d: %s; %d are offered", offer.Clients, fit, memory, fit)
		clients = fit
	}
	s := Share{
		Clients:  clients,
		Percent:  int(overcommit(100, offer.ComputeOvercommit)),
		Interval: policy.IntervalDefault, OnClientKilled: offer.OnClientKilled, ClientPriority: offer.ClientPriority,
		Held: c.holds(profile),
	}
	s.DefaultPercent = defaultPercent(s)
	s.limitMemory(memory.offered(clients), offer.MemoryOvercommit)
	return s, problem
}

// holds reports whether the driver limits the memory of containers on the GPU, and not on one of its partitions.
func (c *catalog) holds(profile *gpu.Profile) bool { return profile == nil && c.gpu.MemoryLimits }

// timeSliceShare is like mpsShare. Without an interposer library, or a driver that limits
// memory, nothing is enforced: the scheduler counts the memory of claims that request some.
func (c *catalog) timeSliceShare(profile *gpu.Profile, offer policy.TimeSliceOffer) (Share, error) {
	s := Share{Clients: max(1, offer.Clients), Interval: policy.IntervalDefault, Limited: c.terms.Limited, Held: c.holds(profile)}
	limited := s.Limited || s.Held
	if profile == nil {
		s.Interval = cmp.Or(offer.Interval, policy.IntervalDefault)
	}
	memory := c.usableMemory(profile)
	if limited && profile == nil && c.gpu.Resources.MemoryBytes == 0 {
		return Share{}, errMemoryUnknown
	}
	if !limited {
		s.MaxMemoryBytes, s.MemoryBytes = memory*mib, overcommit(memory, offer.MemoryOvercommit)*mib
		return s, nil
	}
	if memory < int64(s.Clients) {
		return Share{}, fmt.Errorf("has %d clients share %d MiB of memory: none are published, since each needs 1 MiB at least", s.Clients, memory)
	}
	if s.Limited {
		// A client cannot be limited to less than one percent, so that more than 100
		// clients get one each.
		s.Percent = max(100, s.Clients)
		s.DefaultPercent = defaultPercent(s)
	}
	s.limitMemory(memory, offer.MemoryOvercommit)
	return s, nil
}

// defaultPercent is an equal part: a client without a limit would take from the
// others.
func defaultPercent(s Share) int { return max(1, min(100, s.Percent/s.Clients)) }

// limitMemory sets the memory limits of clients that have so many MiB. They are whole
// MiB, the smallest unit in which MPS takes limits.
func (s *Share) limitMemory(most int64, factor float64) {
	all := overcommit(most, factor)
	each := min(most, all/int64(s.Clients))
	s.MemoryBytes, s.MaxMemoryBytes, s.DefaultMemoryBytes = all*mib, most*mib, each*mib
}

// Guaranteed returns how much of the memory of a claim is there for it even if all claims use theirs: less than all of it where
// the policy overcommits memory.
func (s *Share) Guaranteed(bytes int64) int64 {
	parts := float64(s.MaxMemoryBytes) / float64(max(s.MemoryBytes, s.MaxMemoryBytes, 1))
	return max(1, int64(float64(bytes/mib)*parts)) * mib
}

// overcommit rounds down. Factors are decimal fractions, which are not exact: 1.15
// times 100 has to be 115.
func overcommit(n int64, factor float64) int64 {
	const most = 1 << 42 // as bytes this many MiB still fit an int64
	return int64(min(most, math.Floor(float64(n)*max(1, factor)+1e-6)))
}
