// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

const (
	driver = "gpu.nvidia.com"
	pool   = "node-1"
	// patience bounds waits that a passing test never comes near.
	patience = time.Minute
)

// rig is a node whose plugin writes the status of claims.
type rig struct {
	t   *testing.T
	api *fakeapi.Server
	dir string
	// requests counts those that read or write a claim.
	requests atomic.Int64
	// recheck is the writer's recheckInterval.
	recheck time.Duration
	mu      sync.Mutex
	refuse  func(*http.Request) *apierrors.StatusError
	// answered, if set, is called with each request whose answer is about to reach the writer.
	answered func(*http.Request)
}

type transport struct {
	http.RoundTripper
	answered func(*http.Request)
}

func (t transport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.RoundTripper.RoundTrip(request)
	t.answered(request)
	return response, err
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, api: fakeapi.New(t), dir: t.TempDir()}
	r.api.Refuse(func(request *http.Request) *apierrors.StatusError {
		if strings.Contains(request.URL.Path, "/resourceclaims/") {
			r.requests.Add(1)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.refuse != nil {
			return r.refuse(request)
		}
		return nil
	})
	return r
}

func (r *rig) setRefuse(refuse func(*http.Request) *apierrors.StatusError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = refuse
}

// start runs a writer until the test or stop ends it.
func (r *rig) start() (w *Writer, stop func()) {
	r.t.Helper()
	config := &rest.Config{Host: r.api.URL(), QPS: -1}
	if r.answered != nil {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return transport{next, r.answered} })
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		r.t.Fatal(err)
	}
	w = New(Options{
		DriverName: driver, Client: client, Dir: filepath.Join(r.dir, "status"), LockFile: filepath.Join(r.dir, "status.lock"),
		removalDelay: time.Millisecond, recheckInterval: r.recheck,
	})
	ctx, cancel := context.WithCancel(r.t.Context())
	var running sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	stop = func() { cancel(); running.Wait() }
	r.t.Cleanup(stop)
	return w, stop
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

func (r *rig) until(what string, check func() error) {
	r.t.Helper()
	end := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(time.Millisecond)
	}
}

func (r *rig) untilEntries(name, want string) {
	r.t.Helper()
	r.until("status of claim "+name, func() error {
		if diff := cmp.Diff(want, r.entriesOf(name)); diff != "" {
			return errors.New("-want +got:\n" + diff)
		}
		return nil
	})
}

func (r *rig) untilRecorded(want int) {
	r.t.Helper()
	r.until("ledger", func() error {
		files, err := os.ReadDir(filepath.Join(r.dir, "status"))
		if len(files) != want {
			return errors.Join(fmt.Errorf("%d claims, want %d", len(files), want), err)
		}
		return nil
	})
}

const (
	entryA    = `gpu.nvidia.com a Ready=True/Ready {"uuid":"UUID-of-a"}`
	entryLost = `gpu.nvidia.com a Ready=False/GPULost {"uuid":"UUID-of-a"}`
	entryNIC  = `nic.example.com nic {"ip":"10.0.0.1"}`
)

// applyNIC is what another driver does.
func (r *rig) applyNIC(name string) {
	r.t.Helper()
	_, err := r.api.ApplyStatus(&resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Status: resourceapi.ResourceClaimStatus{Devices: []resourceapi.AllocatedDeviceStatus{{
			Driver: "nic.example.com", Pool: pool, Device: "nic", Data: &runtime.RawExtension{Raw: []byte(`{"ip":"10.0.0.1"}`)},
		}}},
	}, "nic-driver")
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestLifeOfAClaim: entries come, follow what happens, and go; those of another driver stay.
func TestLifeOfAClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, _ := r.start()
	ref := r.claim("c", "a", "b-mps")
	r.applyNIC("c")
	w.Set([]Claim{ready(ref, "a", "b-mps")})
	share := `gpu.nvidia.com b-mps share-of-c Ready=True/Ready {"uuid":"UUID-of-b-mps"}`
	r.untilEntries("c", entryNIC+"\n"+entryA+"\n"+share)
	if n := r.requests.Load(); n != 1 {
		t.Errorf("it took %d requests", n)
	}
	transition := r.api.Claim("team", "c").Status.Devices[1].Conditions[0].LastTransitionTime

	// The same again is no request; another message does not change the time.
	w.Set([]Claim{ready(ref, "a", "b-mps")})
	other := ready(ref, "a", "b-mps")
	other.Devices[0].Message = "all is very well"
	w.Set([]Claim{other})
	r.until("message", func() error {
		if got := r.api.Claim("team", "c").Status.Devices[1].Conditions[0]; got.Message != other.Devices[0].Message || got.LastTransitionTime != transition {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	w.Set([]Claim{ready(ref, "a").lost()})
	r.untilEntries("c", entryNIC+"\n"+entryLost)
	if n := r.requests.Load(); n != 3 {
		t.Errorf("three changes took %d requests", n)
	}

	w.Set(nil)
	r.untilEntries("c", entryNIC)
	r.untilRecorded(0)
	if got, want := w.Counts(), (Counts{Written: 4}); got != want || r.requests.Load() != 4 {
		t.Errorf("%+v and %d requests", got, r.requests.Load())
	}
}

// TestClaimGone: a claim that was deleted, or has another one in its place, is left alone.
func TestClaimGone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, _ := r.start()
	deleted, replaced := r.claim("deleted", "a"), r.claim("replaced", "a")
	w.Set([]Claim{ready(deleted, "a"), ready(replaced, "a")})
	r.untilEntries("deleted", entryA)
	r.untilEntries("replaced", entryA)
	r.api.DeleteClaim("team", "deleted")
	r.api.DeleteClaim("team", "replaced")
	r.claim("replaced", "a")
	w.Set([]Claim{ready(deleted, "a").lost(), ready(replaced, "a").lost()})
	r.until("attempts", func() error {
		if n := r.requests.Load(); n < 5 {
			return fmt.Errorf("%d requests", n)
		}
		return nil
	})
	w.Set(nil)
	r.untilRecorded(0)
	if got := r.entriesOf("replaced"); got != "" {
		t.Errorf("the other claim has %s", got)
	}
	if got := w.Counts(); got.Failed > 0 {
		t.Errorf("%+v", got)
	}
}

// TestRestart: a process that begins brings all claims up to date, writes only what differs,
// and removes what belongs to claims that were unprepared meanwhile.
func TestRestart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, stop := r.start()
	refs := map[string]claim.Ref{}
	var claims []Claim
	for _, name := range []string{"same", "other", "unprepared"} {
		refs[name] = r.claim(name, "a")
		claims = append(claims, ready(refs[name], "a"))
	}
	w.Set(claims)
	for name := range refs {
		r.untilEntries(name, entryA)
	}
	stop()
	before := r.api.Claim("team", "same")
	writes := r.api.StatusWrites(FieldManager)

	next, _ := r.start()
	next.Set([]Claim{ready(refs["same"], "a"), ready(refs["other"], "a").lost()})
	r.untilEntries("other", entryLost)
	r.untilEntries("unprepared", "")
	r.untilRecorded(2)
	if diff := cmp.Diff(before, r.api.Claim("team", "same")); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
	if got := r.api.StatusWrites(FieldManager) - writes; got != 2 {
		t.Errorf("%d writes, want 2", got)
	}
}

// TestDamagedLedger: a file that makes no sense is removed, and what is no file is left alone.
func TestDamagedLedger(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	dir := filepath.Join(r.dir, "status")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "uid-1"), []byte(`{"uid": "uid-`), 0o600),
		os.WriteFile(filepath.Join(dir, "uid-2"), []byte(`{"uid": "../uid-3"}`), 0o600), os.Mkdir(filepath.Join(dir, "lost+found"), 0o700),
		os.Symlink("/dev/zero", filepath.Join(dir, "endless")), unix.Mkfifo(filepath.Join(dir, "silent"), 0o600)); err != nil {
		t.Fatal(err)
	}
	w, _ := r.start()
	ref := r.claim("c", "a")
	w.Set([]Claim{ready(ref, "a")})
	r.untilEntries("c", entryA)
	w.Set(nil)
	r.until("files that make no sense", func() error {
		if files, err := filepath.Glob(filepath.Join(dir, "uid-*")); err != nil || len(files) > 0 {
			return errors.Join(fmt.Errorf("got %v", files), err)
		}
		return nil
	})
}

// TestTwoInstances: while two run, the newer one writes, and when it ends the older one again.
func TestTwoInstances(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	older, _ := r.start()
	ref := r.claim("c", "a")
	older.Set([]Claim{ready(ref, "a")})
	r.untilEntries("c", entryA)
	newer, stopNewer := r.start()
	newer.Set([]Claim{ready(ref, "a").lost()})
	r.untilEntries("c", entryLost)
	older.Set([]Claim{ready(ref, "a")})
	r.until("older instance", func() error {
		older.mu.Lock()
		defer older.mu.Unlock()
		if older.mine {
			return errors.New("it writes")
		}
		return nil
	})
	// It has another opinion, and no say.
	again := ready(ref, "a")
	again.Devices[0].Message = "still well"
	older.Set([]Claim{again})
	second := r.claim("d", "a")
	newer.Set([]Claim{ready(ref, "a").lost(), ready(second, "a")})
	r.untilEntries("d", entryA)
	r.untilEntries("c", entryLost)
	older.Set([]Claim{again, ready(second, "a").lost()})
	stopNewer()
	r.untilEntries("c", entryA)
	r.untilEntries("d", entryLost)
}

// TestChangedByOthers: what somebody, or a late request of an earlier instance, has changed does
// not stay.
func TestChangedByOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.recheck = 20 * time.Millisecond
	w, _ := r.start()
	ref := r.claim("c", "a")
	w.Set([]Claim{ready(ref, "a")})
	r.untilEntries("c", entryA)
	none := &resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c"},
	}
	if _, err := r.api.ApplyStatus(none, FieldManager); err != nil {
		t.Fatal(err)
	}
	r.untilEntries("c", entryA)
	r.until("second write", func() error {
		if n := w.Counts().Written; n < 2 {
			return fmt.Errorf("%d writes", n)
		}
		return nil
	})
}

// TestRetry: what fails is tried again, and does not hold up others.
func TestRetry(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, _ := r.start()
	bad, good := r.claim("bad", "a"), r.claim("good", "a")
	r.setRefuse(func(request *http.Request) *apierrors.StatusError {
		if strings.Contains(request.URL.Path, "/bad/") {
			return apierrors.NewInternalError(errors.New("no disk"))
		}
		return nil
	})
	w.Set([]Claim{ready(bad, "a"), ready(good, "a")})
	r.untilEntries("good", entryA)
	r.until("failure", func() error {
		if w.Counts().Failed == 0 {
			return errors.New("there is none")
		}
		return nil
	})
	r.setRefuse(nil)
	r.untilEntries("bad", entryA)
}

// TestCannotWrite: without the permission, or without the feature gate, one request is made
// about all claims, and no more for a while.
func TestCannotWrite(t *testing.T) {
	t.Parallel()
	forbidden := apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "c", errors.New("RBAC: no"))
	granular := apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceClaim").GroupKind(), "c", field.ErrorList{
		field.Forbidden(field.NewPath("status", "devices"), `changing status.devices requires resource="resourceclaims/driver"`),
	})
	for name, test := range map[string]struct {
		refusal *apierrors.StatusError
		drop    bool
		want    Counts
	}{
		"no permission":                {refusal: forbidden, want: Counts{Failed: 1, Forbidden: 1}},
		"no permission for the driver": {refusal: granular, want: Counts{Failed: 1, Forbidden: 1}},
		"no feature gate":              {drop: true, want: Counts{Failed: 1, Dropped: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.api.DropDeviceStatus(test.drop)
			r.setRefuse(func(request *http.Request) *apierrors.StatusError {
				if request.Method == http.MethodPatch {
					return test.refusal
				}
				return nil
			})
			w, _ := r.start()
			first := r.claim("first", "a")
			w.Set([]Claim{ready(first, "a")})
			r.until("attempt", func() error {
				if got := w.Counts(); got != test.want {
					return fmt.Errorf("%+v", got)
				}
				return nil
			})
			made := r.requests.Load()
			claims := []Claim{ready(first, "a")}
			for i := range 50 {
				claims = append(claims, ready(r.claim(fmt.Sprintf("c%d", i), "a"), "a"))
			}
			w.Set(claims)
			r.until("queue", func() error {
				if n := w.queue.Len(); n > 0 {
					return fmt.Errorf("%d claims wait", n)
				}
				return nil
			})
			if now := r.requests.Load(); now != made {
				t.Errorf("%d requests after the cluster had refused", now-made)
			}

			// Once the cluster lets it, all is written.
			r.setRefuse(nil)
			r.api.DropDeviceStatus(false)
			w.mu.Lock()
			w.paused = time.Now()
			w.mu.Unlock()
			w.queue.Add(first.UID)
			for _, c := range claims {
				r.untilEntries(c.Ref.Name, entryA)
			}
		})
	}
}

// TestOneClaimForbidden: a cluster that has stored entries may refuse those of one claim.
func TestOneClaimForbidden(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	w, _ := r.start()
	good, bad := r.claim("good", "a"), r.claim("bad", "a")
	w.Set([]Claim{ready(good, "a")})
	r.untilEntries("good", entryA)
	r.setRefuse(func(request *http.Request) *apierrors.StatusError {
		if strings.Contains(request.URL.Path, "/bad/") {
			return apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "bad", errors.New("a policy of the namespace"))
		}
		return nil
	})
	w.Set([]Claim{ready(good, "a"), ready(bad, "a")})
	r.until("refusal", func() error {
		if w.Counts().Forbidden == 0 {
			return errors.New("there is none")
		}
		return nil
	})
	w.Set([]Claim{ready(good, "a").lost(), ready(bad, "a")})
	r.untilEntries("good", entryLost)
}

// TestRefusedBeforeTheFirstAnswer: a refusal that comes while the first entries are being stored
// holds up nobody for longer than that takes.
func TestRefusedBeforeTheFirstAnswer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	refused := make(chan struct{})
	r.answered = func(request *http.Request) {
		if strings.Contains(request.URL.Path, "/good/") {
			<-refused
		}
	}
	r.setRefuse(func(request *http.Request) *apierrors.StatusError {
		if strings.Contains(request.URL.Path, "/bad/") {
			return apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "bad", errors.New("a policy of the namespace"))
		}
		return nil
	})
	w, _ := r.start()
	good, bad, later := r.claim("good", "a"), r.claim("bad", "a"), r.claim("later", "a")
	w.Set([]Claim{ready(good, "a")})
	r.untilEntries("good", entryA)
	w.Set([]Claim{ready(good, "a"), ready(bad, "a")})
	r.until("refusal", func() error {
		if w.Counts().Forbidden == 0 {
			return errors.New("there is none")
		}
		return nil
	})
	w.Set([]Claim{ready(good, "a").lost(), ready(bad, "a"), ready(later, "a")})
	close(refused)
	r.untilEntries("good", entryLost)
	r.untilEntries("later", entryA)
}

// TestManyClaims: one request for each claim when it is prepared, none while nothing changes,
// one when all change, and one when they end.
func TestManyClaims(t *testing.T) {
	t.Parallel()
	const number = 200
	r := newRig(t)
	w, _ := r.start()
	var claims, lost []Claim
	for i := range number {
		ref := r.claim(fmt.Sprintf("c%d", i), "a")
		claims, lost = append(claims, ready(ref, "a")), append(lost, ready(ref, "a").lost())
	}
	requests := func(what string, claims []Claim, want string, most int64) {
		t.Helper()
		before, start := r.requests.Load(), time.Now()
		for range 10 {
			w.Set(claims)
		}
		for i := range number {
			r.untilEntries(fmt.Sprintf("c%d", i), want)
		}
		r.until("queue", func() error {
			if n := w.queue.Len(); n > 0 {
				return fmt.Errorf("%d claims wait", n)
			}
			return nil
		})
		made := r.requests.Load() - before
		t.Logf("%s: %d requests for %d claims in %v", what, made, number, time.Since(start).Round(time.Millisecond))
		if made != most {
			t.Errorf("%s: %d requests, want %d", what, made, most)
		}
	}
	requests("prepared", claims, entryA, number)
	requests("nothing new", claims, entryA, 0)
	requests("all lost", lost, entryLost, number)
	requests("unprepared", nil, "", number)
	r.untilRecorded(0)
}
