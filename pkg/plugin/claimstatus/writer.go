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
//
//	writer.go  when something is written, and the requests
//	entry.go   how what there is to say about a claim differs from what is stored
package claimstatus

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
)

// FieldManager owns the driver's entries, whichever instance or version of it wrote them.
const FieldManager = "partage-gpu-kubelet-plugin"

const (
	// firstRetry and lastRetry are the pauses after failures about one claim.
	firstRetry, lastRetry = time.Second, 10 * time.Minute
	// refusedPause is for how long nothing is written in a cluster that has never let the driver write.
	refusedPause = 30 * time.Minute
	// recheckInterval is how long what the API server has is believed, less up to
	// recheckJitter: somebody may have changed it.
	recheckInterval, recheckJitter = time.Hour, 10 * time.Minute
	// requestTime bounds one request.
	requestTime = 10 * time.Second
)

var (
	errRefused = errors.New("the driver lacks a permission, or the cluster a feature gate")
	errDropped = errors.New("the API server does not store status.devices: its feature gate DRAResourceClaimDeviceStatus is off")
)

// Options are all mandatory.
type Options struct {
	DriverName string
	// Client has a budget of its own: nothing that pods wait for is to wait for this.
	Client kubernetes.Interface
	// Newest reports whether no newer instance of the plugin runs on this node, which would write.
	Newest func() bool
}

// Writer brings the status of claims to what Set was told last.
type Writer struct {
	Options
	wanted  atomic.Pointer[[]Claim]
	changed loop.Trigger

	// What follows is for the goroutine of Run.

	// entries are nil while a newer instance writes, and until it is known which claims are prepared.
	entries map[types.UID]*entry
	// works says that the cluster has stored an entry, and paused until when it is not asked,
	// because it never has.
	works   bool
	paused  time.Time
	problem logchange.Problem
}

// New makes a Writer, which does nothing before Run.
func New(o Options) *Writer { return &Writer{Options: o, changed: loop.NewTrigger()} }

// Set says what there is to say, of all prepared claims. It is called again and again: an older instance
// looks then whether the newer one has ended. It never blocks.
func (w *Writer) Set(claims []Claim) {
	w.wanted.Store(&claims)
	w.changed.Fire()
}

// Run writes until ctx ends.
func (w *Writer) Run(ctx context.Context) {
	for ctx.Err() == nil {
		var due <-chan time.Time
		first := w.first()
		if first != nil {
			due = time.After(max(time.Until(first.due), time.Until(w.paused)))
		}
		select {
		case <-ctx.Done():
		case <-w.changed:
			w.take()
		case <-due:
			w.bring(ctx, first)
		}
	}
}

// first returns the claim about which there is something to do first, or nil.
func (w *Writer) first() (first *entry) {
	for _, e := range w.entries {
		if first == nil || e.due.Before(first.due) {
			first = e
		}
	}
	return first
}

// take takes what there is to say. A claim that is there from the beginning may have entries; one that
// comes later was prepared just now.
func (w *Writer) take() {
	if !w.Newest() {
		w.entries = nil
		return
	}
	entries := map[types.UID]*entry{}
	for _, c := range *w.wanted.Load() {
		e := w.entries[c.Ref.UID]
		if e == nil {
			e = &entry{}
			if w.entries != nil {
				e.believe(nil)
			}
		}
		entries[c.Ref.UID] = e
		if !reflect.DeepEqual(e.wanted, c) {
			e.wanted = c
			e.schedule()
		}
	}
	w.entries = entries
}

// bring reads or writes one claim's entries.
func (w *Writer) bring(ctx context.Context, e *entry) {
	if !w.Newest() {
		w.entries = nil
		return
	}
	limited, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	do := w.apply
	if !time.Now().Before(e.recheck) {
		do = w.read
	}
	if err := do(limited, e); err != nil && ctx.Err() == nil {
		w.failed(ctx, e, err)
	}
	e.schedule()
}

// read finds out which entries the API server has.
func (w *Writer) read(ctx context.Context, e *entry) error {
	ref := e.wanted.Ref
	found, err := w.Client.ResourceV1().ResourceClaims(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	isMissing := apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
	if err != nil && !isMissing {
		return fmt.Errorf("read claim %s: %w", ref, err)
	}
	e.gone = isMissing || found.UID != ref.UID
	e.believe(own(w.DriverName, found.Status.Devices))
	return nil
}

// apply makes the driver's entries of a claim what they have to be.
func (w *Writer) apply(ctx context.Context, e *entry) error {
	ref := e.wanted.Ref
	entries, _ := e.next(w.DriverName, time.Now())
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
	e.wrote()
	w.problem.Log(ctx, nil, "", "The status of claims can be written")
	return nil
}

// failed says when to try again. A cluster that has stored an entry before has trouble with this claim only.
func (w *Writer) failed(ctx context.Context, e *entry, err error) {
	e.doubt()
	// What Kubernetes checks about the drivers of entries (DRAResourceClaimGranularStatusAuthorization) makes an invalid object.
	refused := errors.Is(err, errDropped) || apierrors.IsForbidden(err) || apierrors.HasStatusCause(err, metav1.CauseTypeForbidden)
	if w.works || !refused {
		klog.FromContext(ctx).V(1).Info("Could not bring the status of a claim up to date, will try again", "claim", e.wanted.Ref, "reason", err)
		return
	}
	w.paused = time.Now().Add(refusedPause)
	// The error that decides whether it is logged again is the same for all claims.
	w.problem.Log(ctx, errRefused, "The status of claims is not written: everything else works. It is tried again later", "", "pause", refusedPause, "answer", err)
}
