// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"
	"strings"
	"testing"

	kinds "github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// mutant is a copy of rules.Decide in which one rule is broken.
type mutant struct {
	rule, scenario string
	// breaks is the promise that is not kept then.
	breaks string
	decide Decider
}

var mutants = []mutant{
	{"the CDI spec is written last", "one partition, every fault", "a CDI spec was written for a partition that was neither made nor seen", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			at := slices.IndexFunc(t.Final, func(a rules.Action) bool { return a.Kind == rules.WriteSpec })
			if at >= 0 {
				t.Actions = append([]rules.Action{t.Final[at]}, t.Actions...)
				t.Final = slices.Delete(slices.Clone(t.Final), at, at+1)
			}
		})
	}},
	{"the UUID proves nothing: what was seen absent since is not the claim's", "one partition twice, stranger and crash", "a CDI spec names the partition of somebody else", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) {
			if p.Mark == record.Lost && isThere(&o, p) {
				p.Mark = record.Started
			}
		}))
	}},
	{"the compute mode is set back", "MPS shares of a whole GPU", "GPU 0 was left in EXCLUSIVE_PROCESS", without(rules.SetDefault)},
	{"what is in the place before the record says so is foreign", "one partition, every fault", "a CDI spec names the partition of somebody else", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) {
			if p.Mark == record.Untouched && isThere(&o, p) {
				p.Mark = record.Started
			}
		}))
	}},
	{"unknown is not absent", "one partition, every fault", "the CDI spec of a claim that is ready was removed", func(o rules.Observation) rules.Plan {
		o.Hardware.Err = nil
		return rules.Decide(o)
	}},
	{"specs that name the ID of a new instance go before anything can run in it", "two partitions side by side", "the CDI spec of another claim names the id of the new partition", without(rules.DropNamesakes)},
	{"after a refusal the record says that nothing was made", "one partition, every fault", "a CDI spec names the partition of somebody else", without(rules.Unstart)},
	{"a device is free when nobody is on it", "two whole GPUs in turn, a process stays", "a second owner: processes of another claim are still on the device", func(o rules.Observation) rules.Plan {
		o.Hardware.Users = ""
		return rules.Decide(o)
	}},
	{"an unreadable record guards what it may be about", "an unreadable record of a share", "claim 0 is wanted, nothing is in its way, and it does not become ready", func(o rules.Observation) rules.Plan {
		o.Guards = nil
		return rules.Decide(o)
	}},
	{"a claim on several GPUs is committed under the locks of all", "a claim on two GPUs, strangers", "a CDI spec was written for a partition that was neither made nor seen", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if t.Aim == rules.Commit {
				t.With = nil
			}
		})
	}},
	{"a repeated Prepare makes the record younger than an earlier Unprepare", "late calls", "destroy compute instance under a claim that is ready", func(o rules.Observation) rules.Plan {
		o.Records = slices.Clone(o.Records)
		for i := range o.Records {
			o.Records[i].Outdated = false
		}
		return rules.Decide(o)
	}},
	{"the last share takes the device with it, and no other", "MPS shares of a partition", "the CDI spec of a claim that is ready was removed", func(o rules.Observation) rules.Plan {
		var own []rules.Record
		for _, r := range o.Records {
			if r.State == record.Releasing {
				own = append(own, r)
			}
		}
		if len(own) > 0 {
			o.Records = own
		}
		return rules.Decide(o)
	}},
	{"the record is written before anything begins", "one partition, every fault", "claim 0 is wanted, nothing is in its way, and it does not become ready", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			at := slices.IndexFunc(t.Actions, func(a rules.Action) bool { return a.Kind == rules.CreateGI })
			if at > 0 && t.Actions[at-1].Kind == rules.Start {
				t.Actions = slices.Clone(t.Actions)
				t.Actions[at-1], t.Actions[at] = t.Actions[at], t.Actions[at-1]
			}
		})
	}},
	{"the CDI spec is removed first", "one partition, every fault", "a partition is destroyed while a CDI spec names it", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if t.Aim == rules.Release && t.Actions[0].Kind == rules.RemoveSpec {
				t.Actions = append(slices.Clone(t.Actions[1:]), t.Actions[0])
			}
		})
	}},
	{"what is destroyed is cleared from the record under the same lock", "one partition twice, stranger and crash", "a CDI spec names the partition of somebody else", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			at := slices.IndexFunc(t.Actions, func(a rules.Action) bool { return a.Kind == rules.DestroyGI })
			if at >= 0 {
				t.Actions = t.Actions[:at+1]
			}
		})
	}},
	{"a time slice is taken back", "time slices", "the time slice of GPU 0 was left", without(rules.ResetInterval)},
	{"nothing of another boot exists", "reboot, strangers", "a partition that somebody else made was destroyed", func(o rules.Observation) rules.Plan {
		o.Records = slices.Clone(o.Records)
		for i := range o.Records {
			r := *o.Records[i].Record
			r.BootID, o.Records[i].Record = o.Boot, &r
		}
		return rules.Decide(o)
	}},
	{"MIG mode is not switched where only an administrator may", "a fixed mode", "the MIG mode was switched where only an administrator may", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) { p.DynamicMIG = true }))
	}},
	{"a session is not started while the supervisor does not answer, and none is taken for ended", "the supervisor is away", "a container gets a GPU on which the MPS server of others still runs", func(o rules.Observation) rules.Plan {
		o.Unsupervised = nil
		return rules.Decide(o)
	}},
	{"the first share of a GPU decides about the time slice", "time slices that differ", "the time slice of a prepared share was changed", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			actions := slices.Concat(t.Actions, t.Final)
			starts := slices.IndexFunc(actions, func(a rules.Action) bool { return a.Kind == rules.Start })
			if starts < 0 || t.Aim != rules.Commit {
				return
			}
			set := actions[starts]
			if set.Kind, set.Interval = rules.SetInterval, ownInterval(&o, &set); set.Interval != "" {
				t.Actions = append(slices.Clone(t.Actions), set)
			}
		})
	}},
	{"the end of the last partition turns MIG mode off", "one partition, every fault", "claim 0 was released and has left a record", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if at := slices.IndexFunc(t.Actions, func(a rules.Action) bool { return a.Kind == rules.DisableMIG }); at >= 0 && t.Aim == rules.Release {
				t.Actions = append(t.Actions[at:at+1:at+1], slices.Delete(slices.Clone(t.Actions), at, at+1)...)
			}
		})
	}},
	{"a release leaves what is shared to the others", "MPS shares of a whole GPU", "stop MPS session under a claim that is ready", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(r *rules.Record, p *rules.Part) {
			if r.State == record.Releasing {
				p.Type = alone(p)
			}
		}))
	}},
	{"each part is started right before its first effect", "two partitions of one claim, a stranger twice", "a partition that somebody else made was destroyed", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			announced := func(a rules.Action) bool { return a.Kind == rules.Announce }
			t.Actions = first(slices.DeleteFunc(slices.Clone(t.Actions), announced), rules.Start)
		})
	}},
	{"that a partition is gone is written down before the next one goes", "two partitions of one claim, a failure", "a partition that somebody else made was destroyed", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if t.Aim == rules.Release && t.Actions[len(t.Actions)-1].Kind == rules.Clear {
				t.Actions = slices.DeleteFunc(slices.Clone(t.Actions), func(a rules.Action) bool { return a.Kind == rules.Unstart })
			}
		})
	}},
	{"a device has only so many shares", "more claims than shares", "more claims are prepared on a device than it has shares", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) { p.Clients = 0 }))
	}},
	{"to have begun with a share is not to have one", "more claims than shares", "more claims are prepared on a device than it has shares", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) {
			if p.Mark == record.Started {
				p.Clients = 0
			}
		}))
	}},
	{"a GPU that somebody uses is not given out", "a process of no claim, whole GPU and partition", "a claim gets a GPU that a process of no claim uses", func(o rules.Observation) rules.Plan {
		plan := rules.Decide(o)
		o.Hardware.Users = ""
		plan.Tasks = rules.Decide(o).Tasks
		return plan
	}},
	{"it is said who uses a GPU", "a process of no claim, whole GPU and partition", "nothing says that somebody uses GPU 0", func(o rules.Observation) rules.Plan {
		plan := rules.Decide(o)
		plan.Statements = slices.DeleteFunc(plan.Statements, func(s rules.Statement) bool { return s.Reason == rules.UsedByOthers })
		return plan
	}},
	{"MIG mode stays on while somebody keeps the first instance from being made", "a process of no claim, whole GPU and partition", "MIG mode is switched on and off while somebody uses the GPU", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if n := len(t.Actions); n > 0 && t.Actions[n-1].Kind == rules.Unstart && o.Refused != nil {
				// Before the mark, so that the task still ends with it.
				t.Actions = slices.Insert(slices.Clone(t.Actions), n-1, rules.Action{Kind: rules.DisableMIG, Claim: t.Claim, GPU: o.GPU})
			}
		})
	}},
	{"a time slice that the driver has forgotten is set again", "the driver is loaded anew", "claim 0 has lost its time slice", func(o rules.Observation) rules.Plan {
		o.Hardware.IntervalLost = false
		return rules.Decide(o)
	}},
	{"what another version has written guards what it may be about", "two versions, shares", "the CDI spec of a claim that is ready was removed", func(o rules.Observation) rules.Plan {
		o.Guards = nil
		return rules.Decide(o)
	}},
	{"a time slice that cannot be seen is taken back before its record goes", "two versions, time slices", "the time slice of GPU 0 was left", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if t.Aim == rules.Unguard {
				t.Actions = t.Actions[len(t.Actions)-1:]
			}
		})
	}},
	{"an unreadable record of a claim does not keep it from being prepared again", "a record becomes unreadable", "claim 0 is wanted, nothing is in its way, and it does not become ready", func(o rules.Observation) rules.Plan {
		o.Guards = slices.Clone(o.Guards)
		for i := range o.Guards {
			o.Guards[i].Claim.UID = "another"
		}
		return rules.Decide(o)
	}},
	{"admin access takes no place", "admin access and a partition of one claim", "claim 0 is wanted, nothing is in its way, and it does not become ready", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) { p.Admin = false }))
	}},
	{"a partition that somebody else made is used and not destroyed", "static partition and admin access", "a partition that somebody else made was destroyed", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) {
			if p.Type == record.Static {
				p.Type = kinds.Partition
			}
		}))
	}},
}

// mutantsOfReleases break rules about claims that end without the kubelet, or without a record.
var mutantsOfReleases = []mutant{
	{"what is left of a claim whose record cannot be read guards on", "an unreadable record of a share", "GPU 0 was left in EXCLUSIVE_PROCESS", func(o rules.Observation) rules.Plan {
		plan := rules.Decide(o)
		for _, g := range o.Guards {
			if g.Released {
				plan.Tasks = append(plan.Tasks, rules.Task{Claim: g.Claim.UID, Aim: rules.Unguard, Actions: []rules.Action{{Kind: rules.ClearGuard, Claim: g.Claim.UID, GPU: o.GPU}}})
			}
		}
		return plan
	}},
	{"where nothing is left of it, it does not", "an unreadable record on two GPUs, one is lost", "claim 1 is wanted, nothing is in its way, and it does not become ready", func(o rules.Observation) rules.Plan {
		plan := rules.Decide(o)
		plan.Tasks = slices.DeleteFunc(plan.Tasks, func(t rules.Task) bool { return t.Aim == rules.Unguard })
		return plan
	}},
}

// mutantsOfCombined break rules where two things go wrong.
var mutantsOfCombined = []mutant{
	{"a release leaves what another claim has started in its place", "two versions, one place", "destroy compute instance under a claim that is ready", func(o rules.Observation) rules.Plan {
		plan := rules.Decide(o)
		for i := range o.Records {
			alone := o
			alone.Records, alone.Specs = o.Records[i:i+1], nil
			for _, t := range rules.Decide(alone).Tasks {
				if t.Aim == rules.Release && o.Records[i].BootID == o.Boot {
					plan.Tasks = append(plan.Tasks, t)
				}
			}
		}
		return plan
	}},
	{"what was refused under an unreadable record was seen to be absent", "an unreadable record of two partitions, a stranger", "a CDI spec names the partition of somebody else", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			t.Actions = slices.Clone(t.Actions)
			for i := range t.Actions {
				if t.Actions[i].Kind == rules.MarkLost && len(o.Guards) > 0 {
					t.Actions[i].Kind = rules.Unstart
				}
			}
		})
	}},
}

// first brings all actions of a kind to the front.
func first(actions []rules.Action, kind rules.ActionKind) []rules.Action {
	actions = slices.Clone(actions)
	slices.SortStableFunc(actions, func(a, b rules.Action) int {
		switch {
		case a.Kind == kind && b.Kind != kind:
			return -1
		case a.Kind != kind && b.Kind == kind:
			return 1
		}
		return 0
	})
	return actions
}

// alone is the type of a device that is not shared.
func alone(p *rules.Part) kinds.Kind {
	if p.Partition != nil {
		return kinds.Partition
	}
	return kinds.Whole
}

func isThere(o *rules.Observation, p *rules.Part) bool {
	return slices.ContainsFunc(o.Hardware.Instances, func(i gpu.Instance) bool {
		return record.Place{ProfileID: i.ProfileID, Placement: i.Placement} == p.Place()
	})
}

// ownInterval is the time slice that a claim has asked for itself.
func ownInterval(o *rules.Observation, a *rules.Action) (own policy.Interval) {
	for _, r := range o.Records {
		for _, p := range r.Devices {
			if r.Claim.UID == a.Claim && p.Key() == a.Key && p.Mark == record.Untouched {
				own = p.Shared().Interval
			}
		}
	}
	return own
}

func without(kind rules.ActionKind) Decider {
	drop := func(a rules.Action) bool { return a.Kind == kind }
	return func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) { t.Actions = slices.DeleteFunc(slices.Clone(t.Actions), drop) })
	}
}

func eachTask(o rules.Observation, change func(*rules.Task)) rules.Plan {
	plan := rules.Decide(o)
	for i := range plan.Tasks {
		change(&plan.Tasks[i])
	}
	plan.Tasks = slices.DeleteFunc(plan.Tasks, func(t rules.Task) bool { return len(t.Actions)+len(t.Final) == 0 })
	return plan
}

func eachPart(o rules.Observation, change func(*rules.Record, *rules.Part)) rules.Observation {
	o.Records = slices.Clone(o.Records)
	for i := range o.Records {
		r := &o.Records[i]
		changed := *r.Record
		r.Record, changed.Devices = &changed, slices.Clone(r.Devices)
		for k := range r.Devices {
			if r.Devices[k].PCIAddress == o.GPU {
				change(r, &r.Devices[k])
			}
		}
	}
	return o
}

func scenario(t *testing.T, name string) Scenario {
	t.Helper()
	all := Scenarios()
	at := slices.IndexFunc(all, func(s *Scenario) bool { return s.Name == name })
	if at < 0 {
		t.Fatalf("no scenario is called %q", name)
	}
	return *all[at]
}

// TestMutants breaks one rule after the other. The explorer has to find each.
func TestMutants(t *testing.T) {
	for _, m := range slices.Concat(mutants, mutantsOfReleases, mutantsOfCombined) {
		t.Run(m.rule, func(t *testing.T) {
			s := scenario(t, m.scenario)
			r := Explore(&s, m.decide, mutantLimit)
			if !strings.HasSuffix(r.Broken, m.breaks) || m.breaks == "" {
				t.Fatalf("found %q in %d states, want %q\n%s", r.Broken, r.States, m.breaks, r.Print())
			}
			t.Logf("found after %d states in %.2f s, in %d steps:\n%s", r.States, r.Time.Seconds(), len(r.Trace), r.Print())
		})
	}
}

// mutantLimit is more than any of them takes.
const mutantLimit = 200_000

// TestHasty breaks a rule that is not in Decide: a CDI spec without a record is removed after another look only. Its claim may
// have been prepared elsewhere meanwhile, or be about to be: the spec is written before the record.
func TestHasty(t *testing.T) {
	s := scenario(t, "MPS session on two GPUs")
	s.Hasty = true
	r := Explore(&s, rules.Decide, mutantLimit)
	if want := "the CDI spec of a claim that is ready was removed"; !strings.HasSuffix(r.Broken, want) {
		t.Fatalf("found %q in %d states, want %q", r.Broken, r.States, want)
	}
	t.Logf("found after %d states in %.2f s, in %d steps:\n%s", r.States, r.Time.Seconds(), len(r.Trace), r.Print())
}

// TestKeepLocks breaks a rule that is not in Decide: a call that does not return keeps the lock of its own GPU, and of no
// other.
func TestKeepLocks(t *testing.T) {
	s := scenario(t, "MPS session on two GPUs")
	s.KeepLocks = true
	r := Explore(&s, rules.Decide, mutantLimit)
	if r.Broken == "" {
		t.Fatalf("not found in %d states", r.States)
	}
	t.Logf("found after %d states in %.2f s, in %d steps:\n%s", r.States, r.Time.Seconds(), len(r.Trace), r.Print())
}
