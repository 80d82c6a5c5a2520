// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
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
	"github.com/partage-dev/partage/test/must"
)

// failing lets the calls fail that begin so.
func failing(call string, err error) func(int, string) *fault {
	return func(_ int, made string) *fault {
		if strings.HasPrefix(made, call) {
			return &fault{err: err}
		}
		return nil
	}
}

func TestEnsure(t *testing.T) {
	n := newNode(t)
	n.losses = 3
	status := must.Get(n.start(id, 40, first, second))(t)
	if diff := cmp.Diff(n.sessions[id], status); diff != "" || status.Losses != 3 {
		t.Errorf("-want +got:\n%s", diff)
	}
	calls := []string{
		"GPU-first to EXCLUSIVE_PROCESS", "GPU-second to EXCLUSIVE_PROCESS", "ensure " + id, "read GPU-first", "read GPU-second",
	}
	if diff := cmp.Diff(calls, n.calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	// Again, with a new limit.
	must.Get(n.manager().Ensure(t.Context(), session(id, 60, first, second), []Device{first, second}))(t)
	if got := n.sessions[id].Spec.ThreadPercentage; got != 60 {
		t.Errorf("limit is %d", got)
	}
	// A partition has no mode of its own that has to be set.
	n = newNode(t)
	n.modeless = []string{migUUID}
	if _, err := n.start(id, 40, partition); err != nil || len(n.sessions) != 1 {
		t.Errorf("partition: %v, %v", err, n.sessions)
	}
}

func TestEnsureFails(t *testing.T) {
	for name, test := range map[string]struct {
		before func(*node)
		is     error
		says   string
	}{
		"no supervisor":                     {func(n *node) { n.strike = failing("ensure", fmt.Errorf("dial: %w", mps.ErrUnavailable)) }, ErrNoSupervisor, "dial"},
		"a daemon that does not start":      {func(n *node) { n.strike = failing("ensure", errors.New("no such program")) }, nil, "no such program"},
		"a session that is not ready":       {func(n *node) { n.phase = mps.Faulted }, nil, "is faulted and not running: said by the fake"},
		"a session on other devices":        {func(n *node) { n.strike = failing("ensure", mps.ErrDiffers) }, mps.ErrDiffers, "cannot be changed"},
		"another process has the GPU":       {func(n *node) { n.strike = failing("ensure", errors.New("log: "+unavailable)) }, gpu.ErrInUse, unavailable},
		"a GPU whose mode cannot be read":   {func(n *node) { n.strike = failing("read GPU-first", gpu.ErrLost) }, gpu.ErrLost, first.String()},
		"a GPU whose mode somebody has set": {func(n *node) { n.then, n.open = setsMode(n, gpu.ComputeProhibited), true }, nil, "somebody has set the compute mode to PROHIBITED"},
	} {
		n := newNode(t)
		test.before(n)
		_, err := n.start(id, 40, first)
		if err == nil || test.is != nil && !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// setsMode is somebody setting a mode while a session starts.
func setsMode(n *node, mode gpu.ComputeMode) func(string) {
	return func(call string) {
		if strings.HasPrefix(call, "ensure") {
			n.modes[first.UUID] = mode
		}
	}
}

// The mode may go back while the server starts: a driver that nothing holds open forgets it.
func TestModeGoesBack(t *testing.T) {
	n := newNode(t)
	n.open = true
	n.then = setsMode(n, gpu.ComputeDefault)
	if _, err := n.start(id, 40, first); err != nil || n.modes[first.UUID] != gpu.ComputeExclusiveProcess {
		t.Errorf("%v, mode is %s", err, n.modes[first.UUID])
	}
}

func TestSetExclusive(t *testing.T) {
	// A call that hangs arrives as such, because locks are kept until it returns.
	hung := &gpu.PendingError{Call: "nvmlDeviceSetComputeMode", PCIAddress: firstPCI, Since: time.Now(), Done: make(chan struct{})}
	for name, test := range map[string]struct {
		before    func(*node)
		exclusive bool
		is        error
	}{
		"on":                 {exclusive: true},
		"back":               {before: func(n *node) { n.modes[first.UUID] = gpu.ComputeExclusiveProcess }},
		"gone":               {before: func(n *node) { delete(n.modes, first.UUID) }, exclusive: true, is: gpu.ErrNotFound},
		"gone, back":         {before: func(n *node) { delete(n.modes, first.UUID) }},
		"no mode":            {before: func(n *node) { n.modeless = []string{first.UUID} }, exclusive: true, is: gpu.ErrNotSupported},
		"driver is unloaded": {before: func(n *node) { n.strike = failing("GPU-first", gpu.ErrDriverNotLoaded) }, is: gpu.ErrDriverNotLoaded},
		"hangs":              {before: func(n *node) { n.strike = failing("GPU-first", hung) }, is: gpu.ErrHung},
	} {
		n := newNode(t)
		if test.before != nil {
			test.before(n)
		}
		err := n.manager().SetExclusive(t.Context(), first, test.exclusive)
		if !errors.Is(err, test.is) {
			t.Errorf("%s: got %v, want %v", name, err, test.is)
		}
		if err != nil && !strings.Contains(err.Error(), firstPCI) {
			t.Errorf("%s: %v does not name the GPU", name, err)
		}
		mode, err := n.manager().Mode(t.Context(), first)
		if want := map[bool]gpu.ComputeMode{false: gpu.ComputeDefault, true: gpu.ComputeExclusiveProcess}[test.exclusive]; test.is == nil && err == nil && mode != want {
			t.Errorf("%s: the mode is %s", name, mode)
		}
	}
}

func TestEnd(t *testing.T) {
	for name, test := range map[string]struct {
		before func(*node)
		is     error
		says   string
		stays  bool
	}{
		"it runs":         {},
		"none":            {before: func(n *node) { delete(n.sessions, id) }},
		"no supervisor":   {func(n *node) { n.strike = failing("stop", fmt.Errorf("dial: %w", mps.ErrUnavailable)) }, ErrNoSupervisor, "dial", true},
		"it does not end": {func(n *node) { n.strike = failing("stop", errors.New("busy")) }, nil, "busy", true},
	} {
		n := newNode(t)
		must.Get(n.start(id, 40, first))(t)
		if test.before != nil {
			test.before(n)
		}
		err := n.manager().End(t.Context(), id)
		if (err == nil) != (test.says == "") || test.is != nil && !errors.Is(err, test.is) || err != nil && !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: got %v", name, err)
		}
		if _, runs := n.sessions[id]; runs != test.stays {
			t.Errorf("%s: the session runs: %t", name, runs)
		}
	}
}

func TestSessions(t *testing.T) {
	n := newNode(t)
	m := n.manager()
	if got, err := m.Sessions(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	const other = "gpu-0000-2c-00-0"
	for id, device := range map[string]Device{id: first, other: second} {
		must.Get(n.start(id, 40, device))(t)
	}
	got, err := m.Sessions(t.Context())
	if diff := cmp.Diff(n.sessions, got, cmpopts.EquateEmpty()); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
	if ids := slices.Sorted(maps.Keys(got)); !slices.Equal(ids, []string{id, other}) {
		t.Errorf("ids %v", ids)
	}
	n.strike = func(int, string) *fault { return &fault{err: mps.ErrUnavailable} }
	if got, err := m.Sessions(t.Context()); !errors.Is(err, ErrNoSupervisor) || !errors.Is(err, mps.ErrUnavailable) || got != nil {
		t.Errorf("%v, %v", got, err)
	}
}
