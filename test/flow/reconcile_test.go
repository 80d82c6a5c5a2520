// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

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
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// untilAsked waits until the driver has asked for a claim some times more.
func (p *process) untilAsked(t testing.TB, asked *atomic.Int64) {
	t.Helper()
	const some = 5
	since := asked.Load()
	p.until(t, "the driver to ask for the claim", func(context.Context) error {
		if times := asked.Load() - since; times < some {
			return fmt.Errorf("it did so %d times", times)
		}
		return nil
	})
}

// TestOrphans: claims that the API server does not have any more, or has with
// another UID, are released, however far they had come.
func TestOrphans(t *testing.T) {
	t.Parallel()
	remove := func(n *node, c *drapb.Claim) { n.api.DeleteClaim(c.GetNamespace(), c.GetName()) }
	replace := func(n *node, c *drapb.Claim) {
		n.api.SetClaim(&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: c.GetNamespace(), Name: c.GetName()}})
	}
	for name, gone := range map[string]func(*node, *drapb.Claim){"deleted": remove, "another UID": replace} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x3")
			p := n.start(t, eager...)
			p.ready(t)
			part := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
			whole := n.allocate(n.names(t, []request{{gpu: 1}}))
			kept := n.allocate(n.names(t, []request{mig(2, "1g.10gb", 0)}))
			for _, c := range []*drapb.Claim{part, whole, kept} {
				p.mustPrepare(t, c)
			}
			// As long as they exist nothing happens to them.
			p.untilAsked(t, n.rounds(part))
			n.wantClaims(t, typesUID(part.GetUid()), typesUID(whole.GetUid()), typesUID(kept.GetUid()))

			gone(n, part)
			gone(n, whole)
			p.until(t, "their release", func(context.Context) error {
				return errors.Join(n.checkNoFiles(part.GetUid()), n.checkNoFiles(whole.GetUid()))
			})
			n.wantClaims(t, typesUID(kept.GetUid()))
			n.wantInstances(t, 0)
			n.wantInstances(t, 2, place{"1g.10gb", 0})
			p.untilEvent(t, n, "OrphanedClaimReleased")
			// The kubelet may still ask for it.
			p.mustUnprepare(t, part, whole, kept)
			n.wantClean(t)
		})
	}
}

// TestOrphanThatWasNeverFinished: the driver died in the middle, and the claim is
// gone when it comes back, so that nobody ever asks for it.
func TestOrphanThatWasNeverFinished(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		function string
		in       operation
	}{
		"prepare":   {"nvmlGpuInstanceCreateComputeInstance", prepare},
		"unprepare": {"nvmlComputeInstanceDestroy", unprepare},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x2")
			// The grace is for claims that may be in use; this one never is.
			flags := []string{"--orphan-grace=1h", "--reconcile-interval=50ms"}
			p := n.start(t, flags...)
			claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
			if test.in == unprepare {
				p.mustPrepare(t, claim)
			}
			fault := n.inject(t, machine.Fault{Function: test.function, GPU: 0, Effect: machine.KillAfter})
			if _, err := p.try(t.Context(), test.in, claim, kubeletTime); err == nil {
				t.Fatal("the driver answered although it was killed")
			}
			<-p.exited
			fault.remove(t)
			n.api.DeleteClaim(claim.GetNamespace(), claim.GetName())
			p = n.start(t, flags...)
			p.untilClean(t, n)
		})
	}
}

// TestOrphanGrace: a finished claim is left alone for the grace, although the
// driver sees again and again that it is gone.
func TestOrphanGrace(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	p := n.start(t, "--orphan-grace=1h", "--reconcile-interval=50ms")
	p.ready(t)
	claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
	ids := p.mustPrepare(t, claim)
	n.api.DeleteClaim(claim.GetNamespace(), claim.GetName())
	p.untilAsked(t, n.rounds(claim))
	if err := n.checkPrepared(claim.GetUid(), ids, 0, place{"1g.10gb", 4}); err != nil {
		t.Errorf("within the grace: %v", err)
	}
	p.mustUnprepare(t, claim)
	n.wantClean(t)
}

// TestNothingIsReleasedWithoutAnAnswer: only the API server's own word that a
// claim is gone counts.
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
			n := newNode(t, "h100x1")
			p := n.start(t, eager...)
			p.ready(t)
			claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
			ids := p.mustPrepare(t, claim)
			var asked atomic.Int64
			n.api.Refuse(func(r *http.Request) *apierrors.StatusError {
				if strings.Contains(r.URL.Path, "/resourceclaims/") {
					asked.Add(1)
					return answer
				}
				return nil
			})
			n.api.DeleteClaim(claim.GetNamespace(), claim.GetName())
			p.untilAsked(t, &asked)
			if err := n.checkPrepared(claim.GetUid(), ids, 0, place{"1g.10gb", 4}); err != nil {
				t.Errorf("without the API server: %v", err)
			}
			n.api.Refuse(nil)
			p.untilClean(t, n)
		})
	}
}

// TestForceDeletedPod: the pod of a claim was deleted by force, and a new claim
// got its devices before the kubelet has released them.
func TestForceDeletedPod(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		flags []string
		// released tells whether the kubelet unprepares the old claim.
		released bool
	}{
		"kubelet releases":       {[]string{"--orphan-grace=1h", "--reconcile-interval=50ms"}, true},
		"kubelet never releases": {eager, false},
	} {
		for kind, device := range map[string]request{"whole": {gpu: 0}, "partition": mig(0, "1g.10gb", 4)} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, "h100x1")
				p := n.start(t, test.flags...)
				p.ready(t)
				old := n.allocate(n.names(t, []request{device}))
				p.mustPrepare(t, old)
				n.api.DeleteClaim(old.GetNamespace(), old.GetName())
				next := n.allocate(n.names(t, []request{device}))
				answer := make(chan error, 1)
				asked := n.rounds(next)
				go func() {
					_, err := p.tryPrepare(t.Context(), next, kubeletTime)
					answer <- err
				}()
				if test.released {
					p.until(t, "the call for the new claim", func(context.Context) error {
						if asked.Load() == 0 {
							return errors.New("it has not come")
						}
						return nil
					})
					p.mustUnprepare(t, old)
				}
				if err := <-answer; err != nil {
					t.Fatalf("the new claim: %v", err)
				}
				ids := p.mustPrepare(t, next)
				if err := n.checkPrepared(next.GetUid(), ids, 0, place{device.profile, device.start}); err != nil {
					t.Error(err)
				}
				p.until(t, "the old claim's traces to go", func(context.Context) error { return n.checkNoFiles(old.GetUid()) })
				p.mustUnprepare(t, next)
				n.wantClean(t)
			})
		}
	}
}

// TestOtherDrivers: results of other drivers in a claim are none of this one's
// business, in all that it does.
func TestOtherDrivers(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	p := n.start(t, eager...)
	p.ready(t)
	other := resourceapi.DeviceRequestAllocationResult{Driver: "net.example.com", Pool: "elsewhere", Device: "eth0"}
	alike := resourceapi.DeviceRequestAllocationResult{Driver: "gpu.example.com", Pool: nodeName, Device: n.device(t, 1, "", 0)}
	ours := resourceapi.DeviceRequestAllocationResult{Device: n.device(t, 0, "1g.10gb", 4)}

	mixed := n.store([]resourceapi.DeviceRequestAllocationResult{other, ours, alike}, nil)
	none := n.store([]resourceapi.DeviceRequestAllocationResult{other, alike}, nil)
	ids := p.mustPrepare(t, mixed)
	if err := n.checkPrepared(mixed.GetUid(), ids, 0, place{"1g.10gb", 4}); err != nil {
		t.Error(err)
	}
	if ids := p.mustPrepare(t, none); len(ids) > 0 {
		t.Errorf("a claim without devices of this driver has the CDI ids %v", ids)
	}
	n.wantClaims(t, typesUID(mixed.GetUid()))
	// The GPU with a result of another driver is free.
	whole := n.allocate(n.names(t, []request{{gpu: 1}}))
	p.mustPrepare(t, whole)
	p.kill()
	p = n.start(t, eager...)
	p.ready(t)
	p.mustPrepare(t, mixed)
	p.mustUnprepare(t, whole, none)
	n.api.DeleteClaim(mixed.GetNamespace(), mixed.GetName())
	p.untilClean(t, n)
	p.mustUnprepare(t, mixed)
}

// TestStalePrepare: a Prepare that was on its way while the claim was released
// comes too late; one that comes later is served.
func TestStalePrepare(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]bool{"never prepared": false, "prepared before": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x1")
			p := n.start(t)
			p.ready(t)
			claim := n.allocate(n.names(t, []request{mig(0, "1g.10gb", 4)}))
			if before {
				p.mustPrepare(t, claim)
			}
			arrived, overtaken := make(chan struct{}, 1), make(chan struct{})
			n.api.Refuse(func(r *http.Request) *apierrors.StatusError {
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
				_, err := p.tryPrepare(t.Context(), claim, kubeletTime)
				answer <- err
			}()
			<-arrived
			p.mustUnprepare(t, claim)
			close(overtaken)
			if err := <-answer; err == nil {
				t.Error("the claim was prepared after its release, by a call that came before")
			}
			n.wantClean(t)
			n.api.Refuse(nil)
			p.mustPrepare(t, claim)
			p.mustUnprepare(t, claim)
			n.wantClean(t)
		})
	}
}
