// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"golang.org/x/time/rate"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	metaapply "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceapply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// ConditionReady is the type of the condition of a device. Kubernetes proposes it: "If the
// device has been configured according to the class and claim config references, the Ready
// condition should be True."
const ConditionReady = "Ready"

// A claim is written burst times at once, and then once in writeInterval: a device may be ready
// and not ready every few seconds.
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

func newEntry() *entry { return &entry{budget: rate.NewLimiter(rate.Every(writeInterval), burst)} }

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
