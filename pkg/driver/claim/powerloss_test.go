// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// powerLosses are what a power loss may leave of a file of which the disk was not waited for.
var powerLosses = map[string]func(path string, was []byte) error{
	"lost":      func(path string, _ []byte) error { return os.Remove(path) },
	"empty":     func(path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) },
	"zeros":     func(path string, was []byte) error { return os.WriteFile(path, make([]byte, len(was)), 0o600) },
	"half":      func(path string, was []byte) error { return os.WriteFile(path, was[:len(was)/2], 0o600) },
	"untouched": func(path string, was []byte) error { return os.WriteFile(path, was, 0o600) },
	"as it was before": func(path string, was []byte) error {
		return os.WriteFile(path, []byte(rehead(string(was), "state=prepared ", "state=preparing")), 0o600)
	},
	"not finished": func(path string, was []byte) error {
		temporary := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
		return errors.Join(os.Remove(path), os.WriteFile(temporary, was[:len(was)/2], 0o600))
	},
}

// No record waits for the disk. Whatever a power loss leaves of it, nothing is
// left of claims, none is in the way of another, and all can be prepared again.
func TestPowerLoss(t *testing.T) {
	cases := 0
	for layoutName, l := range layouts {
		for lossName, lose := range powerLosses {
			t.Run(layoutName+"/"+lossName, func(t *testing.T) {
				b, _ := scene(t, l)
				claims := l.newClaims()
				for _, claim := range claims {
					mustPrepare(t, b.manager(), claim)
				}
				uids := []types.UID{"beside"}
				for _, claim := range claims {
					uids = append(uids, claim.UID)
				}
				for _, uid := range uids {
					spoil(t, b.store().Path(uid), lose)
				}
				b.boot("boot-2")
				want := b.hardware()

				m := b.manager()
				mustReconcile(t, m)
				for _, claim := range claims {
					mustPrepare(t, m, claim)
				}
				for _, uid := range uids {
					mustUnprepare(t, m, uid)
				}
				b.wantState(t, "released", want)
				if snapshot := m.store.Snapshot(); len(snapshot.Guards) > 0 {
					t.Errorf("damaged records count in the next boot: %+v", snapshot.Guards)
				}
				cases++
			})
		}
	}
	wantCases(t, cases, len(layouts)*len(powerLosses))
}

// spoil changes a file that may not be there.
func spoil(t *testing.T, path string, lose func(path string, was []byte) error) {
	t.Helper()
	was, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = lose(path, was)
	}
	if err != nil {
		t.Fatal(err)
	}
}
