// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// releasedLife is more than ten times as long as any call lives.
const releasedLife = 10 * time.Minute

// unwritten is what the disk would not take. Only this process knows it, until a write works.
type unwritten struct {
	released time.Duration
	// cleared are GPUs of the record with this head.
	cleared       []string
	arrived, body int64
}

// overlay adds to an entry what could not be written.
func (s *Store) overlay(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.unwritten[e.uid]
	if u == nil {
		return
	}
	e.pending = true
	e.released = max(e.released, u.released)
	if e.record == nil || u.arrived != int64(e.head.arrived) || u.body != int64(e.head.body) {
		return // another process has written since
	}
	for _, gpu := range u.cleared {
		e.record.Clear(gpu)
	}
	if len(u.cleared) > 0 && !e.record.Marked() {
		e.record = nil
	}
}

func (s *Store) forget(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.unwritten, uid)
}

func (s *Store) remember(uid types.UID, change func(*unwritten)) {
	s.mu.Lock()
	if s.unwritten[uid] == nil {
		s.unwritten[uid] = &unwritten{}
	}
	change(s.unwritten[uid])
	s.mu.Unlock()
	s.changed.send()
}

// Release notes that a call that arrived at that time releases the claim, or wants it released:
// from then on a record that is older than the call reads as Releasing, in all processes. Where
// the disk refuses it is kept in memory, written is false, and the error says why: the caller goes
// on. A record that cannot be read is not touched.
func (s *Store) Release(uid types.UID, arrived time.Duration) (written bool, err error) {
	if err := CheckUID(uid); err != nil {
		return false, err
	}
	unlock, err := s.lock(uid, unix.LOCK_EX)
	if err == nil {
		defer unlock()
		e := s.load(uid)
		if e.released >= arrived && !e.pending {
			return true, nil
		}
		e.released = max(e.released, arrived)
		if e.record != nil && e.record.Arrived < e.released {
			e.record.State = Releasing
		}
		err = s.write(e)
	}
	if err != nil {
		s.remember(uid, func(u *unwritten) { u.released = max(u.released, arrived) })
		return false, fmt.Errorf("release of claim %s is not written down: %w", uid, err)
	}
	return true, nil
}

// Released reports whether the claim was released by a call that arrived after the given time.
func (s *Store) Released(uid types.UID, since time.Duration) bool {
	unlock, err := s.lock(uid, unix.LOCK_SH)
	if err == nil {
		defer unlock()
		return s.load(uid).released > since
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.unwritten[uid]
	return u != nil && u.released > since
}

// Clear notes that nothing is left of the claim on a GPU, or anywhere for "". With the last mark
// the record goes, and those of earlier boots. Where the disk refuses it is kept in memory, and the
// error says why: the caller goes on.
func (s *Store) Clear(uid types.UID, pciAddress string) error {
	unlock, err := s.lock(uid, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	e := s.load(uid)
	if e.err != nil {
		return &UnreadableError{Path: e.path, Err: e.err}
	}
	if e.record != nil {
		e.record.Clear(pciAddress)
		if !e.record.Marked() {
			e.record = nil
		}
		if err = s.write(e); err != nil {
			s.rememberCleared(e, pciAddress)
		}
	}
	if e.record == nil {
		err = errors.Join(err, s.dropEarlier(uid))
	}
	if err != nil {
		return fmt.Errorf("record of claim %s: %w", uid, err)
	}
	return nil
}

func (s *Store) rememberCleared(e *entry, pciAddress string) {
	s.remember(e.uid, func(u *unwritten) {
		if u.arrived != int64(e.head.arrived) || u.body != int64(e.head.body) {
			u.arrived, u.body, u.cleared = int64(e.head.arrived), int64(e.head.body), nil
		}
		u.cleared = append(u.cleared, pciAddress)
	})
}

// Sweep writes what could not be written, and removes what says only when a claim was released
// once no call can be older, and what earlier boots have left besides records.
func (s *Store) Sweep(now time.Duration) error {
	unlock, err := s.lockAll(unix.LOCK_EX)
	if err != nil {
		return fmt.Errorf("records: %w", err)
	}
	defer unlock()
	listed, err := s.list()
	errs := []error{err}
	for uid := range listed.union(s.unwrittenUIDs()) {
		errs = append(errs, s.sweep(uid, now, len(listed.aside[uid]) > 0))
	}
	for _, name := range listed.unfinished {
		errs = append(errs, os.Remove(filepath.Join(s.folder, name)))
	}
	for _, boot := range s.earlierBoots() {
		errs = append(errs, s.sweepBoot(boot))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("records: %w", err)
	}
	return nil
}

func (s *Store) sweep(uid types.UID, now time.Duration, guarded bool) error {
	e := s.load(uid)
	old := e.record == nil && e.err == nil && !guarded && now-e.released >= releasedLife
	switch {
	case old && e.written == nil:
		if err := errors.Join(s.files.Remove(e.path), s.files.Remove(e.path+besideSuffix), s.dropEarlier(uid)); err != nil {
			return err
		}
		s.forget(uid)
	case e.pending, e.beside && e.err == nil:
		return s.write(e)
	}
	return nil
}

// sweepBoot removes what is no record of an earlier boot: nothing that it was about is left.
func (s *Store) sweepBoot(boot string) error {
	folder := filepath.Join(filepath.Dir(s.folder), boot)
	entries, err := os.ReadDir(folder)
	errs := []error{err}
	for _, entry := range entries {
		path := filepath.Join(folder, entry.Name())
		if !entry.IsDir() && s.readFile(path, types.UID(entry.Name()), boot).written == nil {
			errs = append(errs, s.files.Remove(path))
		}
	}
	if len(entries) == 0 && err == nil {
		errs = append(errs, os.Remove(folder))
	}
	return errors.Join(errs...)
}

// dropEarlier removes the records of a claim of earlier boots.
func (s *Store) dropEarlier(uid types.UID) error {
	var errs []error
	for _, boot := range s.earlierBoots() {
		errs = append(errs, s.files.Remove(filepath.Join(filepath.Dir(s.folder), boot, string(uid))))
	}
	return errors.Join(errs...)
}

// earlierBoots are those that have left something. One whose folder cannot be listed blocks nothing.
func (s *Store) earlierBoots() []string {
	entries, _ := os.ReadDir(filepath.Dir(s.folder))
	var boots []string
	for _, entry := range entries {
		if name := entry.Name(); name != s.boot && entry.IsDir() && uidSyntax.MatchString(name) {
			boots = append(boots, name)
		}
	}
	return boots
}

func (s *Store) unwrittenUIDs() []types.UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	var uids []types.UID
	for uid := range s.unwritten {
		uids = append(uids, uid)
	}
	return uids
}

// listing are the files of this boot, by claim.
type listing struct {
	uids       map[types.UID]bool
	aside      map[types.UID][]string
	unfinished []string
}

func (s *Store) list() (listing, error) {
	l := listing{uids: map[types.UID]bool{}, aside: map[types.UID][]string{}}
	entries, err := os.ReadDir(s.folder)
	if absent(err) {
		return l, nil
	}
	for _, entry := range entries {
		name := entry.Name()
		uid := types.UID(strings.TrimSuffix(name, besideSuffix))
		if of, _, isAside := strings.Cut(name, asideInfix); isAside {
			uid = types.UID(of)
			l.aside[uid] = append(l.aside[uid], filepath.Join(s.folder, name))
		}
		switch {
		case CheckUID(uid) == nil:
			l.uids[uid] = true
		case strings.HasPrefix(name, ".") && strings.HasSuffix(name, ".tmp"):
			l.unfinished = append(l.unfinished, name)
		}
	}
	return l, err
}

func (l *listing) union(uids []types.UID) map[types.UID]bool {
	for _, uid := range uids {
		l.uids[uid] = true
	}
	return l.uids
}
