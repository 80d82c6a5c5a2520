// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

const (
	driver = "gpu.nvidia.com"
	pool   = "node-1"
)

// rig is a node whose plugin writes the status of claims.
type rig struct {
	t   *testing.T
	api *fakeapi.Server

	mu sync.Mutex
	// requests are those that read or write a claim, since take was called.
	requests []string
	refuse   func(*http.Request) *apierrors.StatusError
}

// inRig runs a test in fake time.
func inRig(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, api: fakeapi.NewWithoutNetwork(t)}
		r.api.Refuse(func(request *http.Request) *apierrors.StatusError {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.requests = append(r.requests, request.Method)
			if r.refuse != nil {
				return r.refuse(request)
			}
			return nil
		})
		test(t, r)
	})
}

func (r *rig) setRefuse(refuse func(*http.Request) *apierrors.StatusError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = refuse
}

// forbid refuses writes of a claim, or of all.
func (r *rig) forbid(name string, refusal *apierrors.StatusError) {
	r.setRefuse(func(request *http.Request) *apierrors.StatusError {
		if request.Method == http.MethodPatch && strings.Contains(request.URL.Path, name) {
			return refusal
		}
		return nil
	})
}

// take returns the methods of the requests since the last call, sorted: claims are in no order.
func (r *rig) take() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	requests := slices.Sorted(slices.Values(r.requests))
	r.requests = nil
	return strings.Join(requests, " ")
}

// writer runs until the test or stop ends it.
type writer struct {
	*Writer
	newest atomic.Bool
	stop   func()
}

func (r *rig) start() *writer {
	r.t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://cluster", Transport: r.api.Transport(), QPS: -1})
	if err != nil {
		r.t.Fatal(err)
	}
	w := &writer{}
	w.newest.Store(true)
	w.Writer = New(Options{DriverName: driver, Client: client, Newest: w.newest.Load})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	w.stop = func() { cancel(); running.Wait() }
	r.t.Cleanup(w.stop)
	return w
}

// say says what there is to say, and lets a second pass.
func (w *writer) say(claims ...Claim) {
	w.Set(claims)
	after(time.Second)
}

// after lets time pass.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// claim stores a claim that has devices of this driver and one of another.
func (r *rig) claim(name string, devices ...string) claim.Ref {
	allocation := &resourceapi.AllocationResult{}
	for i, d := range append([]string{"nic"}, devices...) {
		result := resourceapi.DeviceRequestAllocationResult{Request: fmt.Sprintf("r%d", i), Driver: driver, Pool: pool, Device: d}
		if d == "nic" {
			result.Driver = "nic.example.com"
		}
		if strings.HasSuffix(d, "-mps") {
			result.ShareID = ptr.To(shareOf(name))
		}
		allocation.Devices.Results = append(allocation.Devices.Results, result)
	}
	stored := r.api.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	})
	return claim.Ref{Namespace: "team", Name: name, UID: stored.UID}
}

func shareOf(name string) types.UID { return types.UID("share-of-" + name) }

func ready(ref claim.Ref, devices ...string) Claim {
	c := Claim{Ref: ref}
	for _, d := range devices {
		one := Device{Pool: pool, Device: d, Ready: true, Reason: "Ready", Message: "all is well", Data: fmt.Appendf(nil, `{"uuid": %q}`, "UUID-of-"+d)}
		if strings.HasSuffix(d, "-mps") {
			one.ShareID = ptr.To(shareOf(ref.Name))
		}
		c.Devices = append(c.Devices, one)
	}
	return c
}

func (c Claim) lost() Claim {
	c.Devices = append([]Device(nil), c.Devices...)
	for i := range c.Devices {
		c.Devices[i].Ready, c.Devices[i].Reason, c.Devices[i].Message = false, "GPULost", "it fell off"
	}
	return c
}

func (c Claim) saying(message string) Claim {
	c.Devices = append([]Device(nil), c.Devices...)
	c.Devices[0].Message = message
	return c
}

// entriesOf are the entries of a claim as text, without times.
func (r *rig) entriesOf(name string) string {
	stored := r.api.Claim("team", name)
	if stored == nil {
		return "no claim"
	}
	var lines []string
	for _, d := range stored.Status.Devices {
		line := d.Driver + " " + d.Device
		if d.ShareID != nil {
			line += " " + *d.ShareID
		}
		for _, c := range d.Conditions {
			line += fmt.Sprintf(" %s=%s/%s", c.Type, c.Status, c.Reason)
		}
		if d.Data != nil {
			line += " " + string(d.Data.Raw)
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// want fails unless a claim has these entries, and these requests were made since the last call.
func (r *rig) want(name, entries, requests string) {
	r.t.Helper()
	synctest.Wait()
	if diff := cmp.Diff(entries, r.entriesOf(name)); diff != "" {
		r.t.Errorf("status of claim %s (-want +got):\n%s", name, diff)
	}
	if got := r.take(); got != requests {
		r.t.Errorf("requests %q, want %q", got, requests)
	}
}

// condition is that of the first entry of this driver.
func (r *rig) condition(name string) metav1.Condition {
	return own(driver, r.api.Claim("team", name).Status.Devices)[0].Conditions[0]
}

const (
	entryA    = `gpu.nvidia.com a Ready=True/Ready {"uuid":"UUID-of-a"}`
	entryLost = `gpu.nvidia.com a Ready=False/GPULost {"uuid":"UUID-of-a"}`
	entryNIC  = `nic.example.com nic {"ip":"10.0.0.1"}`
)

// apply is what another manager does.
func (r *rig) apply(name, manager string, entries ...resourceapi.AllocatedDeviceStatus) {
	r.t.Helper()
	_, err := r.api.ApplyStatus(&resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Status:     resourceapi.ResourceClaimStatus{Devices: entries},
	}, manager)
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestLifeOfAClaim: entries come and follow what happens; those of another driver stay. Those of a claim that is
// released are left to the API server.
func TestLifeOfAClaim(t *testing.T) {
	inRig(t, func(t *testing.T, r *rig) {
		w := r.start()
		ref := r.claim("c", "a", "b-mps")
		r.apply("c", "nic-driver", resourceapi.AllocatedDeviceStatus{
			Driver: "nic.example.com", Pool: pool, Device: "nic", Data: &runtime.RawExtension{Raw: []byte(`{"ip":"10.0.0.1"}`)},
		})
		w.say()
		w.say(ready(ref, "a", "b-mps"))
		share := `gpu.nvidia.com b-mps share-of-c Ready=True/Ready {"uuid":"UUID-of-b-mps"}`
		r.want("c", entryNIC+"\n"+entryA+"\n"+share, "PATCH")
		before := r.condition("c")

		// The same again is no request. Other words are one, and do not change the time.
		w.say(ready(ref, "a", "b-mps"))
		w.say(ready(ref, "a", "b-mps").saying("all is very well"))
		r.want("c", entryNIC+"\n"+entryA+"\n"+share, "PATCH")
		if got := r.condition("c"); got.Message != "all is very well" || got.LastTransitionTime != before.LastTransitionTime {
			t.Errorf("%+v", got)
		}
		w.say(ready(ref, "a").lost())
		r.want("c", entryNIC+"\n"+entryLost, "PATCH")
		if got := r.condition("c"); !got.LastTransitionTime.After(before.LastTransitionTime.Time) {
			t.Errorf("%+v", got)
		}
		w.say()
		after(2 * time.Hour)
		r.want("c", entryNIC+"\n"+entryLost, "")
	})
}

// TestAfterFlapping: what has changed is written as soon as the budget allows it, and not a whole interval later.
func TestAfterFlapping(t *testing.T) {
	inRig(t, func(t *testing.T, r *rig) {
		w := r.start()
		c := ready(r.claim("c", "a"), "a")
		w.say()
		w.say(c.lost())
		for range burst / 2 {
			w.say(c)
			w.say(c.lost())
		}
		if n := r.api.StatusWrites(FieldManager); n != burst || r.entriesOf("c") != entryLost {
			t.Fatalf("%d writes, %s", n, r.entriesOf("c"))
		}
		after(writeInterval - time.Minute)
		w.say(c)
		after(time.Minute)
		if r.entriesOf("c") != entryA {
			t.Errorf("it works again, and its status is %s", r.entriesOf("c"))
		}
	})
}

// TestFlapping: a device that is ready and not ready every few seconds, and words that change, cost a bounded number
// of writes; what is stored in the end is how it is then.
func TestFlapping(t *testing.T) {
	for name, test := range map[string]struct {
		change      func(Claim) Claim
		most        int
		late        time.Duration
		entry, says string
	}{
		"readiness": {Claim.lost, burst + int(time.Hour/writeInterval), writeInterval, entryLost, "it fell off"},
		"words":     {func(c Claim) Claim { return c.saying("so so") }, burst + int(time.Hour/writeInterval), writeInterval, entryA, "so so"},
	} {
		t.Run(name, func(t *testing.T) {
			inRig(t, func(t *testing.T, r *rig) {
				w := r.start()
				c := ready(r.claim("c", "a"), "a")
				w.say()
				began := time.Now()
				for time.Since(began) < time.Hour {
					w.say(c)
					after(4 * time.Second)
					w.say(test.change(c))
					after(4 * time.Second)
				}
				if n := r.api.StatusWrites(FieldManager); n > test.most {
					t.Errorf("%d writes, want %d at most", n, test.most)
				}
				after(test.late)
				if got := r.condition("c").Message; got != test.says || r.entriesOf("c") != test.entry {
					t.Errorf("in the end %q, %s", got, r.entriesOf("c"))
				}
				writes := r.api.StatusWrites(FieldManager)
				after(2 * time.Hour)
				if n := r.api.StatusWrites(FieldManager); n != writes {
					t.Errorf("%d more writes", n-writes)
				}
				w.say(c)
				w.say(test.change(ready(r.claim("d", "a"), "a")))
				r.take()
				if name == "readiness" {
					w.say(c.lost())
					r.want("c", entryLost, "PATCH") // at once
				}
			})
		})
	}
}

// TestManyDevices: what happened to one device of a claim does not keep the others from being written.
func TestManyDevices(t *testing.T) {
	inRig(t, func(t *testing.T, r *rig) {
		w := r.start()
		names := strings.Fields("a b c d e f g h")
		c := ready(r.claim("c", names...), names...)
		w.say(c)
		for i := range names {
			broken := c.lost()
			copy(broken.Devices, c.Devices[:i])
			copy(broken.Devices[i+1:], c.Devices[i+1:])
			w.say(broken)
			if got := r.entriesOf("c"); strings.Count(got, "Ready=False") != 1 {
				t.Errorf("device %s is broken: %s", names[i], got)
			}
			w.say(c)
			if got := r.entriesOf("c"); strings.Contains(got, "Ready=False") {
				t.Errorf("device %s works again: %s", names[i], got)
			}
		}
		for range len(names) * burst {
			w.Set([]Claim{c.lost()})
			after(time.Millisecond)
			w.Set([]Claim{c})
			after(time.Millisecond)
		}
		w.say(c)
		if got := r.entriesOf("c"); !strings.Contains(got, "Ready=False") {
			t.Fatalf("the budget is not used up: %s", got)
		}
		after(writeInterval / time.Duration(len(names)))
		if got := r.entriesOf("c"); strings.Contains(got, "Ready=False") {
			t.Errorf("a part of the interval later: %s", got)
		}
	})
}

// TestClaimGone: a claim that was deleted, or has another one in its place, is left alone.
func TestClaimGone(t *testing.T) {
	inRig(t, func(_ *testing.T, r *rig) {
		w := r.start()
		deleted, replaced := r.claim("deleted", "a"), r.claim("replaced", "a")
		w.say()
		w.say(ready(deleted, "a"), ready(replaced, "a"))
		r.want("deleted", entryA, "PATCH PATCH")
		r.want("replaced", entryA, "")
		r.api.DeleteClaim("team", "deleted")
		r.api.DeleteClaim("team", "replaced")
		r.claim("replaced", "a")
		w.say(ready(deleted, "a").lost(), ready(replaced, "a").lost())
		after(30 * time.Minute)
		r.want("replaced", "", "GET GET PATCH PATCH")
		w.say(ready(deleted, "a"), ready(replaced, "a"))
		after(time.Minute)
		r.want("replaced", "", "")
	})
}

// TestRestart: a process that begins reads all claims, and writes only what differs.
func TestRestart(t *testing.T) {
	inRig(t, func(t *testing.T, r *rig) {
		w := r.start()
		same, other := r.claim("same", "a"), r.claim("other", "a")
		w.say()
		w.say(ready(same, "a"), ready(other, "a"))
		r.want("other", entryA, "PATCH PATCH")
		w.stop()
		before := r.api.Claim("team", "same")

		r.start().say(ready(same, "a"), ready(other, "a").lost())
		synctest.Wait()
		if got := r.entriesOf("other"); got != entryLost || strings.Count(r.take(), "PATCH") != 1 {
			t.Error(got)
		}
		if diff := cmp.Diff(before, r.api.Claim("team", "same")); diff != "" {
			t.Errorf("-before +after:\n%s", diff)
		}
	})
}

// TestTwoInstances: while two run, the older one writes nothing, not even once; when the newer one has ended it brings
// everything to what it has to say.
func TestTwoInstances(t *testing.T) {
	inRig(t, func(_ *testing.T, r *rig) {
		older := r.start()
		c, d := ready(r.claim("c", "a"), "a"), ready(r.claim("d", "a"), "a")
		older.say()
		older.say(c)
		r.want("c", entryA, "PATCH")
		older.newest.Store(false)
		newer := r.start()
		newer.say(c.lost())
		r.want("c", entryLost, "GET PATCH")
		older.say(c.lost(), d)
		older.say(c, d)
		after(2 * time.Hour)
		r.want("c", entryLost, "GET GET") // of the newer one
		r.want("d", "", "")
		newer.stop()
		older.newest.Store(true)
		older.say(c, d)
		r.want("c", entryA, "GET GET PATCH PATCH")
		r.want("d", entryA, "")
	})
}

// TestChangedByOthers: what somebody, or a late request of an earlier instance, has changed does
// not stay.
func TestChangedByOthers(t *testing.T) {
	inRig(t, func(_ *testing.T, r *rig) {
		w := r.start()
		w.say()
		w.say(ready(r.claim("c", "a"), "a"))
		r.want("c", entryA, "PATCH")
		r.apply("c", FieldManager)
		r.want("c", "", "")
		after(recheckInterval)
		r.want("c", entryA, "GET PATCH")
		after(recheckInterval)
		r.want("c", entryA, "GET")
	})
}

// TestRetry: what fails is tried again, ever more slowly, and does not hold up others.
func TestRetry(t *testing.T) {
	inRig(t, func(t *testing.T, r *rig) {
		w := r.start()
		bad, good := r.claim("bad", "a"), r.claim("good", "a")
		r.forbid("/bad/", apierrors.NewInternalError(errors.New("no disk")))
		w.say()
		w.say(ready(bad, "a"), ready(good, "a"))
		if got := r.entriesOf("good"); got != entryA {
			t.Error(got)
		}
		after(time.Hour)
		if n := strings.Count(r.take(), "PATCH"); n < 10 || n > 20 {
			t.Errorf("%d attempts in an hour", n)
		}
		r.setRefuse(nil)
		after(lastRetry)
		if got := r.entriesOf("bad"); got != entryA {
			t.Error(got)
		}
	})
}

// TestCannotWrite: without the permission, or without the feature gate, one request is made
// about all claims, and no more for a while.
func TestCannotWrite(t *testing.T) {
	forbidden := apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "c", errors.New("RBAC: no"))
	granular := apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), "c", field.ErrorList{
		field.Forbidden(field.NewPath("status", "devices"), `changing status.devices requires resource="resourceclaims/driver"`),
	})
	for name, test := range map[string]struct {
		refusal *apierrors.StatusError
		drop    bool
	}{
		"no permission":                {refusal: forbidden},
		"no permission for the driver": {refusal: granular},
		"no feature gate":              {drop: true},
	} {
		t.Run(name, func(t *testing.T) {
			inRig(t, func(t *testing.T, r *rig) {
				r.api.DropDeviceStatus(test.drop)
				r.forbid("", test.refusal)
				w := r.start()
				w.say()
				var claims []Claim
				for i := range 50 {
					claims = append(claims, ready(r.claim(fmt.Sprintf("c%d", i), "a"), "a"))
				}
				w.say(claims...)
				r.want("c0", "", "PATCH")
				after(refusedPause - 2*time.Second)
				r.want("c0", "", "")
				after(time.Minute)
				if n := strings.Count(r.take(), "PATCH"); n != 1 {
					t.Errorf("%d writes after the pause", n)
				}

				// Once the cluster lets it, all is written.
				r.setRefuse(nil)
				r.api.DropDeviceStatus(false)
				after(refusedPause)
				for _, c := range claims {
					if got := r.entriesOf(c.Ref.Name); got != entryA {
						t.Fatalf("claim %s has %q", c.Ref.Name, got)
					}
				}
			})
		})
	}
}

// TestOneClaimForbidden: a cluster that has stored entries may refuse those of one claim.
func TestOneClaimForbidden(t *testing.T) {
	inRig(t, func(t *testing.T, r *rig) {
		w := r.start()
		good, bad := r.claim("good", "a"), r.claim("bad", "a")
		w.say()
		w.say(ready(good, "a"))
		r.forbid("/bad/", apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "bad", errors.New("a policy of the namespace")))
		w.say(ready(good, "a"), ready(bad, "a"))
		w.say(ready(good, "a").lost(), ready(bad, "a"))
		if got := r.entriesOf("good"); got != entryLost {
			t.Error(got)
		}
	})
}

// TestManyClaims: one request for each claim when it is prepared, none while nothing changes,
// one when all change, and none when they end.
func TestManyClaims(t *testing.T) {
	inRig(t, func(t *testing.T, r *rig) {
		const number = 200
		w := r.start()
		w.say()
		var claims, lost []Claim
		for i := range number {
			ref := r.claim(fmt.Sprintf("c%d", i), "a")
			claims, lost = append(claims, ready(ref, "a")), append(lost, ready(ref, "a").lost())
		}
		requests := func(what string, claims []Claim, want string, most int) {
			t.Helper()
			for range 10 {
				w.say(claims...)
			}
			for i := range number {
				if got := r.entriesOf(fmt.Sprintf("c%d", i)); got != want {
					t.Fatalf("%s: %s", what, got)
				}
			}
			if made := len(strings.Fields(r.take())); made != most {
				t.Errorf("%s: %d requests, want %d", what, made, most)
			}
		}
		requests("prepared", claims, entryA, number)
		requests("nothing new", claims, entryA, 0)
		requests("all lost", lost, entryLost, number)
		requests("unprepared", nil, entryLost, 0)
	})
}
