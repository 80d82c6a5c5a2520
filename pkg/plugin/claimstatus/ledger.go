// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claimstatus

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/host"
)

// ledger is a folder with a file for each claim that may have entries of this driver: the
// process that wrote them may not be there when they have to go, and no claim is found by
// asking the API server for all of the cluster.
//
// It is not synced to disk: whoever syncs makes others wait that write to the same file system, such
// as the next call for a claim. A power loss may take the notes of its last seconds. Claims that go
// on are prepared and noted anew, and the API server drops the entries of one that ends together
// with its allocation.
type ledger struct{ dir string }

// read returns the claims. Files that cannot be understood are removed: nothing can be done
// with them. What is no file is not the driver's.
func (l ledger) read() (map[types.UID]claim.Ref, error) {
	files, err := os.ReadDir(l.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("claims that have a status: %w", err)
	}
	claims := map[types.UID]claim.Ref{}
	for _, file := range files {
		if !file.Type().IsRegular() {
			continue
		}
		path := filepath.Join(l.dir, file.Name())
		data, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("claim that has a status: %w", err)
		}
		var ref claim.Ref
		if json.Unmarshal(data, &ref) != nil || string(ref.UID) != file.Name() {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("claim that has a status: %w", err)
			}
			continue
		}
		claims[ref.UID] = ref
	}
	return claims, nil
}

// add writes down a claim.
func (l ledger) add(ref claim.Ref) error {
	data, err := json.Marshal(ref)
	if err == nil {
		err = os.MkdirAll(l.dir, 0o750)
	}
	if err == nil {
		err = host.ReplaceUnsynced(l.path(ref.UID), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("note that claim %s has a status: %w", ref, err)
	}
	return nil
}

// remove succeeds where there is no such claim.
func (l ledger) remove(uid types.UID) error {
	if err := host.RemoveUnsynced(l.path(uid)); err != nil {
		return fmt.Errorf("note that claim %s has no status: %w", uid, err)
	}
	return nil
}

// path needs a UID that is one, as those of the journal are.
func (l ledger) path(uid types.UID) string { return filepath.Join(l.dir, string(uid)) }
