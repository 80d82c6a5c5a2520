// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"os"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// wantEnv fails unless a container starts and has these variables.
func wantEnv(t testing.TB, n *harness.Node, spec *oci.Spec, want ...string) {
	t.Helper()
	for _, v := range want {
		if !slices.Contains(spec.Process.Env, v) {
			t.Errorf("the container lacks %s: %q", v, spec.Process.Env)
		}
	}
	wantOutput(t, n, spec, nil, "info")
}

// TestSoftwareLimits: a container has the limits of its device, whatever else its
// claim has, or it does not start.
func TestSoftwareLimits(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x3")
	n.StartSupervisor(t)
	p := n.Start(t, n.Interposer(t))
	limited := harness.Device{GPU: 1, Kind: harness.TimeSlice, Memory: 4 << 30, Percent: 50}
	other := harness.Device{GPU: 1, Kind: harness.TimeSlice, Memory: 2 << 30, Percent: 25}
	mixed := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 0}, limited}))
	alone := p.MustPrepare(t, n.Allocate(t, []harness.Device{other}))
	mps := p.MustPrepare(t, n.Allocate(t, []harness.Device{{GPU: 2, Kind: harness.MPS}}))
	whole, share := mixed[:1], mixed[1:]

	wantEnv(t, n, n.Container(t, whole...))
	wantEnv(t, n, n.Container(t, share...), "CUDA_DEVICE_MEMORY_LIMIT=4096m", "CUDA_DEVICE_SM_LIMIT=50")
	wantEnv(t, n, n.Container(t, alone...), "CUDA_DEVICE_MEMORY_LIMIT=2048m", "CUDA_DEVICE_SM_LIMIT=25")
	wantNoContainer(t, n, n.Container(t, mixed...), "with limits in software and also")
	wantNoContainer(t, n, n.Container(t, slices.Concat(share, alone)...), "2 shares with limits in software")
	wantNoContainer(t, n, n.Container(t, slices.Concat(whole, mps)...), "client of the MPS session")
	wantNoContainer(t, n, n.Container(t, slices.Concat(alone, mps)...), "client of the MPS session")
}

// TestInterposerLibraryMoves: a claim that is prepared keeps its limits when the library
// gets another name on the node.
func TestInterposerLibraryMoves(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "l4x1")
	n.StartSupervisor(t)
	flag := n.Interposer(t)
	p := n.Start(t, flag)
	c := n.Allocate(t, []harness.Device{{Kind: harness.TimeSlice, Memory: 4 << 30, Percent: 50}})
	wantEnv(t, n, n.Container(t, p.MustPrepare(t, c)...), "CUDA_DEVICE_MEMORY_LIMIT=4096m")

	library := strings.TrimPrefix(flag, "--interposer-library=")
	must.Do(t, os.Rename(library, library+".2"))
	p.Kill()
	p = n.Start(t, flag+".2")
	wantEnv(t, n, n.Container(t, p.MustPrepare(t, c)...), "CUDA_DEVICE_MEMORY_LIMIT=4096m")
	p.MustUnprepare(t, c)
	n.WantClean(t)
}

// TestInterposerAfterAllocation: a share that the scheduler allocated while nothing limited such shares, and so counted as
// nothing, is not called limited when it is prepared after a library was configured: without a limit, it could use all that
// those beside it were promised. It may be refused, have a limit, or be without the library.
func TestInterposerAfterAllocation(t *testing.T) {
	n := harness.NewNode(t, "l4x1")
	library := n.Interposer(t)
	p := n.Start(t, library)
	zero := resource.MustParse("0")
	c := n.Store([]resourceapi.DeviceRequestAllocationResult{{
		Device: n.DeviceName(t, 0, "", 0) + "-timeslice", ShareID: ptr.To(uuid.NewUUID()),
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"shares": resource.MustParse("1"), "memory": zero, "smPercent": zero},
	}}, nil)
	defer p.MustUnprepare(t, c)
	answer := p.Prepare(t, c)[0]
	for harness.IsHung(harness.AsError(answer.GetError())) {
		answer = p.Prepare(t, c)[0]
	}
	if answer.GetError() != "" {
		return
	}
	spec := n.Container(t, harness.CDIIDs(answer)...)
	loads := slices.ContainsFunc(spec.Mounts, func(m oci.Mount) bool { return "--interposer-library="+m.Source == library })
	limits := slices.ContainsFunc(spec.Process.Env, func(v string) bool { return strings.HasPrefix(v, "CUDA_DEVICE_MEMORY_LIMIT=") })
	if loads && !limits {
		t.Error("a share is limited by the interposer library, without a limit")
	}
}
