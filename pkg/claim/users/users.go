// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package users finds the processes on a GPU that no prepared claim explains, by the pods that claims are reserved for.
//
// Most of it is known on the node: a process is on a GPU or a GPU instance, its pod has a namespace, and a pod can only have
// claims of its own namespace. Only where a claim of that namespace is in that place, the API server is asked for its pods.
// While it does not answer, the pod is taken for one of them: it must not keep the GPU back for as long as the API server is
// away. Little is given out on that: a GPU that a claim has is not free, and where claims only observe it, they are of a
// namespace that may open every GPU. Where the place has no claim of the pod's namespace the pod counts, whatever the API
// server does.
package users

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim/converge"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/holder"
)

// Users finds them. It may be used concurrently.
type Users struct {
	Finder *holder.UsersFinder
	// PodsOf returns the UIDs of the pods that a claim is reserved for.
	PodsOf func(ctx context.Context, claim record.Ref) ([]string, error)
	// Servers returns the processes that hold GPUs on behalf of MPS clients. They are no users: their sessions end with the
	// claims. Optional.
	Servers func(ctx context.Context) ([]int, error)
	// Clock is the time since the machine started.
	Clock func() time.Duration

	mu sync.Mutex
	// pods are the answers of PodsOf.
	pods map[types.UID]answer
	// failure is why PodsOf failed last, at a time, or nil.
	failure  error
	failedAt time.Duration
}

var _ converge.Users = (*Users)(nil)

// answer are the pods of a claim, as of a time.
type answer struct {
	pods []string
	at   time.Duration
}

const (
	// askLimit bounds one question to the API server, of the second that an observation has.
	askLimit = 300 * time.Millisecond
	// askAgain is for how long the API server is not asked after a question that failed, and not asked again about a claim
	// that does not have the pod.
	askAgain = 10 * time.Second
	// keepFor is how long a pod counts as one of a claim after the API server said so.
	keepFor = time.Minute
)

// Users implements converge.Users. Where the driver does not say who uses the GPU, that counts as use: nobody knows that it
// is free.
func (u *Users) Users(ctx context.Context, pciAddress string, claims []*record.Record) (rules.Users, map[int]rules.Users) {
	u.retain(claims)
	q := holder.Query{PCIAddress: pciAddress, Now: u.Clock()}
	for _, c := range claims {
		for i := range c.Devices {
			switch d := &c.Devices[i]; {
			case d.PCIAddress != pciAddress:
			case d.Admin:
				q.Observed = true
			default:
				q.Prepared = max(q.Prepared, c.Arrived)
			}
		}
	}
	// One process after the other is asked about.
	var servers func() []int
	q.Explained = func(ctx context.Context, s holder.Suspect) bool {
		if servers == nil {
			servers = sync.OnceValue(func() []int { return u.servers(ctx) })
		}
		return slices.ContainsFunc(claims, func(c *record.Record) bool { return u.explains(ctx, c, pciAddress, s) }) ||
			s.Memory && slices.Contains(servers(), s.PID)
	}
	found := u.Finder.Users(ctx, q)
	logger := klog.FromContext(ctx)
	if found.Unopened != nil {
		logger.V(2).Info("Open device nodes were not looked at, the driver's list of processes decides", "reason", found.Unopened)
	}
	if found.Undivided.Overdue != "" {
		logger.V(4).Info("Processes have the GPU open for so long that this does not count any more", "gpu", pciAddress, "processes", found.Undivided.Overdue)
	}
	undivided := convert(found.Undivided)
	if found.Unlisted != nil {
		undivided.Memory, undivided.Text = true, found.Unlisted.Error()
	}
	var instances map[int]rules.Users
	for id, users := range found.Instances {
		if instances == nil {
			instances = map[int]rules.Users{}
		}
		instances[id] = convert(users)
	}
	return undivided, instances
}

func convert(u holder.Users) rules.Users {
	return rules.Users{Memory: u.Memory, Open: u.Open, Text: u.Text}
}

func (u *Users) servers(ctx context.Context) []int {
	if u.Servers == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	servers, err := u.Servers(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Which processes are MPS servers is not known", "reason", err)
	}
	return servers
}

// explains reports whether a process is one of a claim that is on the GPU.
func (u *Users) explains(ctx context.Context, c *record.Record, pciAddress string, s holder.Suspect) bool {
	there := slices.ContainsFunc(c.Devices, func(d record.Device) bool { return d.PCIAddress == pciAddress && allows(&d, s) })
	if !there || s.Namespace != "" && s.Namespace != c.Claim.Namespace {
		return false
	}
	has, err := u.has(ctx, c.Claim, s.PodUID)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("A pod on a GPU is taken for one of a claim, whose pods are not known", "claim", c.Claim, "podUID", s.PodUID, "reason", err)
	}
	return has || err != nil
}

// allows reports whether processes of a claim with the device may be where a process is. Those that observe may be anywhere
// on the GPU, and all have its node open.
func allows(d *record.Device, s holder.Suspect) bool {
	switch {
	case d.Admin || !s.Memory:
		return true
	case d.Partition == nil:
		return s.InstanceID < 0
	}
	return d.Partition.Made != nil && d.Partition.Made.InstanceID == s.InstanceID
}

// has reports whether a pod is one of a claim. An error means that this is not known.
func (u *Users) has(ctx context.Context, claim record.Ref, podUID string) (bool, error) {
	now := u.Clock()
	u.mu.Lock()
	known, asked := u.pods[claim.UID]
	failure, failedAt := u.failure, u.failedAt
	u.mu.Unlock()
	age := now - known.at
	switch has := slices.Contains(known.pods, podUID); {
	case asked && has && age < keepFor, asked && !has && age < askAgain:
		return has, nil
	case failure != nil && now-failedAt < askAgain:
		return false, failure
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	pods, err := u.PodsOf(ctx, claim)
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.failure, u.failedAt = err, now; err != nil {
		return false, err
	}
	if u.pods == nil {
		u.pods = map[types.UID]answer{}
	}
	u.pods[claim.UID] = answer{pods: pods, at: now}
	return slices.Contains(pods, podUID), nil
}

// retain forgets the pods of claims that are not prepared any more.
func (u *Users) retain(claims []*record.Record) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for uid := range u.pods {
		if !slices.ContainsFunc(claims, func(c *record.Record) bool { return c.Claim.UID == uid }) {
			delete(u.pods, uid)
		}
	}
}
