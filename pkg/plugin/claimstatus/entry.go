// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"bytes"
	"cmp"
	"encoding/json"
	"reflect"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim"
)

// ConditionReady is the type of the condition of a device. Kubernetes proposes it: "If the
// device has been configured according to the class and claim config references, the Ready
// condition should be True."
const ConditionReady = "Ready"

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

// entry is what is wanted for a claim and what is known of it.
type entry struct {
	ref claim.Ref
	// wanted is nil for a claim that is not prepared.
	wanted *Claim
	// removing says that it is known to be removed.
	removing bool
	// recorded says that the ledger has the claim: entries may have been written.
	recorded bool
	// known says that stored are the entries that the API server has.
	known  bool
	stored []resourceapi.AllocatedDeviceStatus
	// recheck is when stored is not believed any more.
	recheck time.Time
	// gone says that there is no such claim any more.
	gone bool
}

// want takes what there is to say, and reports whether it is something else.
func (e *entry) want(c Claim) (changed bool) {
	e.removing = false
	if e.wanted != nil && reflect.DeepEqual(*e.wanted, c) {
		return false
	}
	e.ref, e.wanted = c.Ref, &c
	return true
}

// release notes that the claim is not prepared, and reports whether that is new.
func (e *entry) release() bool {
	if e.removing {
		return false
	}
	e.wanted, e.removing = nil, true
	return true
}

// next returns the entries as they have to be. A condition that stays keeps its time.
func (e *entry) next(driver string, now time.Time) []resourceapi.AllocatedDeviceStatus {
	var entries []resourceapi.AllocatedDeviceStatus
	for _, d := range e.wanted.Devices {
		one := resourceapi.AllocatedDeviceStatus{
			Driver: driver, Pool: d.Pool, Device: d.Device, ShareID: (*string)(d.ShareID),
			Data: &runtime.RawExtension{Raw: d.Data},
		}
		if at := slices.IndexFunc(e.stored, func(s resourceapi.AllocatedDeviceStatus) bool { return keyOf(&s) == keyOf(&one) }); at >= 0 {
			if before := meta.FindStatusCondition(e.stored[at].Conditions, ConditionReady); before != nil {
				one.Conditions = []metav1.Condition{*before}
			}
		}
		status := metav1.ConditionFalse
		if d.Ready {
			status = metav1.ConditionTrue
		}
		meta.SetStatusCondition(&one.Conditions, metav1.Condition{
			Type: ConditionReady, Status: status, Reason: d.Reason, Message: d.Message,
			// The API has seconds.
			LastTransitionTime: metav1.NewTime(now.Truncate(time.Second)),
		})
		entries = append(entries, one)
	}
	return entries
}

// key identifies an entry among those of one driver.
type key struct{ pool, device, share string }

func keyOf(s *resourceapi.AllocatedDeviceStatus) key {
	return key{s.Pool, s.Device, ptr.Deref(s.ShareID, "")}
}

// own returns copies of the entries of a driver.
func own(driver string, all []resourceapi.AllocatedDeviceStatus) []resourceapi.AllocatedDeviceStatus {
	var entries []resourceapi.AllocatedDeviceStatus
	for i := range all {
		if all[i].Driver == driver {
			entries = append(entries, *all[i].DeepCopy())
		}
	}
	return entries
}

// same reports whether two lists say the same, in whatever order. Somebody else may have added
// to an entry.
func same(next, stored []resourceapi.AllocatedDeviceStatus) bool {
	if len(next) != len(stored) {
		return false
	}
	byKey := func(a, b resourceapi.AllocatedDeviceStatus) int {
		x, y := keyOf(&a), keyOf(&b)
		return cmp.Or(cmp.Compare(x.pool, y.pool), cmp.Compare(x.device, y.device), cmp.Compare(x.share, y.share))
	}
	next, stored = slices.SortedFunc(slices.Values(next), byKey), slices.SortedFunc(slices.Values(stored), byKey)
	for i := range next {
		is, was := &next[i], &stored[i]
		ready, before := meta.FindStatusCondition(is.Conditions, ConditionReady), meta.FindStatusCondition(was.Conditions, ConditionReady)
		if keyOf(is) != keyOf(was) || before == nil || was.Data == nil || !sameJSON(is.Data.Raw, was.Data.Raw) {
			return false
		}
		if ready.Status != before.Status || ready.Reason != before.Reason || ready.Message != before.Message {
			return false
		}
	}
	return true
}

// sameJSON compares what texts mean: the API server may write them anew.
func sameJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	return apiequality.Semantic.DeepEqual(x, y)
}
