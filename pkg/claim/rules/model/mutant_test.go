// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"
	"testing"

	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/policy"
)

// mutants are copies of rules.Decide in which one rule is broken.
var mutants = []struct {
	rule, scenario string
	decide         Decider
}{
	{"the CDI spec is written last", "one partition, every fault", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			at := slices.IndexFunc(t.Final, func(a rules.Action) bool { return a.Do == rules.WriteSpec })
			if at >= 0 {
				t.Actions = append([]rules.Action{t.Final[at]}, t.Actions...)
				t.Final = slices.Delete(slices.Clone(t.Final), at, at+1)
			}
		})
	}},
	{"the UUID proves nothing: what was seen absent since is not the claim's", "one partition twice, stranger and crash", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) {
			if p.Mark == rules.Lost && isThere(&o, p) {
				p.Mark = rules.Started
			}
		}))
	}},
	{"the compute mode is set back", "MPS shares of a whole GPU", without(rules.SetDefault)},
	{"what is in the place before the record says so is foreign", "one partition, every fault", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) {
			if p.Mark == rules.Untouched && isThere(&o, p) {
				p.Mark = rules.Started
			}
		}))
	}},
	{"unknown is not absent", "one partition, every fault", func(o rules.Observation) rules.Plan {
		o.Hardware.Answer = rules.Answered
		return rules.Decide(o)
	}},
	{"specs that name the ID of a new instance go before anything can run in it", "two partitions side by side", without(rules.DropNamesakes)},
	{"after a refusal the record says that nothing was made", "one partition, every fault", without(rules.Unstart)},
	{"a device is free when nobody is on it", "two whole GPUs in turn, a process stays", func(o rules.Observation) rules.Plan {
		o.Hardware.Users = rules.Users{}
		return rules.Decide(o)
	}},
	{"an unreadable record guards what it may be about", "an unreadable record of a share", func(o rules.Observation) rules.Plan {
		o.Guards = nil
		return rules.Decide(o)
	}},
	{"a claim on several GPUs is committed under the locks of all", "a claim on two GPUs, strangers", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if t.Aim == rules.Commit {
				t.With = nil
			}
		})
	}},
	{"a repeated Prepare makes the record younger than an earlier Unprepare", "late calls", func(o rules.Observation) rules.Plan {
		o.Records = slices.Clone(o.Records)
		for i := range o.Records {
			o.Records[i].Outdated = false
		}
		return rules.Decide(o)
	}},
	{"the last share takes the device with it, and no other", "MPS shares of a partition", func(o rules.Observation) rules.Plan {
		var own []rules.Record
		for _, r := range o.Records {
			if r.Phase == rules.Releasing {
				own = append(own, r)
			}
		}
		if len(own) > 0 {
			o.Records = own
		}
		return rules.Decide(o)
	}},
	{"the record is written before anything begins", "one partition, every fault", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			at := slices.IndexFunc(t.Actions, func(a rules.Action) bool { return a.Do == rules.CreateGI })
			if at > 0 && t.Actions[0].Do == rules.Start {
				t.Actions = slices.Insert(slices.Clone(t.Actions[1:]), at, t.Actions[0])
			}
		})
	}},
	{"the CDI spec is removed first", "one partition, every fault", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if t.Aim == rules.Release && t.Actions[0].Do == rules.RemoveSpec {
				t.Actions = append(slices.Clone(t.Actions[1:]), t.Actions[0])
			}
		})
	}},
	{"what is destroyed is cleared from the record under the same lock", "one partition twice, stranger and crash", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			at := slices.IndexFunc(t.Actions, func(a rules.Action) bool { return a.Do == rules.DestroyGI })
			if at >= 0 {
				t.Actions = t.Actions[:at+1]
			}
		})
	}},
	{"a time slice is taken back", "time slices", without(rules.ResetInterval)},
	{"nothing of another boot exists", "reboot, strangers", func(o rules.Observation) rules.Plan {
		o.Records = slices.Clone(o.Records)
		for i := range o.Records {
			o.Records[i].Boot = o.Boot
		}
		return rules.Decide(o)
	}},
	{"MIG mode is not switched where only an administrator may", "a fixed mode", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(_ *rules.Record, p *rules.Part) { p.Dynamic = true }))
	}},
	{"a session is not started while the supervisor does not answer, and none is taken for ended", "the supervisor is away", func(o rules.Observation) rules.Plan {
		o.Supervisor = rules.Answered
		return rules.Decide(o)
	}},
	{"the first share of a GPU decides about the time slice", "time slices that differ", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if len(t.Actions) == 0 || t.Aim != rules.Commit {
				return
			}
			set := t.Actions[0]
			if set.Do, set.Interval = rules.SetInterval, ownInterval(&o, &set); set.Interval != "" {
				t.Actions = append(slices.Clone(t.Actions), set)
			}
		})
	}},
	{"the end of the last partition turns MIG mode off", "one partition, every fault", func(o rules.Observation) rules.Plan {
		return eachTask(o, func(t *rules.Task) {
			if at := slices.IndexFunc(t.Actions, func(a rules.Action) bool { return a.Do == rules.DisableMIG }); at >= 0 && t.Aim == rules.Release {
				t.Actions = append(t.Actions[at:at+1:at+1], slices.Delete(slices.Clone(t.Actions), at, at+1)...)
			}
		})
	}},
	{"a release leaves what is shared to the others", "MPS shares of a whole GPU", func(o rules.Observation) rules.Plan {
		return rules.Decide(eachPart(o, func(r *rules.Record, p *rules.Part) {
			if r.Phase == rules.Releasing {
				p.Shared = false
			}
		}))
	}},
}

func isThere(o *rules.Observation, p *rules.Part) bool {
	return slices.ContainsFunc(o.Hardware.Instances, func(i rules.Instance) bool { return i.Place == p.Place })
}

// ownInterval is the time slice that a claim has asked for itself.
func ownInterval(o *rules.Observation, a *rules.Action) (own policy.Interval) {
	for _, r := range o.Records {
		for _, p := range r.Parts {
			if r.Claim == a.Claim && p.Key == a.Key && p.Mark == rules.Untouched {
				own = p.Interval
			}
		}
	}
	return own
}

func without(do rules.Do) Decider {
	drop := func(a rules.Action) bool { return a.Do == do }
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
		r.Parts = slices.Clone(r.Parts)
		for k := range r.Parts {
			if r.Parts[k].GPU == o.GPU {
				change(r, &r.Parts[k])
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
	for _, m := range mutants {
		t.Run(m.rule, func(t *testing.T) {
			s := scenario(t, m.scenario)
			r := Explore(&s, m.decide, mutantLimit)
			if r.Broken == "" {
				t.Fatalf("not found in %d states", r.States)
			}
			t.Logf("found after %d states in %.2f s, in %d steps:\n%s", r.States, r.Time.Seconds(), len(r.Trace), r.Print())
		})
	}
}

// mutantLimit is more than any of them takes.
const mutantLimit = 200_000

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
