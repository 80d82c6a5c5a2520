// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
)

// Ref names a claim.
type Ref = record.Ref

// Events take what has happened to claims.
type Events interface {
	// Warn tells people about a claim, and the pods that use it. It must not block.
	Warn(ctx context.Context, claim Ref, reason, message string)
}

// Statement is something about a claim that holds now, and that people should know.
type Statement struct {
	// Claim may have nothing but a UID.
	Claim Ref
	// Reason is one of events.
	Reason string
	// Device is what it is about, or empty.
	Device, Text string
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
	// ReasonPartitionGone: a partition of a claim does not exist any more.
	ReasonPartitionGone = "PartitionGone"
)

// eventReasons are what statements about claims are as events.
var eventReasons = map[rules.Reason]string{rules.PartitionGone: ReasonPartitionGone, rules.RecordUnreadable: ReasonDamagedRecord}
