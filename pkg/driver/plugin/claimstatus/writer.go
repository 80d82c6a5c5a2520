// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package claimstatus keeps status.devices of ResourceClaims: what the driver says about the
// devices that the claims of this node have prepared.
//
// The driver's entries are written by server-side apply, so that those of other drivers and
// the rest of the status stay as they are. Nothing waits for it: it can be behind, and it
// catches up. Per claim and change there is one request.
//
// Nobody removes the entries of a claim that is released: when no pod reserves it any more,
// Kubernetes' controller takes away its allocation (syncClaim in pkg/controller/resourceclaim), and
// with that the API server drops them (dropDeallocatedStatusDevices in
// pkg/registry/resource/resourceclaim/strategy.go). Read in 1.37.1; API servers of 1.35.4, 1.36.4 and 1.37.1 were seen to do it.
package claimstatus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/answer"
	"github.com/partage-dev/partage/pkg/util/logchange"
)

// FieldManager owns the driver's entries, whichever instance or version of it wrote them.
const FieldManager = "partage-gpu-kubelet-plugin"

const (
	// firstRetry and lastRetry are the pauses after failures about one claim.
	firstRetry, lastRetry = time.Second, 10 * time.Minute
	// refusedPause is for how long nothing is written in a cluster that has never let the driver write.
	refusedPause = 30 * time.Minute
	// recheckInterval is the time after which the API server's entries are read again, less up to
	// recheckJitter: somebody may have changed them.
	recheckInterval, recheckJitter = time.Hour, 10 * time.Minute
)

var (
	errRefused = errors.New("the driver lacks a permission, or the cluster a feature gate")
	errDropped = errors.New("the API server does not store status.devices: its feature gate DRAResourceClaimDeviceStatus is off")
)

// Options are all mandatory.
type Options struct {
	DriverName string
	// Client has a budget of its own, so that nothing that pods wait for waits for this, and a limit for the time of a request.
	Client kubernetes.Interface
	// Newest reports whether no newer instance of the plugin runs on this node, which would write.
	Newest func() bool
}

// Writer keeps the status of claims as Set was last called with.
type Writer struct {
	Options
	// queue has the claims about which there may be something to do.
	queue workqueue.TypedRateLimitingInterface[types.UID]

	mu sync.Mutex
	// entries are nil while a newer instance writes, and until it is known which claims are prepared.
	entries map[types.UID]*entry

	// What follows is for the goroutine of Run.

	// works says that the cluster has stored an entry. While it never has, nothing is written
	// until paused.
	works   bool
	paused  time.Time
	problem logchange.Problem
}

// New makes a Writer, which does nothing before Run.
func New(o Options) *Writer {
	pauses := workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](firstRetry, lastRetry)
	return &Writer{Options: o, queue: workqueue.NewTypedRateLimitingQueue(pauses)}
}

// Set replaces the wanted entries of all prepared claims. It is called again and again, so that an older instance
// notices when the newer one has ended. It never blocks.
//
// The claims of the first call may have entries already; one that comes later was prepared just now.
func (w *Writer) Set(claims []Claim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.entries
	if w.entries = nil; !w.Newest() {
		return
	}
	w.entries = map[types.UID]*entry{}
	for _, c := range claims {
		e := before[c.Ref.UID]
		if e == nil {
			n := max(1, len(c.Devices))
			e = &entry{budget: rate.NewLimiter(rate.Limit(n)*rate.Every(writeInterval), n*burst)}
			if before != nil {
				e.believe(nil)
			}
		}
		if !reflect.DeepEqual(e.wanted, c) {
			e.wanted = c
			w.queue.Add(c.Ref.UID)
		}
		w.entries[c.Ref.UID] = e
	}
}

// Run writes until ctx ends.
func (w *Writer) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, w.queue.ShutDown)()
	for {
		uid, ended := w.queue.Get()
		if ended {
			return
		}
		w.syncClaim(ctx, uid)
		w.queue.Done(uid)
	}
}

// syncClaim writes one claim's entries if it has to, and queues the claim for when it may have to again.
func (w *Writer) syncClaim(ctx context.Context, uid types.UID) {
	w.mu.Lock()
	e := w.entries[uid]
	var wanted Claim
	if e != nil {
		wanted = e.wanted
	}
	w.mu.Unlock()
	if e == nil || !w.Newest() {
		w.queue.Forget(uid)
		return
	}
	if wait := time.Until(w.paused); wait > 0 {
		w.queue.AddAfter(uid, wait)
		return
	}
	next, err := w.bring(ctx, e, wanted)
	if err != nil {
		e.recheck = time.Time{}
		w.failed(ctx, wanted.Ref, err)
		w.queue.AddRateLimited(uid)
		return
	}
	w.queue.Forget(uid)
	w.queue.AddAfter(uid, time.Until(next))
}

// bring reads and writes one claim's entries, if it has to, and returns when it may have to again.
func (w *Writer) bring(ctx context.Context, e *entry, wanted Claim) (next time.Time, err error) {
	if !time.Now().Before(e.recheck) {
		if err := w.read(ctx, e, wanted.Ref); err != nil {
			return time.Time{}, err
		}
	}
	entries, differs := e.next(w.DriverName, wanted, time.Now())
	switch {
	case !differs || e.gone:
	case e.budget.Tokens() < 1:
		// A moment more, so that it is there in spite of rounding.
		return time.Now().Add(time.Duration((1-e.budget.Tokens())/float64(e.budget.Limit())*float64(time.Second)) + time.Millisecond), nil
	default:
		if err := w.apply(ctx, e, wanted.Ref, entries); err != nil {
			return time.Time{}, err
		}
		e.budget.Allow()
	}
	return e.recheck, nil
}

// read finds out which entries the API server has.
func (w *Writer) read(ctx context.Context, e *entry, ref claim.Ref) error {
	found, err := answer.Claim(ctx, w.Client, ref, metav1.GetOptions{})
	if err != nil {
		return err
	}
	e.gone = found == nil
	e.believe(own(w.DriverName, ptr.Deref(found, resourceapi.ResourceClaim{}).Status.Devices))
	return nil
}

// apply makes the driver's entries of a claim what they have to be.
func (w *Writer) apply(ctx context.Context, e *entry, ref claim.Ref, entries []*resourceapply.AllocatedDeviceStatusApplyConfiguration) error {
	// With the UID another claim of the same name is left alone.
	wanted := resourceapply.ResourceClaim(ref.Name, ref.Namespace).WithUID(ref.UID).WithStatus(resourceapply.ResourceClaimStatus().WithDevices(entries...))
	stored, err := w.Client.ResourceV1().ResourceClaims(ref.Namespace).ApplyStatus(ctx, wanted, metav1.ApplyOptions{FieldManager: FieldManager, Force: true})
	if err == nil {
		e.believe(own(w.DriverName, stored.Status.Devices))
		if len(e.stored) < len(entries) {
			err = errDropped
		}
	}
	if err != nil {
		return fmt.Errorf("write the status of claim %s: %w", ref, err)
	}
	w.works = true
	w.problem.Log(ctx, nil, "", "The status of claims can be written")
	return nil
}

// failed says so. A cluster that has stored an entry before has trouble with this claim only.
func (w *Writer) failed(ctx context.Context, ref claim.Ref, err error) {
	if ctx.Err() != nil {
		return
	}
	// What Kubernetes checks about the drivers of entries (DRAResourceClaimGranularStatusAuthorization) makes an invalid object.
	refused := errors.Is(err, errDropped) || apierrors.IsForbidden(err) || apierrors.HasStatusCause(err, metav1.CauseTypeForbidden)
	if w.works || !refused {
		klog.FromContext(ctx).V(1).Info("Could not bring the status of a claim up to date, will try again", "claim", ref, "reason", err)
		return
	}
	w.paused = time.Now().Add(refusedPause)
	// The error that decides whether it is logged again is the same for all claims.
	w.problem.Log(ctx, errRefused, "The status of claims is not written: everything else works. It is tried again later", "", "pause", refusedPause, "answer", err)
}

// ConditionReady is the type of the condition of a device. Kubernetes proposes it: "If the
// device has been configured according to the class and claim config references, the Ready
// condition should be True."
const ConditionReady = "Ready"

// A claim is written burst times at once for each of its devices, and then once in writeInterval: a device may be
// ready and not ready every few seconds.
const burst, writeInterval = 5, 5 * time.Minute

// Claim is what there is to say about a prepared claim.
type Claim struct {
	Ref     claim.Ref
	Devices []Device
}

// Device is what there is to say about a device.
type Device struct {
	Pool, Device string
	ShareID      *types.UID
	Ready        bool
	// Reason is of the form of a condition's: one word in camel case.
	Reason, Message string
	// Data is a JSON object of up to 10 KiB.
	Data []byte
}

// entry is a claim.
type entry struct {
	wanted Claim
	// stored is what the API server has, which is believed until recheck. gone says that it has no such claim.
	stored  []resourceapi.AllocatedDeviceStatus
	recheck time.Time
	gone    bool
	// budget is for writes.
	budget *rate.Limiter
}

// believe takes what the API server has.
func (e *entry) believe(stored []resourceapi.AllocatedDeviceStatus) {
	e.stored, e.recheck = stored, time.Now().Add(recheckInterval-rand.N(recheckJitter)) //nolint:gosec // no secret
}

// next returns the entries as they have to be, and whether they differ from those that are stored. Somebody else
// may have added to one. A condition that stays keeps its time.
func (e *entry) next(driver string, wanted Claim, now time.Time) (entries []*resourceapply.AllocatedDeviceStatusApplyConfiguration, differs bool) {
	differs = len(e.stored) != len(wanted.Devices)
	for _, d := range wanted.Devices {
		status, since := metav1.ConditionFalse, metav1.NewTime(now.Truncate(time.Second)) // the API has seconds
		if d.Ready {
			status = metav1.ConditionTrue
		}
		var stored resourceapi.AllocatedDeviceStatus
		if at := slices.IndexFunc(e.stored, func(s resourceapi.AllocatedDeviceStatus) bool {
			return s.Pool == d.Pool && s.Device == d.Device && ptr.Equal(s.ShareID, (*string)(d.ShareID))
		}); at >= 0 {
			stored = e.stored[at]
		}
		before := ptr.Deref(meta.FindStatusCondition(stored.Conditions, ConditionReady), metav1.Condition{})
		if before.Status == status {
			since = before.LastTransitionTime
		}
		differs = differs || before.Status != status || before.Reason != d.Reason || before.Message != d.Message || !sameJSON(d.Data, stored.Data)
		entry := resourceapply.AllocatedDeviceStatus().WithDriver(driver).WithPool(d.Pool).WithDevice(d.Device).WithData(runtime.RawExtension{Raw: d.Data}).
			WithConditions(metaapply.Condition().WithType(ConditionReady).WithStatus(status).WithReason(d.Reason).WithMessage(d.Message).WithLastTransitionTime(since))
		entry.ShareID = (*string)(d.ShareID)
		entries = append(entries, entry)
	}
	return entries, differs
}

// own returns the entries of a driver.
func own(driver string, all []resourceapi.AllocatedDeviceStatus) []resourceapi.AllocatedDeviceStatus {
	return slices.DeleteFunc(slices.Clone(all), func(s resourceapi.AllocatedDeviceStatus) bool { return s.Driver != driver })
}

// sameJSON compares what texts mean: the API server may write them anew.
func sameJSON(data []byte, stored *runtime.RawExtension) bool {
	var x, y any
	return stored != nil && json.Unmarshal(data, &x) == nil && json.Unmarshal(stored.Raw, &y) == nil && reflect.DeepEqual(x, y)
}
