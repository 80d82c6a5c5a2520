// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package holder

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/wait"
)

// Query is about the processes on one GPU that no claim explains.
type Query struct {
	PCIAddress string
	// Explained reports whether a process may be on the GPU. Optional.
	Explained func(ctx context.Context, s Suspect) bool
	// Observed means that a claim with admin access is on the GPU: its containers have the node open, and open nodes say
	// nothing then.
	Observed bool
	// Prepared is when a claim on the GPU was last prepared, or zero, and Now the time, both since the machine started.
	Prepared, Now time.Duration
}

// Suspect is a process of a pod whose namespace is not ignored.
type Suspect struct {
	PID int
	// Namespace is "" where it is not known.
	PodUID, Namespace string
	// Memory means that the process has a context or memory on the GPU instance, or on the undivided GPU if InstanceID is
	// negative. Otherwise it has nothing but the GPU's device node open, which processes on any part of the GPU have.
	Memory     bool
	InstanceID int
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
	// Unlisted is why the driver's list of processes is not known, and Unopened why open nodes were not looked at, or nil.
	Unlisted, Unopened error
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

	openers openers
}

// Users finds them within a second, and within ctx.
func (f *UsersFinder) Users(ctx context.Context, q Query) UsersOf {
	deadline := time.Now().Add(usersLimit)
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	found := collected{}
	var unlisted, unopened error
	listed, err := f.List(ctx, q.PCIAddress)
	if err != nil && !errors.Is(err, gpu.ErrNotSupported) {
		unlisted = fmt.Errorf("which processes use GPU %s is not known: %w", q.PCIAddress, err)
	}
	for _, p := range listed {
		one := f.proc().process(p.PID)
		if text, counts := f.suspect(ctx, q, one, Suspect{PID: p.PID, Memory: true, InstanceID: p.InstanceID}); counts {
			found.at(p.InstanceID).memory(text)
		}
	}
	if !q.Observed {
		open, err := f.openersOf(ctx, q.PCIAddress, time.Until(deadline))
		if err != nil {
			unopened = fmt.Errorf("who has the node of GPU %s open is not known: %w", q.PCIAddress, err)
		} else {
			f.addOpeners(ctx, q, found, open, listed)
		}
	}
	users := found.users()
	users.Unlisted, users.Unopened = unlisted, unopened
	return users
}

// addOpeners adds those that have the node open and neither a context nor memory.
func (f *UsersFinder) addOpeners(ctx context.Context, q Query, found collected, open []process, listed []gpu.Process) {
	seen := map[opener]string{}
	for _, p := range open {
		isListed := slices.ContainsFunc(listed, func(l gpu.Process) bool { return l.PID == p.pid })
		if isListed {
			continue
		}
		if text, counts := f.suspect(ctx, q, p, Suspect{PID: p.pid, InstanceID: -1}); counts {
			seen[opener{p.pid, f.proc().start(p.pid)}] = text
		}
	}
	ages := f.openers.note(q, seen)
	for _, p := range sorted(seen) {
		switch age := ages[p]; {
		case age.before:
		case q.Now-age.first >= openLimit:
			found.at(-1).overdue = append(found.at(-1).overdue, seen[p])
		default:
			found.at(-1).open(seen[p])
		}
	}
}

// openersOf lists the processes that have the node of a GPU open. One walk is shared by all who ask meanwhile.
func (f *UsersFinder) openersOf(ctx context.Context, pciAddress string, limit time.Duration) ([]process, error) {
	minor, err := f.Roots.Within(ctx).GPUMinor(pciAddress)
	if err != nil {
		return nil, err
	}
	node := "nvidia" + strconv.Itoa(minor)
	open, err := f.looks.Do("users of "+node, limit, func() ([]process, error) {
		return f.proc().openers(func(name string) bool { return name == node })
	})
	if errors.Is(err, wait.ErrNoAnswer) {
		return nil, fmt.Errorf("the open files of the processes of this node could not be read within %s", usersLimit)
	}
	return open, err
}

// suspect reports whether a process has no business on the GPU, and describes it. A pod whose name is not known counts.
func (f *UsersFinder) suspect(ctx context.Context, q Query, p process, s Suspect) (text string, counts bool) {
	if p.pod == "" {
		return "", false
	}
	name := ""
	if f.PodName != nil {
		name = f.PodName(ctx, q.PCIAddress, p.pod)
	}
	s.PodUID = p.pod
	s.Namespace, _, _ = strings.Cut(name, "/")
	if s.Namespace != "" && f.Ignored != nil && f.Ignored(s.Namespace) {
		return "", false
	}
	if q.Explained != nil && q.Explained(ctx, s) {
		return "", false
	}
	return p.text(func(string) string { return name }), true
}

// collected are the users that were found, by GPU instance; those of the undivided GPU are at -1.
type collected map[int]*collection

type collection struct {
	Users
	texts, overdue []string
}

func (c collected) at(instanceID int) *collection {
	place := max(instanceID, -1)
	if c[place] == nil {
		c[place] = &collection{}
	}
	return c[place]
}

func (c *collection) memory(text string) {
	c.Memory = true
	c.texts = append(c.texts, text)
}

func (c *collection) open(text string) {
	c.Open = true
	c.texts = append(c.texts, text)
}

func (c collected) users() UsersOf {
	var users UsersOf
	for place, one := range c {
		one.Text, one.Overdue = list(one.texts), list(one.overdue)
		if place < 0 {
			users.Undivided = one.Users
			continue
		}
		if users.Instances == nil {
			users.Instances = map[int]Users{}
		}
		users.Instances[place] = one.Users
	}
	return users
}

// list joins texts, which may be many.
func list(texts []string) string {
	if more := len(texts) - shown; more > 0 {
		texts = append(slices.Clone(texts[:shown]), fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, ", ")
}
