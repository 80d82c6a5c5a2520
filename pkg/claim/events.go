// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// Events are what people read about a claim.
type Events interface {
	// Warn must not block. The claim may have nothing but a UID.
	Warn(ctx context.Context, claim Ref, reason, message string)
}

// Reasons of events.
const (
	// ReasonDamagedRecord: the journal file of a claim cannot be understood.
	ReasonDamagedRecord = "DamagedClaimRecord"
	// ReasonOtherVersion: the journal file of a claim is another version's.
	ReasonOtherVersion = "ClaimRecordOfOtherVersion"
	// ReasonOrphanReleased: a claim that does not exist any more was released.
	ReasonOrphanReleased = "OrphanedClaimReleased"
	// ReasonOrphanInUse: a claim that does not exist any more is kept, because
	// processes use its devices.
	ReasonOrphanInUse = "OrphanedClaimInUse"
	// ReasonMPSLost: the processes of a claim have lost their MPS server.
	ReasonMPSLost = "MPSServerLost"
	// ReasonPartitionGone: a partition of a claim does not exist any more.
	ReasonPartitionGone = "PartitionGone"
)

// eventLog repeats nothing that it said. It is in memory only: a new process may say
// it once more.
type eventLog struct {
	events Events

	mu sync.Mutex
	// last is what the last message was about, for each claim and reason.
	last map[types.UID]map[string]string
}

// once passes on a message unless the last one for the same reason was about the same
// thing, in whatever words: process IDs change.
func (l *eventLog) once(ctx context.Context, claim Ref, reason, about, message string) {
	l.mu.Lock()
	last, known := l.last[claim.UID][reason]
	same := known && last == about
	if !same {
		if l.last == nil {
			l.last = map[types.UID]map[string]string{}
		}
		if l.last[claim.UID] == nil {
			l.last[claim.UID] = map[string]string{}
		}
		l.last[claim.UID][reason] = about
	}
	l.mu.Unlock()
	if !same {
		l.always(ctx, claim, reason, message)
	}
}

// always passes on what may happen more than once in the same words.
func (l *eventLog) always(ctx context.Context, claim Ref, reason, message string) {
	if l.events != nil {
		l.events.Warn(ctx, claim, reason, message)
	}
}

// retain forgets all other claims.
func (l *eventLog) retain(uids []types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	keepOnly(l.last, uids)
}
