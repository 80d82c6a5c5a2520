// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

var (
	errStruck = fmt.Errorf("struck: %w", gpu.ErrUnknown)
	// strikes are the ways in which a call fails.
	strikes = map[string]fault{
		"without effect": {err: errStruck},
		"with effect":    {err: errStruck, effect: true},
		"no answer":      {err: fmt.Errorf("struck: %w", mps.ErrUnavailable), effect: true},
	}
	// situations are what is there before a session is started on both GPUs.
	situations = map[string]func(*node){
		"nothing": func(*node) {},
		"the session": func(n *node) {
			if _, err := n.manager().Start(n.t.Context(), session(7, first, second), false); err != nil {
				n.t.Fatal(err)
			}
		},
	}
)

// outcome is all that matters of a node afterwards.
type outcome struct {
	Occupied []string
	Limit    int
}

func (n *node) outcome() outcome { return outcome{n.occupied(), n.sessions[id].Spec.ThreadPercentage} }

// atLeast fails if an enumeration has fewer cases than it had when it was written.
func atLeast(t *testing.T, cases, least int) {
	t.Helper()
	if cases < least {
		t.Errorf("%d cases ran, want at least %d", cases, least)
	}
}

// numbered lets the calls with these numbers fail.
func numbered(f fault, numbers ...int) func(int, string) *fault {
	return func(n int, _ string) *fault {
		for _, number := range numbers {
			if n == number {
				return &f
			}
		}
		return nil
	}
}

// Whichever of its calls fails, Start does all or nothing.
func TestStartWithOneFault(t *testing.T) {
	cases := 0
	for situation, prepare := range situations {
		for way, strike := range strikes {
			for at := 1; ; at++ {
				n := newNode(t)
				prepare(n)
				before := n.outcome()
				n.calls, n.strike = nil, numbered(strike, at)
				_, err := n.manager().Start(t.Context(), session(40, first, second), false)
				if len(n.calls) < at {
					break
				}
				cases++
				name := fmt.Sprintf("%s, call %d (%s) fails %s", situation, at, n.calls[at-1], way)
				if !errors.Is(err, strike.err) {
					t.Errorf("%s: got error %v", name, err)
				}
				if diff := cmp.Diff(before, n.outcome()); diff != "" {
					t.Errorf("%s, left (-want +got):\n%s", name, diff)
				}
			}
		}
	}
	atLeast(t, cases, 42)
}

// A supervisor that did not answer in time may carry out the change when Start has
// already looked what became of it.
func TestLateChange(t *testing.T) {
	n := newNode(t)
	situations["the session"](n)
	late := false
	n.strike = func(_ int, call string) *fault {
		if strings.HasPrefix(call, "ensure") && !late {
			late = true
			return &fault{err: fmt.Errorf("struck: %w", mps.ErrUnavailable)}
		}
		return nil
	}
	n.then = func(call string) {
		if late && call == "list" {
			status := n.sessions[id]
			status.Spec = session(40, first, second).spec()
			n.sessions[id] = status
		}
	}
	before := n.outcome()
	if _, err := n.manager().Start(t.Context(), session(40, first, second), false); !errors.Is(err, ErrNoSupervisor) {
		t.Errorf("got %v", err)
	}
	if diff := cmp.Diff(before, n.outcome()); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// When undoing fails as well, no session is open to others, and Stop leaves
// nothing.
func TestStartWithTwoFaults(t *testing.T) {
	cases := 0
	for situation, prepare := range situations {
		for way, strike := range strikes {
			for at := 1; ; at++ {
				var over bool
				for then := at + 1; ; then++ {
					n := newNode(t)
					prepare(n)
					n.calls, n.strike = nil, numbered(strike, at, then)
					_, err := n.manager().Start(t.Context(), session(40, first, second), false)
					if len(n.calls) < then {
						over = len(n.calls) < at
						break
					}
					cases++
					name := fmt.Sprintf("%s, calls %d (%s) and %d (%s) fail %s", situation, at, n.calls[at-1], then, n.calls[then-1], way)
					if err == nil {
						t.Errorf("%s: no error", name)
					}
					n.look(name)
					n.strike = nil
					if err := n.manager().Stop(t.Context(), session(40, first, second)); err != nil {
						t.Errorf("%s: stop: %v", name, err)
					}
					if diff := cmp.Diff(outcome{}, n.outcome()); diff != "" {
						t.Errorf("%s, left (-want +got):\n%s", name, diff)
					}
				}
				if over {
					break
				}
			}
		}
	}
	atLeast(t, cases, 84)
}

// A process that is killed at any call leaves what the next one finishes or takes
// back.
func TestKilledDuringStart(t *testing.T) {
	killed := errors.New("killed")
	cases := 0
	for situation, prepare := range situations {
		for _, effect := range []bool{false, true} {
			for at := 1; ; at++ {
				n := newNode(t)
				prepare(n)
				n.calls = nil
				n.strike = func(call int, _ string) *fault {
					if call < at {
						return nil
					}
					return &fault{err: killed, effect: effect && call == at}
				}
				s := session(40, first, second)
				_, err := n.manager().Start(t.Context(), s, false)
				if err == nil {
					break
				}
				cases++
				name := fmt.Sprintf("%s, killed at call %d (effect: %t)", situation, at, effect)
				n.strike = nil
				if _, err := n.manager().Start(t.Context(), s, true); err != nil {
					t.Errorf("%s: start again: %v", name, err)
				}
				if diff := cmp.Diff(outcome{[]string{first.UUID, second.UUID}, 40}, n.outcome()); diff != "" {
					t.Errorf("%s, started again (-want +got):\n%s", name, diff)
				}
				if err := n.manager().Stop(t.Context(), s); err != nil {
					t.Errorf("%s: stop: %v", name, err)
				}
				if diff := cmp.Diff(outcome{}, n.outcome()); diff != "" {
					t.Errorf("%s, stopped (-want +got):\n%s", name, diff)
				}
			}
		}
	}
	atLeast(t, cases, 28)
}

// Whichever calls fail, Stop says so, and a second one finishes it.
func TestStopWithFaults(t *testing.T) {
	cases := 0
	for way, strike := range strikes {
		for at := 1; ; at++ {
			n := newNode(t)
			situations["the session"](n)
			n.calls, n.strike = nil, numbered(strike, at)
			err := n.manager().Stop(t.Context(), session(7, first, second))
			if len(n.calls) < at {
				break
			}
			cases++
			name := fmt.Sprintf("call %d (%s) fails %s", at, n.calls[at-1], way)
			if !errors.Is(err, strike.err) {
				t.Errorf("%s: got error %v", name, err)
			}
			n.strike = nil
			if err := n.manager().Stop(t.Context(), session(7, first, second)); err != nil {
				t.Errorf("%s: again: %v", name, err)
			}
			if diff := cmp.Diff(outcome{}, n.outcome()); diff != "" {
				t.Errorf("%s, left (-want +got):\n%s", name, diff)
			}
		}
	}
	atLeast(t, cases, 15)
}
