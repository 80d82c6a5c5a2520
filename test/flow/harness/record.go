// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// Record is what the tests read of a record. The type is their own, since
// records are files that other versions of the driver read as well.
type Record struct {
	// State and Marks are in the first line, BootID is in the name of the file.
	State, Marks, BootID string `json:"-"`

	Devices []RecordDevice `json:"devices"`
}

// RecordDevice is one device of a record.
type RecordDevice struct {
	Device     string `json:"device"`
	PCIAddress string `json:"pciAddress"`
	Partition  *struct {
		ProfileID uint32            `json:"profileID"`
		Placement machine.Placement `json:"placement"`
		Made      *struct {
			UUID string `json:"uuid"`
		} `json:"made"`
	} `json:"partition"`
}

// States of a record.
const (
	StatePrepared  = "prepared"
	StateReleasing = "releasing"
)

// RecordsDir is where the driver keeps records.
func (n *Files) RecordsDir() string { return filepath.Join(n.PluginsDir, DriverName, "records") }

// Record reads the record of a claim; nil if there is none.
func (n *Files) Record(uid string) (*Record, error) {
	path, err := n.RecordPath(uid)
	if err != nil || path == "" {
		return nil, err
	}
	return ReadRecord(path)
}

// RecordPath is where the record of a claim is, or nothing where there is none. Of several files the one counts that was
// written last: the others are of an earlier boot, or cannot be read.
func (n *Files) RecordPath(uid string) (newest string, err error) {
	paths, err := filepath.Glob(filepath.Join(n.RecordsDir(), uid+".*"))
	var written time.Time
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil && !info.ModTime().Before(written) {
			newest, written = path, info.ModTime()
		}
	}
	return newest, err
}

var recordHead = regexp.MustCompile(`^partage-claim-record/1 state=(\S+) .*marks=\[([^]]*)\]`)

// ReadRecord reads a file. It returns nil for one that says only when the claim was released.
func ReadRecord(path string) (*Record, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	line, body, _ := bytes.Cut(data, []byte("\n"))
	head := recordHead.FindSubmatch(line)
	if head == nil {
		return nil, fmt.Errorf("%s begins with %q", path, line)
	}
	r := &Record{State: string(head[1]), Marks: string(head[2]), BootID: strings.Split(filepath.Base(path), ".")[1]}
	if r.State == "released" {
		return nil, nil
	}
	return r, json.Unmarshal(body, r)
}

// checkRecord fails unless its record says that a claim with one device is
// prepared, with the MIG device of this UUID if it is not empty.
func (n *Files) checkRecord(uid, uuid string) error {
	r, err := n.Record(uid)
	switch {
	case err != nil:
		return err
	case r == nil || r.State != StatePrepared || len(r.Devices) != 1:
		return fmt.Errorf("its record says %+v of claim %s", r, uid)
	case uuid == "":
		return nil
	}
	p := r.Devices[0].Partition
	if p == nil || p.Made == nil || p.Made.UUID != uuid {
		return fmt.Errorf("the record of claim %s does not name MIG device %s: %+v", uid, uuid, r)
	}
	return nil
}

// CheckNoFiles fails unless the claim has neither a CDI file nor a record.
func (n *Files) CheckNoFiles(uid string) error {
	entries, err := os.ReadDir(n.CDIDir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.Contains(e.Name(), uid) {
			return fmt.Errorf("%s is left in %s", e.Name(), filepath.Base(n.CDIDir))
		}
	}
	r, err := n.Record(uid)
	if err == nil && r != nil {
		err = fmt.Errorf("the record of claim %s is left: %+v", uid, r)
	}
	if err != nil {
		return err
	}
	return nil
}

// Records lists the files of records, without those that say only when a claim was released.
func (n *Files) Records(t testing.TB) []string {
	t.Helper()
	return slices.DeleteFunc(List(t, n.RecordsDir()), func(name string) bool {
		if strings.HasPrefix(name, ".") {
			return true
		}
		r, err := ReadRecord(filepath.Join(n.RecordsDir(), name))
		return err == nil && r == nil
	})
}

// WantClaims fails unless exactly these claims have one CDI file and one record each.
func (n *Files) WantClaims(t testing.TB, uids ...types.UID) {
	t.Helper()
	for what, files := range map[string][]string{"CDI": n.CDISpecs(t), "record": n.Records(t)} {
		expect.Equal(t, len(files), len(uids), what, files, "for", uids)
		for _, uid := range uids {
			if !slices.ContainsFunc(files, func(f string) bool { return strings.Contains(f, string(uid)) }) {
				t.Errorf("%s files are %v, none is of claim %s", what, files, uid)
			}
		}
	}
}
