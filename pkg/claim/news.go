// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// Events tells people what happened to a claim.
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

// news tells things once. What has been told is kept in memory only: a new
// process may tell it once more.
type news struct {
	events Events

	mu sync.Mutex
	// told is the last message for each claim and reason.
	told map[types.UID]map[string]string
}

// tell passes on what is not the same as the last time.
func (n *news) tell(ctx context.Context, claim Ref, reason, message string) {
	n.mu.Lock()
	old := n.told[claim.UID][reason] == message
	if !old {
		if n.told == nil {
			n.told = map[types.UID]map[string]string{}
		}
		if n.told[claim.UID] == nil {
			n.told[claim.UID] = map[string]string{}
		}
		n.told[claim.UID][reason] = message
	}
	n.mu.Unlock()
	if !old && n.events != nil {
		n.events.Warn(ctx, claim, reason, message)
	}
}

// again passes on what may happen more than once in the same words.
func (n *news) again(ctx context.Context, claim Ref, reason, message string) {
	if n.events != nil {
		n.events.Warn(ctx, claim, reason, message)
	}
}

// keep forgets what was told of all other claims.
func (n *news) keep(uids []types.UID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for uid := range n.told {
		if !slices.Contains(uids, uid) {
			delete(n.told, uid)
		}
	}
}

// load reads the record of a claim whose lock the caller holds, and tells people
// when it cannot be read.
func (m *Manager) load(ctx context.Context, uid types.UID, boot string) (*Record, error) {
	r, err := m.journal.load(ctx, uid, boot)
	var corrupt *CorruptError
	switch {
	case errors.As(err, &corrupt):
		m.news.tell(ctx, Ref{UID: uid}, ReasonDamagedRecord, fmt.Sprintf(
			"The journal file of the claim was damaged (%v) and is now %s. When the claim is prepared again all is well. "+
				"Otherwise partitions of it may be left on this node: once no pod uses them, remove them with "+
				"nvidia-smi mig -dci and -dgi and then remove the file, or restart the node.", corrupt.Err, corrupt.Path))
	case errors.Is(err, errOtherVersion):
		m.news.tell(ctx, Ref{UID: uid}, ReasonOtherVersion, fmt.Sprintf(
			"%v. Only the version of the driver that wrote the file can prepare or release the claim.", err))
	}
	return r, err
}
