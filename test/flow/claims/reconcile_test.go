// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// untilAsked waits until the driver has requested a claim some more times.
func untilAsked(t testing.TB, p *harness.Driver, asked *atomic.Int64, some int64) {
	t.Helper()
	since := asked.Load()
	p.Until(t, "the driver to ask for the claim", func(context.Context) error {
		if times := asked.Load() - since; times < some {
			return fmt.Errorf("it did so %d times", times)
		}
		return nil
	})
}

// TestOrphans checks that prepared claims are released that the API server no longer has,
// or has with another UID.
func TestOrphans(t *testing.T) {
	t.Parallel()
	remove := func(n *harness.Node, c *drapb.Claim) { n.API.DeleteClaim(c.GetNamespace(), c.GetName()) }
	replace := func(n *harness.Node, c *drapb.Claim) {
		n.API.SetClaim(&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: c.GetNamespace(), Name: c.GetName()}})
	}
	for name, gone := range map[string]func(*harness.Node, *drapb.Claim){"deleted": remove, "another UID": replace} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x3")
			p := n.Start(t, harness.Eager...)
			p.Ready(t)
			part := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			whole := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 1}}))
			kept := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(2, "1g.10gb", 0)}))
			for _, c := range []*drapb.Claim{part, whole, kept} {
				p.MustPrepare(t, c)
			}
			// As long as they exist nothing happens to them.
			untilAsked(t, p, countRequests(n, part), 5)
			n.WantClaims(t, types.UID(part.GetUid()), types.UID(whole.GetUid()), types.UID(kept.GetUid()))

			gone(n, part)
			gone(n, whole)
			p.Until(t, "their release", func(context.Context) error {
				return errors.Join(n.CheckNoFiles(part.GetUid()), n.CheckNoFiles(whole.GetUid()))
			})
			n.WantClaims(t, types.UID(kept.GetUid()))
			n.WantInstances(t, 0)
			n.WantInstances(t, 2, harness.Place{Profile: "1g.10gb", Start: 0})
			p.UntilEvent(t, n, "OrphanedClaimReleased")
			// The kubelet may still ask for it.
			p.MustUnprepare(t, part, whole, kept)
			n.WantClean(t)
		})
	}
}

// TestOrphanThatWasNeverFinished checks the same for a claim that was half prepared or half
// released when the driver died.
func TestOrphanThatWasNeverFinished(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		function string
		in       harness.Operation
	}{
		"prepare":   {"nvmlGpuInstanceCreateComputeInstance", harness.Prepare},
		"unprepare": {"nvmlComputeInstanceDestroy", harness.Unprepare},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x2")
			// The grace is for claims that may be in use; this one never is.
			flags := []string{"--orphan-grace=1h", "--poll-interval=50ms", "--claim-check-interval=50ms"}
			p := n.Start(t, flags...)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			if test.in == harness.Unprepare {
				p.MustPrepare(t, claim)
			}
			fault := n.Inject(t, machine.Fault{Function: test.function, GPU: 0, Effect: machine.KillAfter})
			if _, err := p.Call(t.Context(), test.in, claim, harness.KubeletTimeout); err == nil {
				t.Fatal("the driver answered although it was killed")
			}
			<-p.Exited
			fault.Remove(t)
			n.API.DeleteClaim(claim.GetNamespace(), claim.GetName())
			p = n.Start(t, flags...)
			p.UntilClean(t, n)
		})
	}
}

// TestNothingIsReleasedWithoutAnAnswer checks that a claim only counts as gone when the API
// server itself says so.
func TestNothingIsReleasedWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	resource := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	for name, answer := range map[string]*apierrors.StatusError{
		"overloaded":  apierrors.NewTooManyRequests("later", 0),
		"broken":      apierrors.NewInternalError(errors.New("etcd is gone")),
		"forbidden":   apierrors.NewForbidden(resource, "", errors.New("no")),
		"not there":   apierrors.NewServiceUnavailable("starting"),
		"not served":  apierrors.NewGenericServerResponse(http.StatusNotFound, "get", resource, "", "404 page not found", 0, true),
		"bad gateway": apierrors.NewGenericServerResponse(http.StatusBadGateway, "get", resource, "", "<html>", 0, true),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			p := n.Start(t, harness.Eager...)
			p.Ready(t)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			ids := p.MustPrepare(t, claim)
			var asked atomic.Int64
			n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
				if strings.Contains(r.URL.Path, "/resourceclaims/") {
					asked.Add(1)
					return answer
				}
				return nil
			})
			// A request that came before that may be answered only now: let it see the claim.
			untilAsked(t, p, &asked, 2)
			n.API.DeleteClaim(claim.GetNamespace(), claim.GetName())
			untilAsked(t, p, &asked, 5)
			if err := n.CheckPrepared(claim.GetUid(), ids, 0, harness.Place{Profile: "1g.10gb", Start: 4}); err != nil {
				t.Errorf("without the API server: %v", err)
			}
			n.API.Refuse(nil)
			p.UntilClean(t, n)
		})
	}
}

// TestForceDeletedPod checks that a new claim gets the devices of one whose pod was deleted
// by force and that the kubelet releases later, or never.
func TestForceDeletedPod(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		flags []string
		// released: the kubelet unprepares the old claim.
		released bool
	}{
		"kubelet releases":       {[]string{"--orphan-grace=1h", "--poll-interval=50ms", "--claim-check-interval=50ms"}, true},
		"kubelet never releases": {harness.Eager, false},
	} {
		for kind, device := range map[string]harness.Device{"whole": {GPU: 0}, "partition": harness.Partition(0, "1g.10gb", 4)} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				n := harness.NewNode(t, "h100x1")
				p := n.Start(t, test.flags...)
				p.Ready(t)
				old := n.AllocateNamed(n.DeviceNames(t, []harness.Device{device}))
				p.MustPrepare(t, old)
				n.API.DeleteClaim(old.GetNamespace(), old.GetName())
				next := n.AllocateNamed(n.DeviceNames(t, []harness.Device{device}))
				answer := make(chan error, 1)
				asked := countRequests(n, next)
				go func() {
					_, err := p.TryPrepare(t.Context(), next, harness.KubeletTimeout)
					answer <- err
				}()
				if test.released {
					p.Until(t, "the call for the new claim", func(context.Context) error {
						if asked.Load() == 0 {
							return errors.New("it has not come")
						}
						return nil
					})
					p.MustUnprepare(t, old)
				}
				if err := <-answer; err != nil {
					t.Fatalf("the new claim: %v", err)
				}
				ids := p.MustPrepare(t, next)
				if err := n.CheckPrepared(next.GetUid(), ids, 0, harness.Place{Profile: device.Profile, Start: device.Start}); err != nil {
					t.Error(err)
				}
				p.Until(t, "the old claim's traces to go", func(context.Context) error { return n.CheckNoFiles(old.GetUid()) })
				p.MustUnprepare(t, next)
				n.WantClean(t)
			})
		}
	}
}

// TestOtherDrivers checks that the driver ignores what a claim has of other drivers.
func TestOtherDrivers(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, harness.Eager...)
	p.Ready(t)
	other := resourceapi.DeviceRequestAllocationResult{Driver: "net.example.com", Pool: "elsewhere", Device: "eth0"}
	alike := resourceapi.DeviceRequestAllocationResult{Driver: "gpu.example.com", Pool: harness.NodeName, Device: n.DeviceName(t, 1, "", 0)}
	ours := resourceapi.DeviceRequestAllocationResult{Device: n.DeviceName(t, 0, "1g.10gb", 4)}

	mixed := n.Store([]resourceapi.DeviceRequestAllocationResult{other, ours, alike}, nil)
	none := n.Store([]resourceapi.DeviceRequestAllocationResult{other, alike}, nil)
	ids := p.MustPrepare(t, mixed)
	if err := n.CheckPrepared(mixed.GetUid(), ids, 0, harness.Place{Profile: "1g.10gb", Start: 4}); err != nil {
		t.Error(err)
	}
	if ids := p.MustPrepare(t, none); len(ids) > 0 {
		t.Errorf("a claim without devices of this driver has the CDI ids %v", ids)
	}
	n.WantClaims(t, types.UID(mixed.GetUid()))
	// The GPU with a result of another driver is free.
	whole := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 1}}))
	p.MustPrepare(t, whole)
	p.Kill()
	p = n.Start(t, harness.Eager...)
	p.Ready(t)
	p.MustPrepare(t, mixed)
	p.MustUnprepare(t, whole, none)
	n.API.DeleteClaim(mixed.GetNamespace(), mixed.GetName())
	p.UntilClean(t, n)
	p.MustUnprepare(t, mixed)
}

// TestStalePrepare checks that a Prepare that a release has overtaken is refused, and that
// a later one is served.
func TestStalePrepare(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]bool{"never prepared": false, "prepared before": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			// The only request for the claim is then that of the call.
			p := n.Start(t, harness.Quiet...)
			p.Ready(t)
			claim := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
			if before {
				p.MustPrepare(t, claim)
			}
			arrived, overtaken := make(chan struct{}, 1), make(chan struct{})
			n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
				if strings.HasSuffix(r.URL.Path, "/resourceclaims/"+claim.GetName()) {
					select {
					case arrived <- struct{}{}:
					default:
					}
					<-overtaken
				}
				return nil
			})
			answer := make(chan error, 1)
			go func() {
				_, err := p.TryPrepare(t.Context(), claim, harness.KubeletTimeout)
				answer <- err
			}()
			<-arrived
			p.MustUnprepare(t, claim)
			close(overtaken)
			if err := <-answer; err == nil {
				t.Error("the claim was prepared after its release, by a call that came before")
			}
			n.WantClean(t)
			n.API.Refuse(nil)
			p.MustPrepare(t, claim)
			p.MustUnprepare(t, claim)
			n.WantClean(t)
		})
	}
}
