// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Record is what the tests read of a journal file. The type is their own, since
// records are files that other versions of the driver read as well.
type Record struct {
	State   string         `json:"state"`
	BootID  string         `json:"bootID"`
	Devices []RecordDevice `json:"devices"`
}

// RecordDevice is one device of a record.
type RecordDevice struct {
	Device     string `json:"device"`
	PCIAddress string `json:"pciAddress"`
	Partition  *struct {
		ProfileID uint32            `json:"profileID"`
		Placement machine.Placement `json:"placement"`
		Live      *struct {
			UUID string `json:"uuid"`
		} `json:"live"`
	} `json:"partition"`
}

// States of a record.
const (
	StatePrepared    = "prepared"
	StateUnpreparing = "unpreparing"
)

// Record reads the record of a claim; nil if there is none.
func (n *Files) Record(uid string) (*Record, error) {
	data, err := os.ReadFile(filepath.Join(n.PluginsDir, DriverName, "claims", uid+".json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	r := &Record{}
	return r, json.Unmarshal(data, r)
}

// checkRecord fails unless the journal says that a claim with one device is
// prepared, with the MIG device of this UUID if it is not empty.
func (n *Files) checkRecord(uid, uuid string) error {
	r, err := n.Record(uid)
	switch {
	case err != nil:
		return err
	case r == nil || r.State != StatePrepared || len(r.Devices) != 1:
		return fmt.Errorf("the journal says %+v of claim %s", r, uid)
	case uuid == "":
		return nil
	}
	p := r.Devices[0].Partition
	if p == nil || p.Live == nil || p.Live.UUID != uuid {
		return fmt.Errorf("the journal of claim %s does not name MIG device %s: %+v", uid, uuid, r)
	}
	return nil
}

// CheckNoFiles fails unless the claim has neither a CDI file nor a record.
func (n *Files) CheckNoFiles(uid string) error {
	for _, dir := range []string{n.CDIDir, filepath.Join(n.PluginsDir, DriverName, "claims")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), uid) {
				return fmt.Errorf("%s is left in %s", e.Name(), filepath.Base(dir))
			}
		}
	}
	return nil
}

// Journal lists the files of the journal.
func (n *Files) Journal(t testing.TB) []string {
	return List(t, filepath.Join(n.PluginsDir, DriverName, "claims"))
}

// WantClaims fails unless exactly these claims have one CDI file and one journal
// file each.
func (n *Files) WantClaims(t testing.TB, uids ...types.UID) {
	t.Helper()
	for what, files := range map[string][]string{"CDI": n.CDISpecs(t), "journal": n.Journal(t)} {
		if len(files) != len(uids) {
			t.Errorf("%s files are %v, want one for each of %v", what, files, uids)
		}
		for _, uid := range uids {
			if !slices.ContainsFunc(files, func(f string) bool { return strings.Contains(f, string(uid)) }) {
				t.Errorf("%s files are %v, none is of claim %s", what, files, uid)
			}
		}
	}
}
