// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
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

	f, err := state.Open(filepath.Join(n.root, state.RelativePath))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	done := make(chan int, 1)
	go func() {
		_, exit := n.smi("-L", "-i", n.machine().GPUs[0].UUID)
		done <- exit
	}()
	for held := 0; held == 0; time.Sleep(time.Millisecond) {
		calls, err := f.Held()
		if err != nil {
			t.Fatal(err)
		}
		held = len(calls)
	}
	select {
	case exit := <-done:
		t.Fatalf("it has ended with %d although it is held", exit)
	default:
	}
	if err := f.LetGo(2, 1); err != nil {
		t.Fatal(err)
	}
	if exit := <-done; exit != exitOK {
		t.Errorf("after it was let go: exit code %d", exit)
	}
}
