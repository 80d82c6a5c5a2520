// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/driver/claim/lock"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/panics"
)

const (
	// surveyWait is how long a survey waits for GPUs that are slow, or busy, or for an MPS supervisor that does not answer.
	surveyWait = time.Second
	// silenceLimit is how long the MPS supervisor may not answer before people are told. At the start of a node it may begin
	// later than this process.
	silenceLimit = 5 * time.Second
)

// surveyor says what the rules say of GPUs in the words of package device, and remembers what it said last.
type surveyor struct {
	engine *converge.Engine
	// atWork is by PCI address.
	atWork singleflight.Group
	// latest has what was surveyed last, by PCI address.
	latest sync.Map
}

// surveyed is what a survey says about one GPU.
type surveyed struct {
	statics    []device.Static
	conditions []device.Condition
	// claims are about those that have something of it.
	claims []Statement
	// looked says that this process has seen the GPU, or knows that it does not answer.
	looked bool
}

// survey observes all GPUs at the same time. One that is slow keeps nothing from being said of the others: what was said of
// it last still counts.
func (s *surveyor) survey(ctx context.Context, inventory *device.Inventory) device.Status {
	limited, cancel := context.WithTimeout(ctx, surveyWait)
	defer cancel()
	sideBySide(limited, &s.atWork, inventory.PCIAddresses(), func(address string) (err error) {
		defer panics.Recover(ctx, &err)
		s.latest.Store(address, s.surveyGPU(ctx, inventory, address))
		return nil
	})
	var status device.Status
	for _, address := range inventory.PCIAddresses() {
		f := s.last(address)
		status.Static = append(status.Static, f.statics...)
		status.Conditions = append(status.Conditions, f.conditions...)
	}
	return status
}

// sideBySide works on all GPUs at the same time, unless it is at work on them still, and returns what has come of that. What
// goes on when ctx ends does so without the caller.
func sideBySide(ctx context.Context, atWork *singleflight.Group, gpus []string, do func(address string) error) (errs []error) {
	results := make([]<-chan singleflight.Result, len(gpus))
	for i, address := range gpus {
		results[i] = atWork.DoChan(address, func() (any, error) { return nil, do(address) })
	}
	for i, address := range gpus {
		select {
		case r := <-results[i]:
			errs = append(errs, r.Err)
		case <-ctx.Done():
			errs = append(errs, fmt.Errorf("GPU %s: this takes long and goes on", address))
		}
	}
	return errs
}

// surveyGPU waits for a GPU that a call is at work on: what was said of it last still counts meanwhile.
func (s *surveyor) surveyGPU(ctx context.Context, inventory *device.Inventory, address string) (f surveyed) {
	latest := s.last(address)
	said, err := s.engine.Survey(ctx, address)
	switch {
	case ctx.Err() != nil:
		return latest // it was not the GPU that gave up
	case errors.Is(err, lock.ErrElsewhere):
		// A process that hangs in the kernel does not die and keeps its locks.
		return surveyed{looked: true, statics: latest.statics, claims: latest.claims, conditions: unanswered(address, fmt.Errorf("%w; an earlier instance of the driver may hang in it: %w", err, gpu.ErrHung))}
	case err != nil, gpu.IsPending(said.Unanswered) && !errors.Is(said.Unanswered, gpu.ErrHung):
		return latest // it is busy or slow, or waits behind another GPU
	}
	f = s.translate(inventory, address, said, latest)
	f.conditions = append(f.conditions, s.refusal(ctx, address)...)
	if said.Unanswered != nil {
		f.statics, f.claims = latest.statics, latest.claims
	}
	return f
}

// last is what was said of a GPU last, or what records say of it.
func (s *surveyor) last(address string) surveyed {
	latest, _ := s.latest.Load(address)
	f, _ := latest.(surveyed)
	if f.looked {
		return f
	}
	f.statics = nil
	for _, d := range s.engine.Store.Snapshot().On(address) {
		if d.Type == record.Static && !d.Admin && d.Partition.Made != nil {
			f.statics = append(f.statics, device.Static{
				PCIAddress: address, ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement, UUID: d.Partition.Made.UUID,
			})
		}
	}
	return f
}

// conditions are what statements are for devices, besides their place. The others are about claims.
var conditions = map[rules.Reason]device.Condition{
	rules.Occupied:         {Reason: device.Occupied},
	rules.ReleasePending:   {Reason: device.ReleasePending},
	rules.UsedByOthers:     {Reason: device.ReleasePending, Undivided: true},
	rules.OpenedByOthers:   {Reason: device.Opened, Undivided: true, Effect: policy.EffectNone},
	rules.RecordUnreadable: {Reason: device.ReleasePending, Undivided: true}, // partitions are seen on the hardware
	rules.SessionUnwell:    {Reason: device.MPSUnhealthy},
	rules.Unsupervised:     {Reason: device.MPSUnavailable, Kind: device.MPS},
}

// translate translates what the rules say.
func (s *surveyor) translate(inventory *device.Inventory, address string, said *converge.Said, latest surveyed) (f surveyed) {
	f.statics, f.looked = said.Static, true
	for _, one := range said.Statements {
		if reason := eventReasons[one.Reason]; reason != "" {
			f.claims = append(f.claims, Statement{Claim: said.Ref(one.Claim), Reason: reason, Device: one.Device, Text: one.Text})
		}
		switch one.Reason {
		case rules.Unresponsive:
			f.conditions = append(f.conditions, unanswered(address, said.Unanswered)...)
		case rules.Unsupervised:
			// What an earlier process has said of MPS shares is not taken back before the supervisor had the time to answer.
			f.looked = latest.looked || !hasMPS(inventory, address) || s.engine.SilentFor() >= silenceLimit
		}
		if c, holds := s.condition(inventory, address, one); holds {
			f.conditions = append(f.conditions, c)
		}
	}
	return f
}

// condition reports also whether a statement is to be one now.
func (s *surveyor) condition(inventory *device.Inventory, address string, one rules.Statement) (c device.Condition, holds bool) {
	c, holds = conditions[one.Reason]
	c.PCIAddress, c.Message = address, one.Text
	if one.Place != rules.Undivided {
		c.Where, c.ProfileID, c.Undivided = &one.Place.Placement, &one.Place.ProfileID, false
	}
	switch one.Reason {
	case rules.Unsupervised:
		holds = s.engine.SilentFor() >= silenceLimit && hasMPS(inventory, address)
	case rules.SessionUnwell:
		c.ProfileID = nil // a claim has the engines of the place
	case rules.ReleasePending:
		holds = !one.Due || !s.isAtWork(address, one.Claim)
		if err := s.engine.Failures.Of(one.Claim, address); err != nil {
			c.Message += ": " + strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		if d, found := inventory.Lookup(one.Device); c.Where == nil && found && d.Partition != nil {
			c.Where = &d.Partition.Placement // that of a session which is named after a partition
		}
	}
	return c, holds
}

// refusal says that nothing of a kind can be made on a GPU because somebody uses it, for as long as processes are seen there.
func (s *surveyor) refusal(ctx context.Context, address string) []device.Condition {
	refused, found := s.engine.Failures.InUse(address)
	if !found {
		return nil
	}
	if processes, err := s.engine.Partitions.Processes(ctx, address); err == nil && len(processes) == 0 {
		s.engine.Failures.NotInUse(address)
		return nil
	}
	kind := device.Partition
	if refused.Place == rules.Undivided {
		kind = device.MPS
	}
	return []device.Condition{{PCIAddress: address, Kind: kind, Reason: device.ReleasePending, Message: "GPU " + address + ": " + refused.Text}}
}

// isAtWork reports whether the call that releases a claim has just come, and nothing of that has failed.
func (s *surveyor) isAtWork(address string, claim types.UID) bool {
	return s.engine.Store.Released(claim, s.engine.Clock()-releaseTime) && s.engine.Failures.Of(claim, address) == nil
}

// hasMPS reports whether a GPU is published in shares by MPS.
func hasMPS(inventory *device.Inventory, address string) bool {
	return slices.ContainsFunc(inventory.Devices(), func(d device.Device) bool {
		return d.Kind == device.MPS && d.GPU.PCIAddress == address
	})
}

// unanswered says what is known of a GPU that does not answer as it should.
func unanswered(address string, err error) []device.Condition {
	c := device.Condition{PCIAddress: address, Reason: device.Unresponsive, Message: err.Error()}
	switch {
	case errors.Is(err, gpu.ErrNotSupported), errors.Is(err, gpu.ErrDriverNotLoaded):
		return nil // readiness says so
	case errors.Is(err, gpu.ErrHung):
	case errors.Is(err, gpu.ErrLost), errors.Is(err, gpu.ErrNotFound):
		c.Reason = device.Lost
	case errors.Is(err, gpu.ErrResetRequired):
		c.Reason = device.ResetRequired
	}
	return []device.Condition{c}
}
