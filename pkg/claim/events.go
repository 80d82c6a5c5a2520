// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/converge"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
)

// Events are what people read about a claim.
type Events interface {
	// Warn must not block. The claim may have nothing but a UID.
	Warn(ctx context.Context, claim Ref, reason, message string)
	// WarnUsers also tells the pods that use the claim. It must not block.
	WarnUsers(ctx context.Context, claim Ref, reason, message string)
}

// Reasons of events.
const (
	// ReasonDamagedRecord: the record of a claim cannot be read.
	ReasonDamagedRecord = "DamagedClaimRecord"
	// ReasonOrphanReleased: a claim that does not exist any more was released.
	ReasonOrphanReleased = "OrphanedClaimReleased"
	// ReasonOrphanInUse: a claim that does not exist any more is kept, because
	// processes use its devices.
	ReasonOrphanInUse = "OrphanedClaimInUse"
	// ReasonMPSLost: the processes of a claim have lost their MPS server.
	ReasonMPSLost = "MPSServerLost"
	// ReasonMPSClientKilled: a client of a claim's MPS server was killed, and the others go
	// on with a server whose state is undefined.
	ReasonMPSClientKilled = "MPSClientKilled"
	// ReasonPartitionGone: a partition of a claim does not exist any more.
	ReasonPartitionGone = "PartitionGone"
)

// forUsers are the reasons of events that concern the pods of a claim.
var forUsers = []string{ReasonMPSLost, ReasonMPSClientKilled, ReasonPartitionGone}

// repeatAfter is when to say again what is still so: API servers keep events for an hour
// by default.
const repeatAfter = 45 * time.Minute

// eventLog says something once, and then again before people can no longer read it. It is
// in memory only: a new process may say it once more.
type eventLog struct {
	events Events
	store  *record.Store

	mu   sync.Mutex
	last map[lastKey]said
}

// lastKey is what there is one last message for.
type lastKey struct {
	claim  types.UID
	reason string
}

// said is what a message was about, and when there was one.
type said struct {
	about string
	at    time.Time
}

// once passes on a message unless the last one for the same reason was about the same
// thing, in whatever words, and not long ago: process IDs change.
func (l *eventLog) once(ctx context.Context, claim Ref, reason, about, message string) {
	l.mu.Lock()
	key := lastKey{claim.UID, reason}
	last, known := l.last[key]
	same := known && last.about == about && time.Since(last.at) < repeatAfter
	if !same {
		if l.last == nil {
			l.last = map[lastKey]said{}
		}
		l.last[key] = said{about, time.Now()}
	}
	l.mu.Unlock()
	if !same {
		l.always(ctx, claim, reason, message)
	}
}

// always passes on a message of which it is written down that it was told.
func (l *eventLog) always(ctx context.Context, claim Ref, reason, message string) {
	switch {
	case l.events == nil:
	case slices.Contains(forUsers, reason):
		l.events.WarnUsers(ctx, claim, reason, message)
	default:
		l.events.Warn(ctx, claim, reason, message)
	}
}

// tell lets people know what has become of claims.
func (l *eventLog) tell(ctx context.Context, said *converge.Said) {
	for _, s := range said.Statements {
		switch s.Reason {
		case rules.PartitionGone:
			l.once(ctx, l.ref(s.Claim), ReasonPartitionGone, s.Device,
				fmt.Sprintf("Device %s: %s. Containers cannot use it any more: delete the pods of the claim.", s.Device, s.Text))
		case rules.OrphanInUse:
			l.once(ctx, l.ref(s.Claim), ReasonOrphanInUse, "", s.Text)
		case rules.RecordUnreadable:
			l.once(ctx, Ref{UID: s.Claim}, ReasonDamagedRecord, s.Text, "The record of the claim cannot be read. "+s.Text)
		}
	}
}

// ref names a claim as its record does.
func (l *eventLog) ref(uid types.UID) Ref {
	if uid != "" {
		if r, err := l.store.Read(uid); err == nil && r != nil {
			return r.Claim
		}
	}
	return record.Ref{UID: uid}
}

// retain forgets all other claims.
func (l *eventLog) retain(uids []types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.last, func(key lastKey, _ said) bool { return !slices.Contains(uids, key.claim) })
}
