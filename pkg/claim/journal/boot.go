// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/klog/v2"
)

// bootName is the file with the boot in which the journal was last opened.
const bootName = "boot"

// unknownBoot is the quarantine of an earlier boot whose note is damaged.
const unknownBoot = "unknown-boot"

// enterBoot notes the boot. Whatever is in the folder when the boot has just changed
// was written before, so that a damaged file is about nothing that exists. File times
// would not tell, because clocks are set after the start.
func (s *Store) enterBoot(ctx context.Context) error {
	path := filepath.Join(filepath.Dir(s.dir), bootName)
	data, err := os.ReadFile(path)
	noted := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	last := strings.TrimSpace(string(data))
	if last == s.boot {
		return nil
	}
	if noted {
		if !uidSyntax.MatchString(last) {
			last = unknownBoot // a power loss, and so another boot, has damaged the note
		}
		if err := s.setAsideDamaged(ctx, last); err != nil {
			return err
		}
	}
	err = s.files.Replace(path, []byte(s.boot+"\n"), recordMode)
	if NoSpace(err) {
		// The next start does it. A release must work on a full disk. With the note of
		// an earlier boot the next start would set aside what this boot damages.
		klog.FromContext(ctx).Error(err, "The boot is not noted in the journal", "path", path)
		return s.files.Remove(path)
	}
	return err
}

// setAsideDamaged moves the damaged records of an earlier boot to its quarantine.
func (s *Store) setAsideDamaged(ctx context.Context, boot string) error {
	uids, err := s.UIDs()
	if err != nil {
		return err
	}
	for _, uid := range uids {
		_, err := s.Read(uid)
		var unreadable *UnreadableError
		if !errors.As(err, &unreadable) || errors.Is(err, ErrOtherVersion) {
			continue
		}
		to, err := s.quarantine.put(s.Path(uid), uid, boot)
		if err != nil {
			return fmt.Errorf("set aside the damaged record of claim %s: %w", uid, err)
		}
		klog.FromContext(ctx).Info("Damaged journal file of an earlier boot set aside, nothing of it is left", "claimUID", uid, "path", to)
	}
	return nil
}
