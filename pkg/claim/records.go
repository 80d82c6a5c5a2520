// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim/journal"
)

// States of journal records, by which they are counted.
const (
	RecordsPreparing   = string(journal.Preparing)
	RecordsPrepared    = string(journal.Prepared)
	RecordsUnpreparing = string(journal.Unpreparing)
	// RecordsEarlier are of another boot of the machine.
	RecordsEarlier = "earlier"
	// RecordsUnreadable are damaged or of another version.
	RecordsUnreadable = "unreadable"
)

// RecordStates are all keys of RecordCounts.
func RecordStates() []string {
	return []string{RecordsPreparing, RecordsPrepared, RecordsUnpreparing, RecordsEarlier, RecordsUnreadable}
}

// RecordCounts counts the records of the journal by their state.
func (m *Manager) RecordCounts() (map[string]int, error) {
	snapshot, err := m.store.Snapshot()
	if err != nil {
		return nil, err
	}
	counts := map[string]int{RecordsEarlier: len(snapshot.Earlier), RecordsUnreadable: len(snapshot.Unreadable)}
	for _, r := range snapshot.Records {
		counts[string(r.State)]++
	}
	return counts, nil
}

// Recorded lists the claims that have a record, whatever its state, also of an earlier boot.
func (m *Manager) Recorded() ([]types.UID, error) { return m.store.UIDs() }

// Changed returns a channel that is closed when this process next changes a record.
func (m *Manager) Changed() <-chan struct{} { return m.store.Changed() }
