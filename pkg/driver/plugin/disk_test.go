// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/gpu"
)

// fullDisk makes a folder that takes no more data, and returns what is in the way.
func fullDisk(t *testing.T, dir string) (filling string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("disk", dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	filling = filepath.Join(dir, "filling")
	if err := os.WriteFile(filling, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filled the disk: %v", err)
	}
	return filling
}

// TestServesOnFullDisk: a plugin whose folder is full publishes, and takes calls.
func TestServesOnFullDisk(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	fullDisk(t, r.options.DataDir)
	r.start(t)
	client := r.register(t)
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
	if len(r.api.Slices()) == 0 {
		t.Error("nothing is published")
	}
	claim := r.claim("one")
	answer, err := client.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil || answer.Claims[claim.Uid].GetError() != "" {
		t.Errorf("prepare: %v, %v", answer, err)
	}
}

// TestDiscoveriesOnFullDisk: it is said once that they cannot be written down, and that
// they can be again.
func TestDiscoveriesOnFullDisk(t *testing.T) {
	t.Parallel()
	s := newIdleStepper(t)
	logger := ktesting.NewLogger(nopTL{}, ktesting.NewConfig(ktesting.BufferLogs(true)))
	sink, buffered := logger.GetSink().(ktesting.Underlier)
	if !buffered {
		t.Fatal("the logger has no buffer")
	}
	s.ctx = klog.NewContext(s.ctx, logger)
	logged := func(message string) (lines int) {
		for _, entry := range sink.GetBuffer().Data() {
			if entry.Message == message {
				lines++
			}
		}
		return lines
	}
	dir := t.TempDir()
	filling := fullDisk(t, dir)
	s.loop.gpus.file = lastseen.New(dir, "boot-1")
	for range 5 {
		s.discover()
		s.poll(time.Minute)
	}
	if !s.handedOn() {
		t.Error("nothing is published")
	}
	if lines := logged("A GPU that does not answer after a restart of the plugin will not be published then"); lines != 1 {
		t.Errorf("logged the problem %d times", lines)
	}
	if err := os.Remove(filling); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		s.discover()
	}
	if lines := logged("It is written down again what was discovered"); lines != 1 {
		t.Errorf("logged its end %d times", lines)
	}
	if seen, _, err := lastseen.New(dir, "boot-1").Read(); err != nil || len(seen.GPUs) != 1 {
		t.Errorf("read %+v, %v", seen, err)
	}
}

// TestSwappedGPUs: two GPUs have changed places while no plugin ran. Each is known by
// what it says itself, in whichever boot the other was seen; what does not answer is
// known by its place only.
func TestSwappedGPUs(t *testing.T) {
	t.Parallel()
	swapped := testNodeWith(firstGPU, secondGPU)
	swapped.GPUs[0].UUID, swapped.GPUs[1].UUID = swapped.GPUs[1].UUID, swapped.GPUs[0].UUID
	for _, boot := range []string{"boot-0", "boot-1"} {
		for name, test := range map[string]struct {
			found *gpu.Node
			want  map[string]string
		}{
			"both answer": {swapped, map[string]string{firstGPU: "GPU-" + secondGPU, secondGPU: "GPU-" + firstGPU}},
			"one answers": {
				&gpu.Node{GPUs: swapped.GPUs[:1], Broken: []gpu.Broken{broken(secondGPU, gpu.ErrLost)}},
				map[string]string{firstGPU: "GPU-" + secondGPU, secondGPU: ""},
			},
		} {
			t.Run(boot+" "+name, func(t *testing.T) {
				t.Parallel()
				s := newIdleStepper(t)
				dir := t.TempDir()
				write(t, dir, boot, testNodeWith(firstGPU, secondGPU))
				s.loop.gpus.file = lastseen.New(dir, "boot-1")
				// Claims have devices of both.
				s.claims.setInUse("gpu-0000-1b-00-0", "gpu-0000-2c-00-0")
				s.hardware.setNode(test.found)
				s.loop.recall(s.ctx)
				s.discover()
				s.poll(time.Second)
				got := map[string]string{}
				for _, d := range s.claims.inventory.Devices() {
					got[d.GPU.PCIAddress] = d.GPU.UUID
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("UUIDs (-want +got):\n%s", diff)
				}
				conditions := s.loop.gpus.conditions()
				if len(conditions) != len(test.found.Broken) || len(conditions) > 0 && conditions[0].PCIAddress != secondGPU {
					t.Errorf("conditions %+v", conditions)
				}
			})
		}
	}
}
