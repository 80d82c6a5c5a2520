// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package users finds the processes on a GPU that no prepared claim explains.
//
// All of it is known on the node: a process is on a GPU or a GPU instance, its pod has a namespace, and a pod can only have
// claims of its own namespace. So a claim in that place explains all pods of its namespace there. Whether it is reserved for
// them does not matter: a GPU that a claim has is not free, and where claims only observe it, they are of a namespace that may
// open every GPU.
//
// Processes outside of pods do not count, nor those of pods in namespaces that are ignored: they belong to the node. One that
// has ended and is still listed may have been anybody's, and counts. On a GPU with an orphan, a claim that does not exist any
// more, everybody counts: nothing but this keeps a whole GPU, or a partition that somebody else made, from being given away
// under a running container.
package users

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// Users finds them. It may be used concurrently.
type Users struct {
	Finder *holder.Finder
	// List are the processes that the driver lists on a GPU.
	List func(ctx context.Context, pciAddress string) ([]gpu.Process, error)
	// Ignored reports whether pods of a namespace do not count.
	Ignored func(namespace string) bool
	// Servers returns the processes that hold GPUs on behalf of MPS clients. They are no users: their sessions end with the
	// claims.
	Servers func(ctx context.Context) ([]int, error)
	// Clock is the time since the machine started.
	Clock func() time.Duration

	mu sync.Mutex
	// openers are those that were seen to have the node of a GPU open, for as long as they have. There is an entry for each
	// GPU that was observed.
	openers map[string]map[opener]sighting
	// keptSince is since when open nodes keep a GPU back. It is one time for all of them: who has a node open can start a process that has
	// it, too, again and again.
	keptSince map[string]time.Duration
}

// opener is a process that has the node of a GPU open. Its start tells it from a later one with the same ID.
type opener struct {
	pid   int
	start time.Duration
}

// sighting is what is remembered of an opener.
type sighting struct {
	first time.Duration
	// before means that it had the node open when a claim was prepared.
	before bool
}

const (
	// limit bounds one observation. The driver's list of processes alone decides where the open files of all processes
	// could not be read within it.
	limit = time.Second
	// goTime is how long processes that have ended are waited for, and goPause is between two questions.
	goTime, goPause = 300 * time.Millisecond, 20 * time.Millisecond
	// openLimit is how long an open node keeps a GPU back.
	openLimit = 10 * time.Minute
	// askLimit bounds the question to the MPS supervisor, for which open files that cannot be read leave time.
	askLimit = 300 * time.Millisecond
	// shown is how many users are described.
	shown = 5
)

// undivided is in place of the ID of a GPU instance.
const undivided = -1

// observation is one of a GPU.
type observation struct {
	*Users
	gpu    string
	claims []*record.Record
	// orphaned are where an orphan is. With any, everybody counts.
	orphaned []int
	servers  func() []int
	listed   []gpu.Process
	// users describe those that count, by the ID of GPU instances, and opened those that have had the node open for too long to count.
	users  map[int][]string
	opened []string
}

// Users implements converge.Users. Where the driver does not say who uses the GPU, that counts as use: nobody knows that it
// is free.
func (u *Users) Users(ctx context.Context, pciAddress string, claims []*record.Record, orphan *record.Record) (users string, ofInstances map[int]string, opened string) {
	until := time.Now().Add(limit)
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	o := &observation{Users: u, gpu: pciAddress, claims: claims, users: map[int][]string{}}
	o.servers = sync.OnceValue(func() []int { return u.serversNow(ctx) })
	if orphan != nil {
		for _, d := range orphan.Devices {
			if d.PCIAddress == pciAddress && !d.Admin {
				o.orphaned = append(o.orphaned, instanceOf(&d))
			}
		}
	}
	listed, unlisted := u.list(ctx, pciAddress)
	o.listed = listed
	cannotList := errors.Is(unlisted, gpu.ErrNotSupported)
	everybody := cannotList && len(o.orphaned) > 0
	open, unopened := u.Finder.Openers(ctx, pciAddress, time.Until(until)-askLimit, !everybody)
	if unopened != nil {
		klog.FromContext(ctx).V(2).Info("Open device nodes were not read, the driver's list of processes decides", "reason", unopened)
	}
	for _, p := range listed {
		o.addListed(u.Finder.Process(p.PID), p.InstanceID)
	}
	if cannotList {
		unlisted = nil
	}
	switch {
	case everybody:
		// The kernel knows who has the GPU open, whatever the driver can list.
		unlisted = unopened
		for _, p := range open {
			o.addListed(p, undivided)
		}
	case unopened == nil:
		o.addOpeners(slices.DeleteFunc(open, func(p holder.Process) bool {
			return slices.ContainsFunc(listed, func(other gpu.Process) bool { return other.PID == p.PID })
		}))
	}
	if unlisted != nil {
		o.add(undivided, fmt.Sprintf("which processes use GPU %s is not known: %v", pciAddress, unlisted))
	}
	return o.result()
}

// list lists the processes on a GPU. One that has just ended is given time to go, such as an MPS server whose session was on several
// GPUs and ended with another one.
func (u *Users) list(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	hasEnded := func(p gpu.Process) bool { return u.Finder.Process(p.PID).Ended }
	for until := time.Now().Add(goTime); ; {
		listed, err := u.List(ctx, pciAddress)
		if err != nil || !slices.ContainsFunc(listed, hasEnded) || time.Now().After(until) || wait.For(ctx, goPause) != nil {
			return listed, err
		}
	}
}

// addListed counts a process with a context or memory in a place, unless that is explained. MPS servers are no users.
func (o *observation) addListed(p holder.Process, instanceID int) {
	if text, counts := o.counts(p, true, max(instanceID, undivided)); counts && !slices.Contains(o.servers(), p.PID) {
		o.add(instanceID, text)
	}
}

// add counts a user that has a context or memory in a place. One that the driver puts on no instance may be on that of an
// orphan.
func (o *observation) add(instanceID int, text string) {
	places := []int{max(instanceID, undivided)}
	if instanceID < 0 {
		places = append(places, o.orphaned...)
		slices.Sort(places)
	}
	for _, at := range slices.Compact(places) {
		o.users[at] = append(o.users[at], text)
	}
}

// result are the users of the undivided GPU and of its instances, and who else has its node open.
func (o *observation) result() (string, map[int]string, string) {
	found := map[int]string{}
	for at, users := range o.users {
		found[at] = describe(users)
	}
	whole := found[undivided]
	delete(found, undivided)
	return whole, found, describe(o.opened)
}

// describe joins the first texts, and says how many there are besides.
func describe(users []string) string {
	if more := len(users) - shown; more > 0 {
		users = append(users[:shown], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(users, ", ")
}

// addOpeners counts processes that have the GPU's device node open but no context or memory on it. A process that had the node
// open before a claim was prepared does not count, because it did not keep that claim from starting. A driver that was
// restarted since cannot know this, so it assumes it of processes that were already running by then; otherwise they would
// delay the next claim after each restart. While a claim observes the GPU, open nodes say nothing: its containers have them.
func (o *observation) addOpeners(open []holder.Process) {
	prepared, observed := o.prepared()
	if observed {
		return
	}
	present, now := map[opener]sighting{}, o.Clock()
	o.mu.Lock()
	was, known := o.openers[o.gpu]
	since, kept := o.keptSince[o.gpu]
	o.mu.Unlock()
	if !kept {
		since = now
	}
	kept = false
	for _, p := range open {
		text, counts := o.counts(p, false, undivided)
		if !counts {
			continue
		}
		key := opener{p.PID, p.Start}
		s, seen := was[key]
		if !seen {
			s = sighting{first: now, before: !known && 0 <= p.Start && p.Start <= prepared}
		}
		s.before = s.before || s.first <= prepared
		present[key] = s
		kept = kept || !s.before
		switch {
		case s.before:
		case now-since < openLimit:
			o.users[undivided] = append(o.users[undivided], text)
		default:
			o.opened = append(o.opened, text)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.openers == nil {
		o.openers, o.keptSince = map[string]map[opener]sighting{}, map[string]time.Duration{}
	}
	o.openers[o.gpu] = present
	if o.keptSince[o.gpu] = since; !kept {
		delete(o.keptSince, o.gpu)
	}
}

// prepared is when the last claim of the GPU was prepared. observed says that one observes it.
func (o *observation) prepared() (last time.Duration, observed bool) {
	for _, c := range o.claims {
		for _, d := range c.Devices {
			if d.PCIAddress == o.gpu {
				observed = observed || d.Admin
				last = max(last, c.Arrived)
			}
		}
	}
	return last, observed
}

// counts reports whether a process has no business where it is, and describes it. memory means that it has a context or
// memory there. Otherwise it has nothing but the GPU's node open, which processes on any part of the GPU have. A pod whose
// name is not known counts.
func (o *observation) counts(p holder.Process, memory bool, instanceID int) (text string, counts bool) {
	name := ""
	if p.Pod != "" && o.Finder.PodName != nil {
		name = o.Finder.PodName(p.Pod)
	}
	namespace, _, _ := strings.Cut(name, "/")
	everybody := memory && len(o.orphaned) > 0
	known := p.Pod != "" || memory && p.Ended && !o.hasServer()
	if !everybody && (!known || namespace != "" && o.Ignored(namespace)) {
		return "", false
	}
	explains := func(c *record.Record) bool {
		return namespace != "" && namespace == c.Claim.Namespace && o.allows(c, memory, instanceID)
	}
	return p.Text(name), !slices.ContainsFunc(o.claims, explains)
}

// allows reports whether processes of a claim may be in a place. Those of one that observes may be anywhere on the GPU, which
// is no reason to take them for others than those of an orphan.
func (o *observation) allows(c *record.Record, memory bool, instanceID int) bool {
	return slices.ContainsFunc(c.Devices, func(d record.Device) bool {
		switch {
		case d.PCIAddress != o.gpu:
			return false
		case !memory:
			return true
		case d.Admin:
			return len(o.orphaned) == 0
		}
		return instanceOf(&d) == instanceID
	})
}

// hasServer reports whether an MPS server is on the GPU. It may be what keeps the memory of a client that has ended, and it ends
// with its session, which must not wait for that.
func (o *observation) hasServer() bool {
	return slices.ContainsFunc(o.listed, func(p gpu.Process) bool { return slices.Contains(o.servers(), p.PID) })
}

// instanceOf is where processes of a claim with the device are.
func instanceOf(d *record.Device) int {
	switch {
	case d.Partition == nil:
		return undivided
	case d.Partition.Made == nil:
		return undivided - 1 // nowhere
	}
	return d.Partition.Made.InstanceID
}

// serversNow are the MPS servers. Where the supervisor does not answer, they count as users.
func (u *Users) serversNow(ctx context.Context) []int {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	servers, err := u.Servers(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Which processes are MPS servers is not known", "reason", err)
	}
	return servers
}
