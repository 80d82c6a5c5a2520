// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// tombstoneLife is more than ten times as long as any call lives.
const tombstoneLife = 10 * time.Minute

// tombstones say when claims were released, so that a Prepare that was on its
// way since before comes too late. Whoever reads or writes the one of a claim
// holds that claim's lock.
//
// They need not outlive the machine, because no call does.
type tombstones struct {
	dir string
	// write and remove are os.WriteFile and os.Remove.
	write  func(path string, data []byte, mode fs.FileMode) error
	remove func(path string) error
}

type tombstone struct {
	BootID string `json:"bootID"`
	// Released is the arrival of the call that released the claim, on the
	// clock of bootTime, in nanoseconds.
	Released time.Duration `json:"released"`
}

func newTombstones(dir string) (*tombstones, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("tombstones: %w", err)
	}
	return &tombstones{dir: dir, write: os.WriteFile, remove: os.Remove}, nil
}

func (t *tombstones) path(uid types.UID) string { return filepath.Join(t.dir, string(uid)) }

// read returns nil where there is none. One that makes no sense was cut off with
// its writer, whose call will be repeated.
func (t *tombstones) read(uid types.UID) (*tombstone, error) {
	data, err := os.ReadFile(t.path(uid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("tombstone of claim %s: %w", uid, err)
	}
	var stone tombstone
	if json.Unmarshal(data, &stone) != nil {
		stone = tombstone{}
	}
	return &stone, nil
}

// put says that a call that arrived at that time has released the claim.
func (t *tombstones) put(uid types.UID, boot string, arrived time.Duration) error {
	earlier, err := t.read(uid)
	if err != nil {
		return err
	}
	if earlier != nil && earlier.BootID == boot && earlier.Released >= arrived {
		return nil
	}
	data, err := json.Marshal(tombstone{BootID: boot, Released: arrived})
	if err == nil {
		err = t.write(t.path(uid), data, recordMode)
	}
	if err != nil {
		return fmt.Errorf("tombstone of claim %s: %w", uid, err)
	}
	return nil
}

// pass refuses a call that is older than the claim's release. The tombstone stays
// when a later one passes: the older one may still be on its way.
func (t *tombstones) pass(uid types.UID, boot string, arrived time.Duration) error {
	stone, err := t.read(uid)
	if err != nil || stone == nil {
		return err
	}
	if stone.BootID == boot && arrived < stone.Released {
		return errors.New("the claim was released after this call had arrived; the call is out of date")
	}
	return nil
}

func (t *tombstones) drop(uid types.UID) error {
	if err := t.remove(t.path(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("tombstone of claim %s: %w", uid, err)
	}
	return nil
}

// sweep removes those that no call can be older than. It passes over claims that
// a call is at work on.
func (t *tombstones) sweep(boot string, now time.Duration, tryClaim func(types.UID) (func(), error)) error {
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return fmt.Errorf("tombstones: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		uid := types.UID(entry.Name())
		if checkUID(uid) == nil {
			errs = append(errs, t.sweepOne(uid, boot, now, tryClaim))
		}
	}
	return errors.Join(errs...)
}

func (t *tombstones) sweepOne(uid types.UID, boot string, now time.Duration, tryClaim func(types.UID) (func(), error)) error {
	release, err := tryClaim(uid)
	if err != nil || release == nil {
		return err
	}
	defer release()
	stone, err := t.read(uid)
	if err != nil || stone == nil {
		return err
	}
	if stone.BootID == boot && now-stone.Released < tombstoneLife {
		return nil
	}
	return t.drop(uid)
}
