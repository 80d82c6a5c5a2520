// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
)

func TestStart(t *testing.T) {
	n := newNode(t)
	n.losses = 3
	s := session(40, first, second)
	s.MultiUser = true
	live, err := n.manager().Start(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	want := Live{PipeDir: "/run/mps/" + id + "/pipe", ShmDir: "/run/mps/" + id + "/shm", Losses: 3}
	if diff := cmp.Diff(want, live); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	spec := mps.Spec{
		ID: id, Devices: []string{first.UUID, second.UUID}, ThreadPercentage: 40, MultiUser: true,
		Memory: map[string]int64{first.UUID: 40 << 30, second.UUID: 40 << 30},
	}
	if diff := cmp.Diff(spec, n.sessions[id].Spec); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	calls := []string{
		"list", "read GPU-first", "GPU-first to EXCLUSIVE_PROCESS", "read GPU-second", "GPU-second to EXCLUSIVE_PROCESS",
		"ensure " + id, "read GPU-first", "read GPU-second",
	}
	if diff := cmp.Diff(calls, n.calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	// Again, with a new limit: the modes are those of this session.
	if _, err := n.manager().Start(t.Context(), session(60, first, second), false); err != nil {
		t.Fatal(err)
	}
	if got := n.sessions[id].Spec.ThreadPercentage; got != 60 {
		t.Errorf("limit is %d", got)
	}
}

// What is there when a session is started, and what is there afterwards.
func TestStartMeets(t *testing.T) {
	const exclusive, prohibited, open = gpu.ComputeExclusiveProcess, gpu.ComputeProhibited, gpu.ComputeDefault
	lost := &gpu.Error{Call: "nvmlDeviceGetComputeMode", PCIAddress: secondPCI, Text: "GPU is lost", Err: gpu.ErrLost}
	running := func(devices ...string) func(*node) {
		return func(n *node) {
			n.sessions[id] = mps.Status{Spec: mps.Spec{ID: id, Devices: devices, ThreadPercentage: 7}, Phase: mps.Running}
			for _, uuid := range devices {
				n.modes[uuid] = exclusive
			}
		}
	}
	reset := func(n *node) {
		running(first.UUID)(n)
		n.open = true // at first
		n.modes[first.UUID] = open
	}
	failing := func(call string, err error) func(*node) {
		return func(n *node) {
			n.strike = func(_ int, made string) *fault {
				if strings.HasPrefix(made, call) {
					return &fault{err: err}
				}
				return nil
			}
		}
	}
	tests := map[string]struct {
		devices   []Device
		adopt     bool
		before    func(*node)
		is        error
		says      []string // empty: no error
		modes     map[string]gpu.ComputeMode
		limit     int  // of the session that runs afterwards; 0: none runs
		untouched bool // nothing was changed, not even to and fro
	}{
		"nothing":   {devices: []Device{first}, modes: map[string]gpu.ComputeMode{first.UUID: exclusive}, limit: 40},
		"partition": {devices: []Device{partition}, modes: map[string]gpu.ComputeMode{migUUID: exclusive}, limit: 40},
		"a mode that may be this driver's": {
			devices: []Device{first}, adopt: true, before: func(n *node) { n.modes[first.UUID] = exclusive },
			modes: map[string]gpu.ComputeMode{first.UUID: exclusive}, limit: 40,
		},
		"the session": {devices: []Device{first}, before: running(first.UUID), modes: map[string]gpu.ComputeMode{first.UUID: exclusive}, limit: 40},
		"the session, whose mode somebody set back": {
			devices: []Device{first}, before: reset, modes: map[string]gpu.ComputeMode{first.UUID: exclusive}, limit: 40,
		},
		"somebody else's mode": {
			devices: []Device{second, first}, before: func(n *node) { n.modes[first.UUID] = exclusive },
			says:  []string{firstPCI, first.UUID, "is EXCLUSIVE_PROCESS and was not set by this driver", "nvidia-smi -i GPU-first -c DEFAULT"},
			modes: map[string]gpu.ComputeMode{first.UUID: exclusive, second.UUID: open},
		},
		"somebody else's mode, while the session runs on another GPU": {
			devices: []Device{first, second}, before: func(n *node) {
				running(first.UUID)(n)
				n.modes[second.UUID] = exclusive
			},
			says:  []string{second.UUID, "was not set by this driver"},
			modes: map[string]gpu.ComputeMode{first.UUID: exclusive, second.UUID: exclusive}, limit: 7, untouched: true,
		},
		"a mode that is nobody's to adopt": {
			devices: []Device{first}, adopt: true, before: func(n *node) { n.modes[first.UUID] = prohibited },
			says: []string{"is PROHIBITED"}, modes: map[string]gpu.ComputeMode{first.UUID: prohibited}, untouched: true,
		},
		"partition without a mode": {
			devices: []Device{partition}, before: func(n *node) { n.modeless = []string{migUUID} },
			modes: map[string]gpu.ComputeMode{migUUID: open}, limit: 40,
		},
		"partition whose mode can only be read": {
			devices: []Device{partition},
			before: func(n *node) {
				failing(migUUID+" to", &gpu.Error{Text: "Not Supported", Err: gpu.ErrNotSupported})(n)
				n.open = true
			},
			modes: map[string]gpu.ComputeMode{migUUID: open}, limit: 40,
		},
		"GPU without a mode": {
			devices: []Device{first, second}, before: func(n *node) { n.modeless = []string{second.UUID} },
			is: gpu.ErrNotSupported, says: []string{secondPCI},
			modes: map[string]gpu.ComputeMode{first.UUID: open, second.UUID: open},
		},
		"partition that is gone": {
			devices: []Device{partition}, before: func(n *node) { delete(n.modes, migUUID) },
			is: gpu.ErrNotFound, says: []string{migUUID, firstPCI}, untouched: true,
		},
		"lost GPU": {
			devices: []Device{first, second}, before: failing("read GPU-second", lost),
			is: gpu.ErrLost, says: []string{secondPCI, "GPU is lost"},
			modes: map[string]gpu.ComputeMode{first.UUID: open, second.UUID: open},
		},
		"no supervisor": {
			devices: []Device{first}, before: failing("list", fmt.Errorf("dial: %w", mps.ErrUnavailable)),
			is: ErrNoSupervisor, says: []string{"dial"}, modes: map[string]gpu.ComputeMode{first.UUID: open}, untouched: true,
		},
		"a daemon that does not start": {
			devices: []Device{first, second}, before: failing("ensure", errors.New("no such program")),
			says: []string{"no such program"}, modes: map[string]gpu.ComputeMode{first.UUID: open, second.UUID: open},
		},
		"a session that is not ready": {
			devices: []Device{first}, before: func(n *node) { n.phase = mps.Faulted },
			says: []string{id, "faulted", "said by the fake"}, modes: map[string]gpu.ComputeMode{first.UUID: open},
		},
		"a session that cannot have these limits": {
			devices: []Device{first}, before: func(n *node) {
				running(first.UUID)(n)
				n.strike = func(_ int, made string) *fault {
					if n.sessions[id].Spec.ThreadPercentage == 7 && strings.HasPrefix(made, "ensure") {
						return &fault{err: errors.New("too small"), effect: true}
					}
					return nil
				}
			},
			says: []string{"too small"}, modes: map[string]gpu.ComputeMode{first.UUID: exclusive}, limit: 7,
		},
		"a session that was about to go": {
			devices: []Device{first, second}, before: func(n *node) {
				running(first.UUID, second.UUID)(n)
				n.strike = func(_ int, made string) *fault {
					if strings.HasPrefix(made, "ensure") {
						delete(n.sessions, id)
						return &fault{err: errors.New("no such program")}
					}
					return nil
				}
			},
			says: []string{"no such program"}, modes: map[string]gpu.ComputeMode{first.UUID: open, second.UUID: open},
		},
		"what a start that was given up has left, and a daemon that does not start": {
			devices: []Device{first}, before: func(n *node) {
				n.sessions[id] = mps.Status{Spec: session(40, first).spec(), Phase: mps.Starting}
				n.modes[first.UUID] = exclusive
				failing("ensure", errors.New("no such program"))(n)
			},
			says: []string{"no such program"}, modes: map[string]gpu.ComputeMode{first.UUID: open},
		},
		"a mode that may be this driver's, and a daemon that does not start": {
			devices: []Device{first}, adopt: true, before: func(n *node) {
				n.modes[first.UUID] = exclusive
				failing("ensure", errors.New("no such program"))(n)
			},
			says: []string{"no such program"}, modes: map[string]gpu.ComputeMode{first.UUID: open},
		},
		"a session on other devices": {
			devices: []Device{first, second}, before: func(n *node) {
				running(first.UUID)(n)
				failing("ensure", mps.ErrDiffers)(n)
			},
			is: mps.ErrDiffers, says: []string{"cannot be changed"}, limit: 7,
			modes: map[string]gpu.ComputeMode{first.UUID: exclusive, second.UUID: open},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if test.before != nil {
				test.before(n)
			}
			_, err := n.manager().Start(t.Context(), session(40, test.devices...), test.adopt)
			if (err == nil) != (len(test.says) == 0) || (test.is != nil && !errors.Is(err, test.is)) {
				t.Errorf("got error %v, want one of %v", err, test.is)
			}
			for _, says := range test.says {
				if err != nil && !strings.Contains(err.Error(), says) {
					t.Errorf("%q does not say %q", err, says)
				}
			}
			for uuid, want := range test.modes {
				if n.modes[uuid] != want {
					t.Errorf("mode of %s is %s, want %s", uuid, n.modes[uuid], want)
				}
			}
			if got := n.sessions[id].Spec.ThreadPercentage; got != test.limit {
				t.Errorf("limit of the session afterwards: %d, want %d", got, test.limit)
			}
			if changes := changes(n.calls); test.untouched && len(changes) > 0 {
				t.Errorf("changes: %v", changes)
			}
		})
	}
}

// A supervisor that knows no priorities would leave them out in silence.
func TestPriorityIsKnown(t *testing.T) {
	for name, test := range map[string]struct {
		asked policy.ClientPriority
		older bool
		says  string
	}{
		"asked for":     {asked: policy.PriorityBelowNormal},
		"not asked for": {older: true},
		"not known":     {asked: policy.PriorityNormal, older: true, says: "an earlier version, which cannot set the client priority Normal"},
	} {
		n := newNode(t)
		n.noPriorities = test.older
		s := session(40, first)
		s.ClientPriority = test.asked
		_, err := n.manager().Start(t.Context(), s, false)
		if (err == nil) != (test.says == "") || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: got %v", name, err)
		}
		status, runs := n.sessions[id]
		if runs != (err == nil) || runs && status.Spec.ClientPriority != mps.ClientPriority(test.asked) {
			t.Errorf("%s: the session is %+v", name, status)
		}
	}
}

// changes are the calls that do more than look.
func changes(calls []string) []string {
	return slices.DeleteFunc(slices.Clone(calls), func(call string) bool {
		return call == "list" || strings.HasPrefix(call, "read ")
	})
}

// The mode may go back while the server starts: a driver that nothing holds open
// forgets it.
func TestModeGoesBack(t *testing.T) {
	for mode, says := range map[gpu.ComputeMode]string{gpu.ComputeDefault: "", gpu.ComputeProhibited: "somebody set the compute mode to PROHIBITED"} {
		n := newNode(t)
		n.open = true
		n.then = func(call string) {
			if strings.HasPrefix(call, "ensure") {
				n.modes[first.UUID] = mode
			}
		}
		_, err := n.manager().Start(t.Context(), session(40, first), false)
		if says == "" {
			if err != nil || n.modes[first.UUID] != gpu.ComputeExclusiveProcess {
				t.Errorf("%v, mode is %s", err, n.modes[first.UUID])
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), says) || len(n.sessions) != 0 || n.modes[first.UUID] != mode {
			t.Errorf("%v, mode is %s, sessions %v", err, n.modes[first.UUID], n.sessions)
		}
	}
}

// A caller whose time is up while the session starts leaves nothing either.
func TestStartIsUndoneAfterTheCallersTime(t *testing.T) {
	n := newNode(t)
	ctx, cancel := context.WithCancel(t.Context())
	n.strike = func(_ int, call string) *fault {
		if strings.HasPrefix(call, "ensure") {
			cancel()
			return &fault{err: context.Canceled, effect: true}
		}
		return nil
	}
	if _, err := n.manager().Start(ctx, session(40, first, second), false); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if len(n.sessions) != 0 || len(n.occupied()) != 0 {
		t.Errorf("left: %v, %v", n.sessions, n.occupied())
	}
}

// A call that hangs arrives as such, because locks are kept until it returns.
func TestHungCallsPassThrough(t *testing.T) {
	hung := &gpu.PendingError{Call: "nvmlDeviceSetComputeMode", PCIAddress: secondPCI, Since: time.Now(), Done: make(chan struct{})}
	for _, struck := range []string{"read GPU-second", "GPU-second to EXCLUSIVE_PROCESS"} {
		n := newNode(t)
		out := false
		n.strike = func(_ int, call string) *fault {
			// As with NVML, the GPU answers nothing from then on.
			if out = out || call == struck; out && strings.Contains(call, "GPU-second") {
				return &fault{err: fmt.Errorf("not attempted: %w", hung)}
			}
			return nil
		}
		_, err := n.manager().Start(t.Context(), session(40, first, second), false)
		var got *gpu.PendingError
		if !errors.As(err, &got) || got != hung {
			t.Errorf("%s: %v", struck, err)
		}
		if diff := cmp.Diff([]string(nil), n.occupied()); diff != "" || len(n.sessions) != 0 {
			t.Errorf("%s: left %v, %v", struck, n.occupied(), n.sessions)
		}
	}
	n := newNode(t)
	if _, err := n.manager().Start(t.Context(), session(40, first, second), false); err != nil {
		t.Fatal(err)
	}
	n.strike = func(_ int, call string) *fault {
		if strings.Contains(call, "GPU-second") {
			return &fault{err: hung}
		}
		return nil
	}
	var got *gpu.PendingError
	if err := n.manager().Stop(t.Context(), session(40, first, second)); !errors.As(err, &got) || got != hung {
		t.Errorf("stop: %v", err)
	}
	if diff := cmp.Diff([]string{second.UUID}, n.occupied()); diff != "" {
		t.Errorf("stop left (-want +got):\n%s", diff)
	}
}

func TestSessions(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	if got, err := m.Sessions(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := m.Start(t.Context(), session(40, first), false); err != nil {
		t.Fatal(err)
	}
	other := session(50, second)
	other.ID = "gpu-0000-2c-00-0"
	if _, err := m.Start(t.Context(), other, false); err != nil {
		t.Fatal(err)
	}
	got, err := m.Sessions(t.Context())
	if diff := cmp.Diff(n.sessions, got, cmpopts.EquateEmpty()); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
	if ids := slices.Sorted(maps.Keys(got)); !slices.Equal(ids, []string{id, other.ID}) {
		t.Errorf("ids %v", ids)
	}
	n.strike = func(int, string) *fault { return &fault{err: mps.ErrUnavailable} }
	if got, err := m.Sessions(t.Context()); !errors.Is(err, ErrNoSupervisor) || !errors.Is(err, mps.ErrUnavailable) || got != nil {
		t.Errorf("%v, %v", got, err)
	}
}
