// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

const longSlices = "default:\n  timeslice: {clients: 4, interval: Long}\n"

// TestTimeSliceAfterReload checks that a GPU has the time slice of its shares again after the NVIDIA driver was loaded anew,
// when one more share comes at the latest.
func TestTimeSliceAfterReload(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x1")
	flags := append([]string{n.Policy(t, longSlices)}, harness.Frequent...)
	p := n.Start(t, flags...)
	p.Ready(t)
	share := func() *drapb.Claim { return n.Allocate(t, []harness.Device{{Kind: harness.TimeSlice}}) }
	first, second := share(), share()
	p.MustPrepare(t, first)
	p.MustPrepare(t, second)
	n.WantSlice(t, "before", 0, harness.LongSlice)
	p.Kill()
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].TimeSlice = harness.DefaultSlice })
	p = n.Start(t, flags...)
	p.Ready(t)
	for _, c := range []*drapb.Claim{first, second, share()} {
		p.MustPrepare(t, c)
	}
	if got := n.Machine(t).GPUs[0].TimeSlice; got != harness.LongSlice {
		t.Errorf("three shares are prepared, and the GPU still has the time slice that it got when the driver was loaded: %d", got)
	}
}

// TestTimeSliceCannotBeReset checks that a GPU is free again when its driver cannot set time slices any more, as after the
// driver was changed: there is nothing to reset.
func TestTimeSliceCannotBeReset(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x1")
	p := n.Start(t, append([]string{n.Policy(t, longSlices)}, harness.Frequent...)...)
	p.Ready(t)
	c := n.Allocate(t, []harness.Device{{Kind: harness.TimeSlice}})
	p.MustPrepare(t, c)
	smi := filepath.Join(n.Root, "usr/bin/nvidia-smi")
	harness.Rename(t, smi, smi+".real")
	text := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in\n*--set-timeslice*) echo Not Supported; exit 3 ;;\nesac\nexec %s.real \"$@\"\n", smi)
	if err := os.WriteFile(smi, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := p.Release(t.Context(), c); err != nil {
		t.Errorf("the pod cannot end: %v", err)
	}
	next := n.Allocate(t, []harness.Device{{}})
	if _, err := p.TryPrepare(t.Context(), next, harness.ReleaseTimeout); err != nil {
		t.Errorf("the GPU is not given out again, because a time slice that the driver does not know cannot be reset: %v", err)
	}
}
