// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/wait"
)

// Query is about the processes on one GPU that no claim explains.
type Query struct {
	PCIAddress string
	// Explained reports whether a pod may be on the GPU, because a claim of it has the GPU.
	Explained func(podUID string) bool
	// Observed means that a claim with admin access is on the GPU: its containers have the node open, and open nodes say
	// nothing then.
	Observed bool
	// Now is the time since the machine started.
	Now time.Duration
}

// Users are the processes in one place that no claim explains. Those outside of pods do not count, nor those of pods in
// namespaces that are ignored.
type Users struct {
	// Memory means that one has a context or memory, Open that one has the device node open, which counts for openLimit.
	Memory, Open bool
	// Text names them, and Overdue those whose open node does not count any more.
	Text, Overdue string
}

// UsersOf are the users of a GPU.
type UsersOf struct {
	Undivided Users
	// Instances are by the ID of the GPU instance. Only a context or memory counts there.
	Instances map[int]Users
	// Unknown is why something could not be looked at, or nil.
	Unknown error
}

const (
	// usersLimit bounds one observation. The driver's list of processes alone decides where the open files of all processes
	// could not be read within it.
	usersLimit = time.Second
	// openLimit is how long an open node keeps a GPU back.
	openLimit = 10 * time.Minute
)

// Ignored reports whether processes of pods in a namespace do not count.
type Ignored func(namespace string) bool

// UsersFinder finds the processes on GPUs that no claim explains. All methods may be called concurrently.
type UsersFinder struct {
	*Finder
	// List are the processes that the driver lists on a GPU.
	List func(ctx context.Context, pciAddress string) ([]gpu.Process, error)
	// Ignored is optional.
	Ignored Ignored

	mu sync.Mutex
	// before are those that had the node open when a claim was prepared, by claim.
	before map[string][]opener
	// since is when an open node was first seen, by the one who has it open.
	since map[opener]time.Duration
}

// opener is a process that has the node of a GPU open. Its start tells it from a later one with the same ID.
type opener struct {
	pciAddress string
	pid        int
	start      string
}

// Users finds them within a second, and within ctx.
func (f *UsersFinder) Users(ctx context.Context, q Query) UsersOf {
	ctx, cancel := context.WithTimeout(ctx, usersLimit)
	defer cancel()
	var found UsersOf
	listed, err := f.List(ctx, q.PCIAddress)
	if err != nil && !errors.Is(err, gpu.ErrNotSupported) {
		found.Unknown = fmt.Errorf("which processes use GPU %s is not known: %w", q.PCIAddress, err)
	}
	for _, p := range listed {
		one := f.proc().process(p.PID)
		if !f.counts(ctx, q, one) {
			continue
		}
		at := found.at(p.InstanceID)
		at.Memory = true
		at.add(f.describe(ctx, q, one))
		found.set(p.InstanceID, at)
	}
	if q.Observed {
		return found
	}
	open, err := f.openersOf(ctx, q.PCIAddress)
	if err != nil {
		found.Unknown = errors.Join(found.Unknown, fmt.Errorf("who has the node of GPU %s open is not known: %w", q.PCIAddress, err))
		return found
	}
	f.addOpeners(ctx, q, &found, open, listed)
	return found
}

// Remember notes who has the node of a GPU open when a claim is prepared: they do not count for as long as they live.
func (f *UsersFinder) Remember(claimUID, pciAddress string) error {
	ctx, cancel := context.WithTimeout(context.Background(), usersLimit)
	defer cancel()
	open, err := f.openersOf(ctx, pciAddress)
	if err != nil {
		return fmt.Errorf("who has the node of GPU %s open is not known: %w", pciAddress, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.before == nil {
		f.before = map[string][]opener{}
	}
	for _, p := range open {
		f.before[claimUID] = append(f.before[claimUID], opener{pciAddress, p.pid, f.proc().start(p.pid)})
	}
	return nil
}

// Forget drops what was remembered for a claim.
func (f *UsersFinder) Forget(claimUID string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.before, claimUID)
}

// addOpeners adds those that have the node open and neither a context nor memory.
func (f *UsersFinder) addOpeners(ctx context.Context, q Query, found *UsersOf, open []process, listed []gpu.Process) {
	var present []opener
	for _, p := range open {
		isListed := slices.ContainsFunc(listed, func(l gpu.Process) bool { return l.PID == p.pid })
		if isListed || !f.counts(ctx, q, p) {
			continue
		}
		one := opener{q.PCIAddress, p.pid, f.proc().start(p.pid)}
		age, known := f.age(one, q.Now)
		if known {
			continue
		}
		present = append(present, one)
		text := f.describe(ctx, q, p)
		if age >= openLimit {
			found.Undivided.Overdue = joined(found.Undivided.Overdue, text)
			continue
		}
		found.Undivided.Open = true
		found.Undivided.add(text)
	}
	f.retain(q.PCIAddress, present)
}

// age is for how long somebody was seen to have a node open. Those who had it before a claim did are known.
func (f *UsersFinder) age(o opener, now time.Duration) (age time.Duration, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, all := range f.before {
		if slices.Contains(all, o) {
			return 0, true
		}
	}
	if f.since == nil {
		f.since = map[opener]time.Duration{}
	}
	first, seen := f.since[o]
	if !seen {
		first = now
		f.since[o] = now
	}
	return now - first, false
}

// retain forgets those on a GPU that have let go of it.
func (f *UsersFinder) retain(pciAddress string, present []opener) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for o := range f.since {
		if o.pciAddress == pciAddress && !slices.Contains(present, o) {
			delete(f.since, o)
		}
	}
}

// openersOf lists the processes that have the node of a GPU open. One walk is shared by all who ask meanwhile.
func (f *UsersFinder) openersOf(ctx context.Context, pciAddress string) ([]process, error) {
	minor, err := f.Roots.Within(ctx).GPUMinor(pciAddress)
	if err != nil {
		return nil, err
	}
	node := "nvidia" + strconv.Itoa(minor)
	open, err := f.looks.Do("users of "+node, usersLimit, func() ([]process, error) {
		return f.proc().openers(func(name string) bool { return name == node })
	})
	if errors.Is(err, wait.ErrNoAnswer) {
		return nil, fmt.Errorf("the open files of the processes of this node could not be read within %s", usersLimit)
	}
	return open, err
}

// counts reports whether a process has no business on the GPU. A pod whose name is not known counts.
func (f *UsersFinder) counts(ctx context.Context, q Query, p process) bool {
	if p.pod == "" || q.Explained != nil && q.Explained(p.pod) {
		return false
	}
	if f.Ignored == nil || f.PodName == nil {
		return true
	}
	namespace, _, known := strings.Cut(f.PodName(ctx, q.PCIAddress, p.pod), "/")
	return !known || !f.Ignored(namespace)
}

func (f *UsersFinder) describe(ctx context.Context, q Query, p process) string {
	return p.text(func(uid string) string {
		if f.PodName == nil {
			return ""
		}
		return f.PodName(ctx, q.PCIAddress, uid)
	})
}

func (u *UsersOf) at(instanceID int) Users {
	if instanceID < 0 {
		return u.Undivided
	}
	return u.Instances[instanceID]
}

func (u *UsersOf) set(instanceID int, users Users) {
	if instanceID < 0 {
		u.Undivided = users
		return
	}
	if u.Instances == nil {
		u.Instances = map[int]Users{}
	}
	u.Instances[instanceID] = users
}

func (u *Users) add(text string) { u.Text = joined(u.Text, text) }

func joined(text, more string) string {
	if text == "" {
		return more
	}
	return text + ", " + more
}

// start is when a process was started, in clock ticks since the machine was, or "" where it has ended. The name of the
// program, which may contain anything, ends with the last bracket.
func (p procfs) start(pid int) string {
	const field = 22 - 3 // of proc(5), the third being the first after the name
	data, err := os.ReadFile(p.of(pid, "stat"))
	if err != nil {
		return ""
	}
	rest := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(rest) <= field {
		return ""
	}
	return rest[field]
}
