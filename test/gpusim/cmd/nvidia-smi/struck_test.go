// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/must"
)

// TestStruck: a fault of the machine strikes the program itself, on the GPUs that it is about.
func TestStruck(t *testing.T) {
	n := newNode(t, "h100x2", func(m *machine.Machine) {
		state.AddFault(m, machine.Fault{Function: state.SMI, GPU: 1, Times: 1})
		state.AddFault(m, machine.Fault{Function: state.SMI, GPU: 0, Hang: true, Effect: machine.Proceed})
	})
	if output, exit := n.smi("-L", "-i", "1"); exit != exitOther || !strings.Contains(output, "fault") {
		t.Errorf("exit code %d: %s", exit, output)
	}
	if output, exit := n.smi("-L", "-i", "1"); exit != exitOK || !strings.HasPrefix(output, "GPU 1") {
		t.Errorf("without a fault: exit code %d: %s", exit, output)
	}

	f := must.Get(state.Open(filepath.Join(n.root, state.RelativePath)))(t)
	defer f.Close()
	done := make(chan int, 1)
	go func() {
		_, exit := n.smi("-L", "-i", n.machine().GPUs[0].UUID)
		done <- exit
	}()
	for held := 0; held == 0; time.Sleep(time.Millisecond) {
		calls := must.Get(f.Held())(t)
		held = len(calls)
	}
	select {
	case exit := <-done:
		t.Fatalf("it has ended with %d although it is held", exit)
	default:
	}
	must.Do(t, f.LetGo(2, 1))
	expect.Equal(t, <-done, exitOK, "after it was let go: exit code")
}
