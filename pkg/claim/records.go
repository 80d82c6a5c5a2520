// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/record"
)

// States of records, by which they are counted.
const (
	RecordsPreparing = string(record.Preparing)
	RecordsPrepared  = string(record.Prepared)
	RecordsReleasing = string(record.Releasing)
	// RecordsEarlier are of another boot of the machine.
	RecordsEarlier = "earlier"
	// RecordsUnreadable are damaged or of another version.
	RecordsUnreadable = "unreadable"
)

// RecordStates are all keys of RecordCounts.
func RecordStates() []string {
	return []string{RecordsPreparing, RecordsPrepared, RecordsReleasing, RecordsEarlier, RecordsUnreadable}
}

// RecordCounts counts the records by their state. With an error there may be more.
func (m *Manager) RecordCounts() (map[string]int, error) {
	snapshot := m.store.Snapshot()
	counts := map[string]int{RecordsEarlier: len(snapshot.Earlier), RecordsUnreadable: len(snapshot.Guards)}
	for _, r := range snapshot.Records {
		counts[string(r.State)]++
	}
	return counts, snapshot.Err
}

// Recorded lists the claims that have a record, whatever its state, also of an earlier boot. With an error there may be more.
func (m *Manager) Recorded() ([]types.UID, error) { return m.store.UIDs() }

// Changed returns a channel that is closed when this process next changes a record.
func (m *Manager) Changed() <-chan struct{} { return m.store.Changed() }
