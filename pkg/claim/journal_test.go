// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/host"
)

// TestOldRecordIsRecognised shows that a record of an older version that lacks newer
// fields is still the same claim: it must not be torn down under running pods.
func TestOldRecordIsRecognised(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	r, err := m.store.Read("u1")
	if err != nil {
		t.Fatal(err)
	}
	r.Devices[0].DynamicMIG, r.Devices[0].CDIDevice, r.Devices[0].Partition.Profile = false, "", ""
	if err := m.store.Save(r); err != nil {
		t.Fatal(err)
	}
	b.hooks(nil, nil)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	if diff := cmp.Diff([]string{"write spec", "write prepared"}, b.effects); diff != "" {
		t.Errorf("effects: -want +got:\n%s", diff)
	}
}

// TestReconcileRemovesUnfinishedRecord removes what a process leaves that is killed
// while it writes its first record.
func TestReconcileRemovesUnfinishedRecord(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	write(t, host.TemporaryName(m.store.Path("u1")), `{"apiV`)
	mustReconcile(t, m)
	b.wantNothing()
}
