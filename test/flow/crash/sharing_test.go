// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// usesMPS reports whether claims of the layout are clients of MPS.
func (l crashLayout) usesMPS() bool {
	return l.config == harness.GPUWithMPS || l.config == harness.PartitionWithMPS || l.claims[0][0].Kind == harness.MPS
}

// checkSharing fails unless a claim's containers share their devices as the layout
// has it, with limits that hold.
func (s *crashNode) checkSharing(t *testing.T, claim int, ids []string) error {
	t.Helper()
	for _, r := range s.layout.claims[claim] {
		slice := harness.DefaultSlice
		if s.layout.config == harness.GPUWithShortSlice {
			slice = harness.ShortSlice
		}
		if got := s.n.Machine(t).GPUs[r.GPU].TimeSlice; got != slice {
			return fmt.Errorf("GPU %d has the time slice %d, want %d", r.GPU, got, slice)
		}
	}
	if !s.layout.usesMPS() {
		return nil
	}
	out, err := s.n.RunProgram(t, s.n.Container(t, ids...), "info")
	if err != nil {
		return err
	}
	for _, want := range append(s.limits(claim), "as a client of an MPS server") {
		if strings.Count(out, want) != len(ids) {
			return fmt.Errorf("want %d times %q, the program says %s", len(ids), want, out)
		}
	}
	if s.layout.claims[claim][0].Profile != "" {
		return nil // a partition cannot be in exclusive mode
	}
	if out, err = s.n.RunProgram(t, harness.WithoutDaemon(s.n.Container(t, ids...)), "info"); err == nil {
		return fmt.Errorf("a program that does not reach the daemon is not refused: %s", out)
	}
	return nil
}

// limits are what a program says of those of a claim.
func (s *crashNode) limits(claim int) []string {
	switch s.layout.config {
	case harness.GPUWithMPS:
		return []string{"limit 8192 MiB", "(50 %)"}
	case harness.PartitionWithMPS:
		return []string{"limit 4096 MiB", "(50 %)"}
	}
	r := s.layout.claims[claim][0]
	return []string{
		fmt.Sprintf("limit %d MiB", cmp.Or(r.Memory, harness.SomeMemory)>>20), fmt.Sprintf("(%d %%)", cmp.Or(r.Percent, harness.SomePercent)),
	}
}
