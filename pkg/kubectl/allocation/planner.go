// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"cmp"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/generation"
)

// DefaultTimeLimit is how long the scheduler searches on one node unless it is configured
// differently (filterTimeout of the plugin DynamicResources).
const DefaultTimeLimit = 10 * time.Second

// Planner answers what the scheduler would allocate.
type Planner struct {
	// Cluster is what there is to allocate.
	Cluster *Cluster
	// TimeLimit is how long is searched on one node.
	TimeLimit time.Duration
	held      map[poolID]state
	// used is what pods have of nodes, apart from devices, as far as pods could be read: the pods themselves, too.
	used map[string]corev1.ResourceList
}

// New returns a Planner for what a Snapshot has: taint rules are applied to slices, and what
// claims hold is taken.
func New(s *fleet.Snapshot) *Planner {
	p := &Planner{TimeLimit: DefaultTimeLimit, Cluster: newCluster(s), held: statesOf(s.Claims...), used: map[string]corev1.ResourceList{}}
	for _, pod := range s.Pods {
		if pod.Spec.NodeName != "" && !fleet.Ended(pod) {
			p.use(pod, pod.Spec.NodeName)
		}
	}
	return p
}

func (p *Planner) use(pod *corev1.Pod, node string) {
	used := maps.Clone(p.used[node])
	if used == nil {
		used = corev1.ResourceList{}
	}
	requests := PodRequests(pod)
	requests[corev1.ResourcePods] = *resource.NewQuantity(1, resource.DecimalSI)
	for name, amount := range requests {
		amount.Add(used[name])
		used[name] = amount
	}
	p.used[node] = used
}

// Within returns a Planner that searches for so long on one node.
func (p *Planner) Within(limit time.Duration) *Planner {
	q := *p
	q.TimeLimit = limit
	return &q
}

// ClaimsOn returns those that hold devices of the pools of a node, those with the fewest users first.
func (p *Planner) ClaimsOn(node string) []*resourceapi.ResourceClaim {
	claims := sets.New[*resourceapi.ResourceClaim]()
	for _, id := range p.Cluster.onNode[node] {
		for _, holds := range p.held[id] {
			for _, h := range holds {
				claims.Insert(h.Claim)
			}
		}
	}
	return slices.SortedFunc(maps.Keys(claims), func(a, b *resourceapi.ResourceClaim) int {
		return cmp.Or(len(a.Status.ReservedFor)-len(b.Status.ReservedFor), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
}

// Without returns a Planner for the time after these claims have ended. Pools that these do not concern, which are nearly all, stay the same.
func (p *Planner) Without(ended ...*resourceapi.ResourceClaim) *Planner {
	q, gone := *p, sets.New(ended...)
	q.held = maps.Clone(p.held)
	for id := range statesOf(ended...) {
		rest := maps.Clone(p.held[id])
		for device, holds := range rest {
			rest[device] = slices.DeleteFunc(slices.Clone(holds), func(h *fleet.Holding) bool { return gone.Has(h.Claim) })
		}
		q.held[id] = rest
	}
	return &q
}

// Allocated returns claims as they are with the results of an Answer.
func Allocated(claims []*resourceapi.ResourceClaim, results []resourceapi.AllocationResult) []*resourceapi.ResourceClaim {
	var out []*resourceapi.ResourceClaim
	for i, c := range claims {
		allocated := *c
		allocated.Status.Allocation = &results[i]
		out = append(out, &allocated)
	}
	return out
}

// With returns a Planner for the time after one more pod runs on a node, with claims that have been allocated.
func (p *Planner) With(pod *corev1.Pod, node string, claims ...*resourceapi.ResourceClaim) *Planner {
	q := *p
	q.held, q.used = maps.Clone(p.held), maps.Clone(p.used)
	q.use(pod, node)
	for id, added := range statesOf(claims...) {
		q.held[id] = added
		for device, holds := range p.held[id] {
			added[device] = append(added[device], holds...)
		}
	}
	return &q
}

// Emptied returns a Planner for a cluster without claims.
func (p *Planner) Emptied() *Planner {
	q := *p
	q.held = map[poolID]state{}
	return &q
}

// Held returns what claims have of a device and others cannot have: one with admin access counts for nothing.
func (p *Planner) Held(pool *Pool, device string) []*fleet.Holding {
	return p.held[poolID{pool.Driver, pool.Name}][device]
}

// state is what claims hold of a pool, by device.
type state map[string][]*fleet.Holding

// statesOf returns what claims hold of each pool. The allocator gets the states of a node's pools only: it goes through all shares of a state
// for each device.
func statesOf(claims ...*resourceapi.ResourceClaim) map[poolID]state {
	out := map[poolID]state{}
	for _, c := range claims {
		for _, r := range fleet.Results(c, "") {
			h, id := &fleet.Holding{Claim: c, Result: r}, poolID{r.Driver, r.Pool}
			if h.Admin() {
				continue
			}
			if out[id] == nil {
				out[id] = state{}
			}
			out[id][r.Device] = append(out[id][r.Device], h)
		}
	}
	return out
}

// allocated returns the allocator's view of what is held of some pools.
func (p *Planner) allocated(pools []poolID) structured.AllocatedState {
	out := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, id := range pools {
		for device, holds := range p.held[id] {
			deviceID := structured.MakeDeviceID(id.driver, id.pool, device)
			for _, h := range holds {
				if h.Alone() {
					out.AllocatedDevices.Insert(deviceID)
					continue
				}
				out.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(deviceID, h.Result.ShareID))
				if h.Result.ConsumedCapacity != nil {
					out.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(deviceID, h.Result.ConsumedCapacity))
				}
			}
		}
	}
	return out
}

type poolID struct{ driver, pool string }

func comparePools(a, b poolID) int {
	return cmp.Or(cmp.Compare(a.driver, b.driver), cmp.Compare(a.pool, b.pool))
}

// Pool is what the scheduler sees of a pool: the slices of its newest generation.
type Pool struct {
	Driver, Name string
	Slices       []*resourceapi.ResourceSlice
	// Invalid says that a name occurs twice, or a counter is not there: the scheduler allocates
	// nothing of it.
	Invalid bool

	// all are the slices of all generations, sorted by name, as the allocator sorts them: which count is for the allocator to say.
	all []*resourceapi.ResourceSlice
	// contents are those of each slice's devices.
	contents map[*resourceapi.ResourceSlice][]uint64
}

// Expected is how many slices the pool should have.
func (p *Pool) Expected() int64 { return p.Slices[0].Spec.Pool.ResourceSliceCount }

// Incomplete reports whether slices are missing: the scheduler allocates nothing of the pool then.
func (p *Pool) Incomplete() bool { return int64(len(p.Slices)) != p.Expected() }

func poolsOf(s *fleet.Snapshot) map[poolID]*Pool {
	pools := map[poolID]*Pool{}
	all := s.Slices
	if len(s.TaintRules) > 0 {
		all = make([]*resourceapi.ResourceSlice, len(s.Slices))
		for i := range all {
			all[i] = tainted(s.Slices[i], s.TaintRules)
		}
	}
	for _, s := range all {
		id := poolID{s.Spec.Driver, s.Spec.Pool.Name}
		if pools[id] == nil {
			pools[id] = &Pool{Driver: id.driver, Name: id.pool, contents: map[*resourceapi.ResourceSlice][]uint64{}}
		}
		pools[id].all = append(pools[id].all, s)
	}
	contents := make([][]uint64, len(all))
	inParallel(len(all), func(n int) {
		for i := range all[n].Spec.Devices {
			contents[n] = append(contents[n], contentOf(all[n].Spec.Driver, &all[n].Spec.Devices[i]))
		}
	})
	for n, s := range all {
		pools[poolID{s.Spec.Driver, s.Spec.Pool.Name}].contents[s] = contents[n]
	}
	for _, p := range pools {
		slices.SortStableFunc(p.all, func(a, b *resourceapi.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
		p.Slices, _ = generation.Newest(p.all)
		p.Invalid = !p.Incomplete() && !valid(p.Slices)
	}
	return pools
}

// tainted returns a slice with the taints that rules give to its devices, as the scheduler sees it. One that no rule concerns stays as it is.
func tainted(s *resourceapi.ResourceSlice, rules []*resourceapi.DeviceTaintRule) *resourceapi.ResourceSlice {
	patched := s
	for _, rule := range rules {
		for i := range s.Spec.Devices {
			if !fleet.RuleCovers(rule, s.Spec.Driver, s.Spec.Pool.Name, s.Spec.Devices[i].Name) {
				continue
			}
			if patched == s {
				c := *s
				c.Spec.Devices = slices.Clone(s.Spec.Devices)
				patched = &c
			}
			d := &patched.Spec.Devices[i]
			d.Taints = append(slices.Clip(d.Taints), rule.Spec.Taint)
		}
	}
	return patched
}

// valid reports whether no name occurs twice, and all counters that devices use are there, whether or not they are enough.
func valid(pool []*resourceapi.ResourceSlice) bool {
	counters, names, all := fleet.CountersOf(pool), sets.New[string](), 0
	for _, s := range pool {
		all += len(s.Spec.SharedCounters)
		for _, d := range s.Spec.Devices {
			if names.Has(d.Name) {
				return false
			}
			names.Insert(d.Name)
			for _, use := range d.ConsumesCounters {
				for name := range use.Counters {
					if _, has := counters[use.CounterSet][name]; !has {
						return false
					}
				}
			}
		}
	}
	return all == len(counters)
}
