// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// faultCase is a fault that strikes an operation.
type faultCase struct {
	operation harness.Operation
	code      string
	fault     machine.Fault
}

func (c faultCase) String() string {
	if c.fault.Hang {
		return fmt.Sprintf("%s, call %d of %s is held", c.operation, c.fault.Skip+1, c.fault.Function)
	}
	var s strings.Builder
	fmt.Fprintf(&s, "%s, %s answers %s", c.operation, c.fault.Function, c.code)
	switch c.fault.Effect {
	case machine.FailAfter:
		s.WriteString(" after it did its work")
	case machine.Pretend:
		s.WriteString(" and does nothing")
	}
	if c.fault.Times == 1 {
		fmt.Fprintf(&s, ", once, at call %d", c.fault.Skip+1)
	}
	return s.String()
}

// isAnswer reports whether what the call returns is an answer like any other, if the
// wrong one, so that a later call is the first that fails.
func (c faultCase) isAnswer() bool {
	return c.fault.Effect == machine.Pretend || c.code == "NOT_FOUND" || c.code == "NOT_SUPPORTED"
}

// turns are those of a number of calls that are struck one by one. Where a
// function is asked for one thing after the other it is the first, the last and
// some between.
func turns(calls int) []int {
	var all []int
	for n := range calls {
		if n < 3 || n == calls/2 || n == calls-1 {
			all = append(all, n)
		}
	}
	return all
}

// ways are the cases of one function that is called a number of times.
func ways(o harness.Operation, function string, calls int, codes []code) []faultCase {
	effects := []machine.Effect{machine.Fail}
	if harness.IsChange(function) {
		effects = append(effects, machine.FailAfter)
	}
	var cases []faultCase
	for _, effect := range effects {
		for _, code := range codes {
			if code.name == "INSUFFICIENT_RESOURCES" && function == "nvmlDeviceCreateGpuInstanceWithPlacement" && effect == machine.FailAfter {
				continue // then the instance that is there is that of somebody who was faster, and it stays
			}
			f := machine.Fault{Function: function, Effect: effect, Code: code.value}
			// The bindings ask for processes with more room as long as they get this answer, without an end.
			if code.name != "INSUFFICIENT_SIZE" || !strings.Contains(function, "RunningProcesses") {
				cases = append(cases, faultCase{o, code.name, f})
			}
			for _, skip := range turns(calls) {
				f.Skip, f.Times = skip, 1
				cases = append(cases, faultCase{o, code.name, f})
			}
		}
	}
	if harness.IsChange(function) {
		f := machine.Fault{Function: function, Effect: machine.Pretend}
		cases = append(cases, faultCase{o, "SUCCESS", f})
		for _, skip := range turns(calls) {
			f.Skip, f.Times = skip, 1
			cases = append(cases, faultCase{o, "SUCCESS", f})
		}
	}
	return cases
}

func TestMain(m *testing.M) { harness.Main(m) }
