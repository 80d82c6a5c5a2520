// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
)

// TestSimulatedFacts: what a GPU does not support is left out, and every call is observed.
func TestSimulatedFacts(t *testing.T) {
	m := newMachine(t, "t4x2")
	m.GPUs[0].Persistence, m.GPUs[0].ECC = true, -1
	m.GPUs[0].ReservedBytes, m.GPUs[0].Cores = 450<<20, 2560
	m.GPUs[1].Failure = 15
	var mu sync.Mutex
	var calls []Call
	c, _ := simulateClosed(t, m, Options{Observe: func(_ context.Context, call Call) {
		mu.Lock()
		defer mu.Unlock()
		calls = append(calls, call)
	}})
	if err := c.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	facts, err := c.Facts(t.Context(), m.GPUs[0].PCIAddress)
	if err != nil {
		t.Fatal(err)
	}
	if facts.Persistence == nil || !*facts.Persistence || facts.ECC != nil {
		t.Errorf("got persistence %v, ECC %v", facts.Persistence, facts.ECC)
	}
	if facts.ReservedBytes == nil || *facts.ReservedBytes != 450<<20 || facts.Cores == nil || *facts.Cores != 2560 {
		t.Errorf("got reserved %v, cores %v", facts.ReservedBytes, facts.Cores)
	}
	if _, err := c.Facts(t.Context(), m.GPUs[1].PCIAddress); !errors.Is(err, gpu.ErrLost) {
		t.Errorf("a lost GPU: got %v", err)
	}

	mu.Lock()
	defer mu.Unlock()
	wantCall(t, calls, "nvmlInitWithFlags", "", nil, nil)
	wantCall(t, calls, "nvmlDeviceGetPersistenceMode", m.GPUs[0].PCIAddress, true, nil)
	wantCall(t, calls, "nvmlDeviceGetEccMode", m.GPUs[0].PCIAddress, false, gpu.ErrNotSupported)
}

func wantCall(t *testing.T, calls []Call, function, pci string, answer any, err error) {
	t.Helper()
	for _, c := range calls {
		if c.Function == function && c.PCIAddress == pci && c.Answer == answer && errors.Is(c.Err, err) {
			return
		}
	}
	t.Errorf("no call of %s on %q with %v, %v in %+v", function, pci, answer, err, calls)
}
