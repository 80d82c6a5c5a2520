// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
)

// usesMPS tells whether claims of the layout are clients of MPS.
func (l crashLayout) usesMPS() bool {
	return l.config == gpuMPS || l.config == migMPS || l.claims[0][0].kind == asMPS
}

// checkSharing fails unless a claim's containers share their devices as the layout
// has it, with limits that hold.
func (s *crashScene) checkSharing(t *testing.T, claim int, ids []string) error {
	t.Helper()
	for _, r := range s.layout.claims[claim] {
		slice := defaultSlice
		if s.layout.config == gpuShort {
			slice = shortSlice
		}
		if got := s.n.machine(t).GPUs[r.gpu].TimeSlice; got != slice {
			return fmt.Errorf("GPU %d has the time slice %d, want %d", r.gpu, got, slice)
		}
	}
	if !s.layout.usesMPS() {
		return nil
	}
	out, err := s.n.ask(t, s.n.container(t, ids...), "info")
	if err != nil {
		return err
	}
	for _, want := range append(s.limits(claim), "as a client of an MPS server") {
		if strings.Count(out, want) != len(ids) {
			return fmt.Errorf("want %d times %q, the program says %s", len(ids), want, out)
		}
	}
	if out, err = s.n.ask(t, unreachable(s.n.container(t, ids...)), "info"); err == nil {
		return fmt.Errorf("a program that does not reach the daemon is not refused: %s", out)
	}
	return nil
}

// limits are what a program says of those of a claim.
func (s *crashScene) limits(claim int) []string {
	switch s.layout.config {
	case gpuMPS:
		return []string{"limit 8192 MiB", "(50 %)"}
	case migMPS:
		return []string{"limit 4096 MiB", "(50 %)"}
	}
	r := s.layout.claims[claim][0]
	return []string{
		fmt.Sprintf("limit %d MiB", cmp.Or(r.memory, someMemory)>>20), fmt.Sprintf("(%d %%)", cmp.Or(r.percent, somePercent)),
	}
}
