// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/pkg/gpu"
)

func TestPrepareAndUnprepare(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	one, two := r.claim("one"), r.claim("two")
	// Both claims of one call are prepared at the same time.
	var meet sync.WaitGroup
	meet.Add(2)
	r.claims.onPrepare = func(context.Context, *resourceapi.ResourceClaim) error {
		meet.Done()
		meet.Wait()
		return nil
	}
	r.start(t)
	kubelet := r.register(t)
	prepared, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{one, two}})
	if err != nil {
		t.Fatal(err)
	}
	share := "share"
	want := &drapb.NodePrepareResourcesResponse{Claims: map[string]*drapb.NodePrepareResourceResponse{}}
	for _, uid := range []string{"uid-one", "uid-two"} {
		want.Claims[uid] = &drapb.NodePrepareResourceResponse{Devices: []*drapb.Device{{
			RequestNames: []string{"r"}, PoolName: testNode, DeviceName: "gpu-0000-1b-00-0",
			CdiDeviceIds: []string{"k8s.gpu.nvidia.com/claim=" + uid}, ShareId: &share,
		}}}
	}
	if diff := cmp.Diff(want, prepared, protocmp.Transform()); diff != "" {
		t.Errorf("NodePrepareResources (-want +got):\n%s", diff)
	}

	stuck := &drapb.Claim{Namespace: "default", Name: "three", Uid: "stuck"}
	unprepared, err := kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{one, stuck}})
	if err != nil {
		t.Fatal(err)
	}
	if got := unprepared.Claims["uid-one"].GetError(); got != "" {
		t.Errorf("unprepare failed: %s", got)
	}
	if got, want := unprepared.Claims["stuck"].GetError(), "claim default/three: device gpu-0000-1b-00-0: in use by process 42"; got != want {
		t.Errorf("got error %q, want %q", got, want)
	}

	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
	r.stop()
	if err := r.wait(t); err != nil {
		t.Errorf("Run returned %v after a clean stop", err)
	}
	if left, _ := filepath.Glob(filepath.Join(r.options.RegistrarDir, "*")); len(left) > 0 {
		t.Errorf("sockets are left: %v", left)
	}
	if len(r.api.Slices()) == 0 {
		t.Error("the slices were removed at the end")
	}
}

func TestOneClaimFailsAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.claims.onPrepare = func(_ context.Context, c *resourceapi.ResourceClaim) error {
		switch c.Name {
		case "bad":
			return errors.New("device gpu-0000-1b-00-0: config.sharing.strategy: unknown value")
		case "worse":
			panic("a defect")
		}
		return nil
	}
	r.start(t)
	kubelet := r.register(t)
	claims := []*drapb.Claim{r.claim("good"), r.claim("bad"), r.claim("worse")}
	prepared, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		t.Fatal(err)
	}
	for uid, want := range map[string]string{
		"uid-good":  "",
		"uid-bad":   "claim default/bad: device gpu-0000-1b-00-0: config.sharing.strategy: unknown value",
		"uid-worse": "internal error in the driver: the log of the driver's pod on this node has it",
	} {
		if got := prepared.Claims[uid].GetError(); got != want {
			t.Errorf("%s: got error %q, want %q", uid, got, want)
		}
	}
}

func TestDriverAppears(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.hardware.setError(fmt.Errorf("%w: no libnvidia-ml.so.1 below /", gpu.ErrDriverNotLoaded))
	r.start(t)
	kubelet := r.register(t)
	claim := r.claim("one")

	// Alive, not ready, and unpreparing works.
	r.until(t, "liveness", func(ctx context.Context) error { return r.check(ctx, "liveness") })
	if err := r.check(t.Context(), "readiness"); err == nil {
		t.Error("ready without a driver")
	}
	unprepared, err := kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil || unprepared.Claims[claim.Uid].GetError() != "" {
		t.Errorf("unprepare without a driver: %v, %v", unprepared, err)
	}
	prepared, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil {
		t.Fatal(err)
	}
	const want = "claim default/one: there is no inventory (NVIDIA driver is not loaded: no libnvidia-ml.so.1 below /)"
	if got := prepared.Claims[claim.Uid].GetError(); got != want {
		t.Errorf("got error %q, want %q", got, want)
	}
	if slices := r.api.Slices(); len(slices) > 0 {
		t.Errorf("published %d slices without a driver", len(slices))
	}

	r.hardware.setError(nil)
	r.until(t, "readiness", func(ctx context.Context) error { return r.check(ctx, "readiness") })
	prepared, err = kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil || prepared.Claims[claim.Uid].GetError() != "" {
		t.Errorf("prepare with a driver: %v, %v", prepared, err)
	}
}

func TestHealth(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(t)
	for _, check := range []string{"liveness", "readiness"} {
		r.until(t, check, func(ctx context.Context) error { return r.check(ctx, check) })
	}
	// The kubelet could not reach the plugin any more.
	if err := os.Remove(r.options.registrationSocket(r.options.PodUID)); err != nil {
		t.Fatal(err)
	}
	if err := r.check(t.Context(), "liveness"); err == nil {
		t.Error("alive without its registration socket")
	}
}

func TestRunEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*testing.T, *rig)
		want   string
	}{
		"wrong node name": {
			func(_ *testing.T, r *rig) { r.options.NodeName = "other" },
			`the cluster has no node named "other": --node-name (NODE_NAME) must be`,
		},
		"no registration directory": {
			func(_ *testing.T, r *rig) { r.options.RegistrarDir += "-not" },
			"the kubelet's registration directory",
		},
		"restart": {
			func(_ *testing.T, r *rig) { r.hardware.setError(fmt.Errorf("%w: the devices moved", ErrStop)) },
			"the devices moved",
		},
		"a gRPC server died": {
			func(_ *testing.T, r *rig) {
				r.hardware.setOnDiscover(func(ctx context.Context) error {
					r.plugin.service.HandleError(ctx, errors.New("accept failed"), "DRA gRPC server failed")
					return nil
				})
			},
			"DRA gRPC server failed: accept failed",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			test.change(t, r)
			r.start(t)
			err := r.wait(t)
			if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want one line with %q", err, test.want)
			}
		})
	}
}

// TestStopWaitsForCalls: a call that is running when the signal comes succeeds.
func TestStopWaitsForCalls(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.answer = writing
	claim := r.claim("one")
	running := make(chan struct{})
	finish := make(chan struct{})
	r.claims.onPrepare = func(ctx context.Context, _ *resourceapi.ResourceClaim) error {
		close(running)
		<-finish
		return ctx.Err()
	}
	r.start(t)
	kubelet := r.register(t)
	result := make(chan error, 1)
	go func() {
		response, err := kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		if err == nil && response.Claims[claim.Uid].GetError() != "" {
			err = errors.New(response.Claims[claim.Uid].GetError())
		}
		result <- err
	}()
	<-running
	r.stop()
	select {
	case err := <-r.done:
		t.Fatalf("Run returned %v while a call was running", err)
	case <-time.After(50 * time.Millisecond):
		// Long enough to see a Run that does not wait; a Run that waits
		// passes however slow the machine is.
	}
	close(finish)
	if err := <-result; err != nil {
		t.Errorf("the call failed: %v", err)
	}
	if err := r.wait(t); err != nil {
		t.Error(err)
	}
}

func TestStaleSockets(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "p")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	old := time.Now().Add(-2 * minSocketAge)
	socket := func(name string, age time.Time, listening bool) string {
		path := filepath.Join(dir, name)
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		if listening {
			t.Cleanup(func() { _ = listener.Close() })
		} else {
			listener.SetUnlinkOnClose(false)
			_ = listener.Close()
		}
		if err := os.Chtimes(path, age, age); err != nil {
			t.Fatal(err)
		}
		return name
	}
	want := []string{
		socket("dra-busy.sock", old, true),
		socket("dra-fresh.sock", time.Now(), false),
		socket("other.sock", old, false),
	}
	socket("dra-stale.sock", old, false)
	socket("dra-uid-1-2.sock", time.Now(), false)

	(&Options{DriverName: testDriver, PodUID: "uid-1", DataDir: dir, RegistrarDir: dir}).removeStaleSockets(t.Context())
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
}

// TestSocketsAfterACrash: a process whose predecessor was killed does not use the name of its sockets again, which the kubelet would be
// slow to notice.
func TestSocketsAfterACrash(t *testing.T) {
	t.Parallel()
	o := &newRig(t).options
	last := types.UID("uid-1")
	for _, want := range []types.UID{"uid-1-2", "uid-1", "uid-1-2"} {
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: o.registrationSocket(last)})
		if err != nil {
			t.Fatal(err)
		}
		if got := o.socketUID(t.Context()); got != "uid-1" {
			t.Errorf("socket UID %q beside a process that runs", got)
		}
		listener.SetUnlinkOnClose(false)
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
		uid := o.socketUID(t.Context())
		if uid != want {
			t.Fatalf("after a process with %q: %q, want %q", last, uid, want)
		}
		o.removeStaleSockets(t.Context())
		if _, err := os.Lstat(o.registrationSocket(last)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", last, err)
		}
		last = uid
	}
	if uid := (&Options{DriverName: testDriver, RegistrarDir: o.RegistrarDir}).socketUID(t.Context()); uid != "" {
		t.Errorf("without a pod: %q", uid)
	}
}
